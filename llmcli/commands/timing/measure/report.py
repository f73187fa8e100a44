"""Where the time goes: both phases of a run, split into parts, held against the roof."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter

import torch

from llmcli.anatomy.counts import memory_need
from llmcli.commands.timing.measure.checks import memory_check, timing_checks
from llmcli.commands.timing.measure.phase import Roof, phase_time
from llmcli.commands.timing.measure.run import Runs, StoppingRule, TimedWorkload, run_pairs
from llmcli.commands.timing.measure.workload import Workload, working_set
from llmcli.commands.timing.report import (
    PhaseName,
    PhaseTime,
    Stage,
    TimingReport,
    TimingRequest,
)
from llmcli.model import Model
from llmcli.ops import processor
from llmcli.records.ceilings import Ceilings
from llmcli.records.progress import Progress


def measure_timing(
    model: Model,
    ids: Sequence[int],
    request: TimingRequest,
    *,
    ceilings: Ceilings,
    stages: Sequence[Stage] = (),
    base: int | None = None,
    progress: Progress | None = None,
) -> TimingReport:
    """Reads the prompt and writes greedy tokens after it, end of text or not, again and again.

    `ceilings`, `stages` and `base` are measured by the caller. A KeyboardInterrupt ends the
    measuring: the report has what there is by then, and says so. Raises OutOfMemory where the
    cache does not fit, NotFinite for logits with a NaN.
    """
    batch, new_tokens = request.batch, request.new_tokens
    workload = Workload(model=model, batch=batch, tokens=len(ids), new_tokens=new_tokens)
    chosen = request.timed
    if not chosen or request.pairs == 0:
        raise ValueError("there is nothing to time")
    step = working_set(model, tokens=len(ids) + new_tokens, batch=batch)
    roof = Roof(
        ceilings=ceilings, numbers=workload.numbers, working_set=step,
        apart=model.device.type != "cpu",
    )  # fmt: skip
    runs: dict[PhaseName, Runs] = {}
    timed: list[PhaseTime] = []
    interrupted = False
    try:
        with _current(model.device):
            job = TimedWorkload(model, ids, new_tokens=new_tokens, batch=batch)
            begin = perf_counter()
            for number, name in enumerate(chosen, 1):
                end = begin + request.limit_s * number / len(chosen)  # what one leaves is another's
                until = StoppingRule(pairs=request.pairs, begin=perf_counter(), end=end)
                run = run_pairs(job, name, until, progress=progress)
                timed.append(phase_time(workload, name, run, roof, trace=request.trace))
                runs[name] = run
                if run.interrupted:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    timed = timed[: len(runs)]
    checks = timing_checks(
        timed,
        runs,
        {name: workload.marks(name) for name in runs},
        {name: workload.flops(name) for name in runs},
    )
    peak, estimated = _most(stages, timed), _estimated(workload)
    if "prefill" in runs:  # what reading the prompt takes is in the estimate
        checks += memory_check(base, peak, estimated)
    return TimingReport(
        prompt_tokens=len(ids),
        batch=batch,
        dtype=workload.numbers.dtype,
        stages=tuple(stages),
        phases=tuple(timed),
        ceilings=ceilings,
        base=base,
        peak=peak,
        estimated=estimated,
        weight_bytes=model.weight_bytes,
        working_set=step,
        checks=checks,
        interrupted=interrupted,
    )


def _estimated(workload: Workload) -> int:
    """Bytes that `info` says of such a run: no sequence of it ends before the others."""
    model = workload.model
    need = memory_need(
        model.config, workload.numbers, batch=workload.batch,
        context=workload.tokens + workload.new_tokens,
        cuda=model.device.type == "cuda",
        native=workload.numbers.dtype == "bfloat16" and processor.has_bfloat16(),
        tokenizer=0 if model.tokenizer is None else model.tokenizer.nbytes,
    )  # fmt: skip
    return need.together


def _most(stages: Sequence[Stage], phases: Sequence[PhaseTime]) -> int | None:
    """Bytes held at most in any of them: the ceilings took memory too, which no run does."""
    peaks = [stage.peak for stage in stages] + [phase.peak for phase in phases]
    return max((peak for peak in peaks if peak is not None), default=None)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """CUDA's events are those of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
