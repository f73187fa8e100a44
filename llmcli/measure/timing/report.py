"""Where the time goes: the two phases of a run, measured, told apart and held against the roof."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from llmcli.anatomy import activations
from llmcli.anatomy.counts import memory_need
from llmcli.anatomy.spec import Call, Logits
from llmcli.anatomy.work import (
    Works,
    added,
    calls_work,
    decode_calls,
    prompt_calls,
    total_work,
)
from llmcli.measure.timing.bounds import Roof
from llmcli.measure.timing.checks import timing_checks
from llmcli.measure.timing.parts import (
    GAPS,
    expected_marks,
    over_layers,
    part_times,
    pieces,
    spans,
)
from llmcli.measure.timing.run import Job, PhaseName, Progress, Runs, run_pairs
from llmcli.measure.timing.unfused import measure_splits
from llmcli.model import Model, dtype_name
from llmcli.ops import processor
from llmcli.reports.ceilings import Ceilings
from llmcli.reports.timing import Overhead, PartTime, PhaseTime, Stage, TimingReport

BOTH: tuple[PhaseName, ...] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run: the model, `batch` prompts of `tokens` tokens each, and the new ones."""

    model: Model
    batch: int
    tokens: int
    new_tokens: int

    def calls(self, phase: PhaseName) -> Iterator[tuple[Call, Logits]]:
        """The forward calls of a phase."""
        if phase == "decode":
            return decode_calls(batch=self.batch, tokens=self.new_tokens, past=self.tokens)
        return prompt_calls(batch=self.batch, tokens=self.tokens)

    def works(self, phase: PhaseName) -> Works:
        """What each part in each layer takes in all of them, with the bytes that weights have."""
        weights = {name: slot.nbytes for name, slot in self.model.decoder.slots.items()}
        return calls_work(
            self.model.config, self.calls(phase), dtype=self.dtype, weight_bytes=weights
        )

    def flops(self, phase: PhaseName) -> int:
        """Of all its calls, added up from each as a whole."""
        return sum(
            total_work(self.model.config, call, dtype=self.dtype, logits=logits).flops
            for call, logits in self.calls(phase)
        )

    def marks(self, phase: PhaseName) -> tuple[str, ...]:
        """The marks that a run of it makes."""
        names = {
            logits: [
                spec.name
                for spec in activations(
                    self.model.config, batch=1, tokens=1, past=0, phase=phase, logits=logits
                )
            ]
            for logits in {logits for _, logits in self.calls(phase)}
        }
        return expected_marks(
            (names[logits] for _, logits in self.calls(phase)), chooses=phase == "decode"
        )

    @property
    def dtype(self) -> str:
        """The arithmetic, as reports have it."""
        return dtype_name(self.model.dtype)


def working_set(model: Model, *, tokens: int, batch: int = 1) -> int:
    """Bytes that one step after `tokens` tokens streams: weights, and keys and values it reads.

    What is not larger than a cache stays in it from one step to the next.
    """
    weights = {name: slot.nbytes for name, slot in model.decoder.slots.items()}
    call = Call(batch=batch, tokens=1, past=max(0, tokens - 1), phase="decode")
    work = total_work(model.config, call, dtype=dtype_name(model.dtype), weight_bytes=weights)
    return work.weights + work.cache


def measure_timing(
    model: Model,
    ids: Sequence[int],
    *,
    new_tokens: int,
    pairs: int,
    batch: int = 1,
    ceilings: Ceilings,
    stages: Sequence[Stage],
    phases: Sequence[PhaseName] = BOTH,
    base: int | None = None,
    unfused: bool = False,
    trace: bool = False,
    progress: Progress | None = None,
) -> TimingReport:
    """Reads `batch` times the prompt and writes `new_tokens` greedy tokens after it, end or not.

    Each of `phases` runs `pairs` times with a clock and as often without (decoding only where
    there are new tokens). `trace` keeps the spans; `unfused` computes what fused kernels do in
    pieces too, in a run of its own. `ceilings`, `stages` and `base` are measured by the caller.
    Raises OutOfMemory where the cache does not fit, NotFinite for logits with a NaN.
    """
    plan = Plan(model=model, batch=batch, tokens=len(ids), new_tokens=new_tokens)
    chosen = [name for name in BOTH if name in phases and (name == "prefill" or new_tokens)]
    if not chosen or pairs < 1:
        raise ValueError("there is nothing to time")
    step = working_set(model, tokens=len(ids) + new_tokens, batch=batch)
    roof = Roof(
        ceilings=ceilings, dtype=plan.dtype, working_set=step, apart=model.device.type != "cpu"
    )
    with _current(model.device):
        job = Job(model, ids, new_tokens=new_tokens, batch=batch)
        runs = {name: run_pairs(job, name, pairs, progress=progress) for name in chosen}
        timed = tuple(_phase(plan, name, run, roof, trace=trace) for name, run in runs.items())
        splits, split_checks = measure_splits(job, timed, progress) if unfused else ((), ())
    checks = timing_checks(
        timed,
        runs,
        {name: plan.marks(name) for name in chosen},
        {name: plan.flops(name) for name in chosen},
    )
    need = memory_need(
        model.config, dtype=plan.dtype, batch=batch, context=len(ids) + new_tokens,
        cuda=model.device.type == "cuda",
        native=plan.dtype == "bfloat16" and processor.has_bfloat16(),
        tokenizer=0 if model.tokenizer is None else model.tokenizer.vocab_size,
    )  # fmt: skip
    return TimingReport(
        prompt_tokens=len(ids),
        batch=batch,
        dtype=plan.dtype,
        stages=tuple(stages),
        phases=timed,
        ceilings=ceilings,
        base=base,
        peak=_most(stages, timed),
        estimated=need.together,  # no sequence ends before the others
        weight_bytes=model.weight_bytes,
        working_set=step,
        checks=checks + split_checks,
        splits=splits,
    )


def _most(stages: Sequence[Stage], phases: Sequence[PhaseTime]) -> int | None:
    """Bytes held at most in any of them: the ceilings took memory too, which no run does."""
    peaks = [stage.peak for stage in stages] + [phase.peak for phase in phases]
    return max((peak for peak in peaks if peak is not None), default=None)


def _phase(plan: Plan, name: PhaseName, runs: Runs, roof: Roof, *, trace: bool) -> PhaseTime:
    works = plan.works(name)
    run = list(pieces(runs.median.marks))
    parts = part_times(run, works)
    totals = over_layers(parts)
    count = sum(1 for _ in plan.calls(name))
    each = plan.tokens if name == "prefill" else plan.new_tokens
    return PhaseTime(
        name=name,
        tokens=plan.batch * each,
        past=0 if name == "prefill" else plan.tokens,
        calls=count,
        seconds=runs.median.wall_s,
        bare_s=median(runs.bare_s),
        parts=_bounded(parts, roof),
        totals=_bounded(totals, roof),
        gaps_s=sum(part.seconds for part in totals if part.part == GAPS),
        work=added(works),
        overhead=overhead(runs.watched_s, runs.bare_s),
        peak=runs.peak,
        spans=tuple(spans(name, run)) if trace else (),
    )


def _bounded(parts: Sequence[PartTime], roof: Roof) -> tuple[PartTime, ...]:
    return tuple(roof.bounded(part) for part in parts)


def overhead(watched_s: Sequence[float], bare_s: Sequence[float]) -> Overhead:
    """What looking costs, pair by pair."""
    ratios = tuple(watched / bare for watched, bare in zip(watched_s, bare_s, strict=True))
    return Overhead(
        watched_s=tuple(watched_s),
        bare_s=tuple(bare_s),
        ratios=ratios,
        median=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """CUDA's events are those of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
