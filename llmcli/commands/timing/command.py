"""`llmcli timing`: where the time of reading a prompt and of writing tokens goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmcli.errors import CheckFailed, PromptTooLong, UsageError
from llmcli.measure.environment import environment
from llmcli.records.numbers import counted
from llmcli.shell.encoding import encode
from llmcli.shell.exits import SIGNALS
from llmcli.shell.files import check_size, kind_of_file, whole_file, written
from llmcli.shell.looking import room_for
from llmcli.shell.options import GivenPromptOptions, ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output, jsonable
from llmcli.shell.params import opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import LOOKED_AT, Prompt, prompt_or_builtin
from llmcli.shell.running import Loaded, kernels_of, load_model
from llmcli.shell.template import ChatOptions
from llmcli.ui.theme import encodable

if TYPE_CHECKING:
    from llmcli.commands.timing.before import Baseline
    from llmcli.commands.timing.report import (
        PartTime,
        PhaseName,
        PhaseTime,
        Stage,
        TimingReport,
        TimingRequest,
    )
    from llmcli.model import Model
    from llmcli.records.work import PartWork

TIMING = "Timing"
EPILOG = """
Parts: embed, norm, qkv, rope, attention, out (W_o), ffn_up (with the gate),
ffn_act, ffn_down, residual, head, sample (the choice of a token), and gaps:
what is in none of them; for a short convolution conv_in, conv and conv_out, for
a mixture of experts router, experts (bytes are those of the experts that ran)
and shared, embeddings of each layer ple. A part lasts from the end of the one
before it to its own, so that all of them add up to the wall time.

Both phases stand side by side, with the share of the nearest ceiling that is
reached (as measured on this machine before the model is loaded) behind what a
part is bound by: that ceiling (memory, a cache, or compute) from half of it on;
else calls, where starting the operations explains the time; else kernel, the
code of the operations. One phase alone (--phase) and --layers show FLOPs (2 a
multiply-add; causal: of the pairs that the mask leaves; full square: of all),
bytes and rates, and all ceilings and memory peaks.

Examples:

  llmcli timing
  llmcli timing -f page.txt --phase prefill --layers
  llmcli timing "Once upon a time" -n 64 --trace run.json
  llmcli timing -m tiny --threads 1 --json
"""

_HINT = "other programs may have taken the processor: run it again when they are done"


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """What is run how often, what is shown of it, and where the trace goes."""

    panel: ClassVar[str] = TIMING
    phase: Literal["prefill", "decode", "both"] = opt(
        "both", "--phase", "PHASE",
        "Time reading the prompt (prefill), writing after it (decode), or both.",
    )  # fmt: skip
    max_tokens: int = opt(
        16, "-n", "--max-tokens", "N",
        "Tokens that are written after the prompt, end of text or not.", at_least=1,
    )  # fmt: skip
    pairs: int | None = opt(
        None, "--pairs", "N",
        "Instrumented runs, and as many without instrumentation, in turns; the median one is "
        "shown. [default: until the quartiles are within 3 %, for at most 10 seconds]",
        at_least=1, at_most=10_000,
    )  # fmt: skip
    layers: bool = opt(
        False, "--layers", "Also the parts of every layer, and all that is known of each phase."
    )
    trace: str | None = opt(
        None, "--trace", "FILE",
        "Write the run to FILE.json, for ui.perfetto.dev or chrome://tracing.",
    )  # fmt: skip
    force: bool = opt(False, "--force", "Write the trace however large it gets.")

    def check(self) -> None:
        """Raises UsageError or WriteFailed for what can be refused before anything is loaded."""
        if self.trace is not None:
            kind_of_file(self.trace, ("json",), option="--trace")
        elif self.force:
            raise UsageError(
                "`--force` is about the size of a file, and none is written",
                hint="add `--trace FILE.json`, or leave it out",
            )

    def check_trace(self, layers: int, tokens: int) -> None:
        """Raises UsageError or WriteFailed where the trace of a run gets too large.

        Of a prompt of so many `tokens`.
        """
        from llmcli.anatomy.counts import PROMPT_CHUNK
        from llmcli.commands.timing.view.trace import trace_size

        if self.trace is not None:
            calls = self.new_tokens
            if "prefill" in self.phases:
                calls += -(-tokens // PROMPT_CHUNK)
            smaller = "write fewer tokens with --max-tokens"
            nbytes = trace_size(layers, calls)
            check_size(self.trace, nbytes, force=self.force, smaller=smaller)

    @property
    def phases(self) -> tuple[PhaseName, ...]:
        """The phases that are timed."""
        from llmcli.commands.timing.report import PHASES

        return PHASES if self.phase == "both" else (self.phase,)

    @property
    def new_tokens(self) -> int:
        """How many are written: none where only reading is timed."""
        return 0 if self.phase == "prefill" else self.max_tokens

    @property
    def details(self) -> bool:
        """Whether each phase is shown with all that is known of it: not where two have to fit."""
        return self.layers or self.phase != "both"

    @property
    def request(self) -> TimingRequest:
        """What is measured."""
        from llmcli.commands.timing.report import TimingRequest

        return TimingRequest(
            new_tokens=self.new_tokens, phases=self.phases, pairs=self.pairs,
            trace=self.trace is not None,
        )  # fmt: skip


def command(
    prompt: GivenPromptOptions,
    timing: TimingOptions,
    model: ModelOptions,
    output: ViewOutputOptions,
) -> None:
    """Where the time goes: load, prompt and new tokens, part by part, against this machine.

    Each part's time, FLOPs and bytes, what it reaches of the read and matrix rates that are
    measured here first, and what it waits for. Instrumented runs and bare ones take turns, which
    shows the overhead; parts and gaps add up to the wall time, or the command exits 1.
    """
    from llmcli.commands.timing.before import measuring
    from llmcli.commands.timing.report import Stage
    from llmcli.commands.timing.view.screen import render_opening, render_timing

    out = Output("timing", output)
    timing.check()
    given = prompt_or_builtin(prompt, LOOKED_AT, out.note)
    found: list[Baseline] = []
    before = measuring(given, timing.new_tokens, model, out, found)
    loaded = load_model(model, out, text=given.ids is None, before=before)
    begin = perf_counter()
    ids = _ids(given, timing, model, loaded.model)
    stages = [*_stages(loaded), Stage(name="tokenize", seconds=perf_counter() - begin)]
    stages = stages[: None if given.ids is None else -1]
    about, title = loaded.model.describe(), _title(loaded.model)
    header = environment(kernels=kernels_of(about))
    if not out.json:  # it is there if the runs are cut short
        out.show(render_opening(title, header, stages, about, details=timing.details))
    report = _measured(loaded.model, ids, found[0], stages, timing.request, out)
    try:
        out.present(
            lambda: render_timing(report, layers=timing.layers, details=timing.details),
            _body(report), model=about, environment=header, checks=report.checks, hint=_HINT,
        )  # fmt: skip
    except CheckFailed:
        if not report.interrupted:
            raise
    finally:
        if report.machine_load is not None and report.machine_load.slowed:
            out.note(report.machine_load.words)
        if timing.trace is not None and report.phases:
            _write_trace(timing.trace, report, title, about | asdict(header), out)
    if report.interrupted:
        after = f" after {report.phases[-1].name}" if report.phases else ""
        raise SIGNALS.stopped(told=out.json, where=after)


def _ids(
    given: Prompt, timing: TimingOptions, options: ModelOptions, model: Model
) -> tuple[int, ...]:
    """The prompt's ids; raises UsageError where they and the new tokens do not fit."""
    ids = encode(given, ChatOptions(raw=True), model).ids
    room, new = room_for(options, model), timing.new_tokens
    if len(ids) + new > room:
        left = room - len(ids)
        fewer = f"use at most {left} with --max-tokens, or " if left > 0 and new else ""
        positions = model.config.embedding.positions
        larger = "give a larger --context-length, or " if room < (positions or room + 1) else ""
        both = counted(len(ids), "token") + (
            f" and {counted(new, 'new one')} do" if new else " does"
        )
        raise PromptTooLong(
            f"the prompt of {both} not fit the context of {room}",
            hint=f"{fewer}{larger}shorten the prompt",
        )
    timing.check_trace(len(model.config.layers), len(ids))
    return ids


def _stages(loaded: Loaded) -> list[Stage]:
    """What is done once in each process."""
    from llmcli.commands.timing.report import Stage

    held = next(peak for peak in loaded.peaks if peak.phase == "load")
    gpu = loaded.model.device.type == "cuda"
    random = loaded.model.random_seed is not None
    return [
        Stage(name="import torch", seconds=loaded.import_s),
        Stage(name="read the headers", seconds=loaded.open_s),
        Stage(
            name="load the weights",
            seconds=loaded.load_s - loaded.open_s,
            nbytes=None if random else loaded.model.checkpoint.nbytes,
            peak=held.device_bytes if gpu else held.resident_bytes,
        ),
    ]


def _title(model: Model) -> str:
    """What is timed; weights that were drawn take as long as others, and say nothing."""
    from llmcli.ui.stats import model_line

    words = model_line(model.describe())
    return words if model.random_seed is None else f"{words}, random weights"


def _measured(
    model: Model,
    ids: Sequence[int],
    before: Baseline,
    stages: Sequence[Stage],
    request: TimingRequest,
    out: Output,
) -> TimingReport:
    """The runs, held against the ceilings."""
    from llmcli.commands.timing.measure.report import measure_timing
    from llmcli.measure.busy import CpuContention

    busy = CpuContention()
    with Progress(out) as progress:
        report = measure_timing(
            model, ids, request, ceilings=before.ceilings, stages=stages, base=before.base,
            progress=progress,
        )  # fmt: skip
    ceilings = report.ceilings
    threads = ceilings.threads if ceilings.device == "cpu" else 1
    return replace(report, machine_load=busy.load(threads))


def _body(report: TimingReport) -> dict[str, Any]:
    """Everything that the view shows, and every part of every layer; the trace is a file."""
    apart = ("checks", "interrupted")
    fields = {name: value for name, value in vars(report).items() if name not in apart}
    return fields | {
        "finish_reason": "interrupted" if report.interrupted else "complete",
        "phases": [_phase(phase) for phase in report.phases],
        "working_set_in": report.ceilings.read(report.working_set).level,
        "machine_load": report.machine_load and report.machine_load.document(),
        "ceilings": vars(report.ceilings)
        | {"caches": [{"level": name, "bytes": held} for name, held in report.ceilings.caches]},
    }


def _phase(phase: PhaseTime) -> dict[str, Any]:
    fields = {name: value for name, value in vars(phase).items() if name != "spans"}
    return fields | {
        "pairs": len(phase.overhead.ratios),
        "spread": phase.overhead.spread,
        "tokens_per_s": phase.tokens / phase.bare_s if phase.bare_s > 0 else None,
        "work": _work(phase.work),
        "parts": [_part(part, phase) for part in phase.parts],
        "totals": [_part(part, phase) for part in phase.totals],
    }


def _part(part: PartTime, phase: PhaseTime) -> dict[str, Any]:
    """Rates are null where there is no such work, or no time."""

    def per_second(amount: int) -> float | None:
        return amount / part.seconds if amount and part.seconds > 0 else None

    return vars(part) | {
        "share": part.seconds / phase.seconds if phase.seconds > 0 else None,
        "work": _work(part.work),
        "bytes_per_s": per_second(part.work.bytes),
        "flops_per_s": per_second(part.work.flops),
    }


def _work(work: PartWork) -> dict[str, int]:
    return vars(work) | {"bytes": work.bytes}


def _write_trace(
    path: str, report: TimingReport, title: str, about: dict[str, Any], out: Output
) -> None:
    from llmcli.commands.timing.view.trace import trace_pieces

    with whole_file(path) as file:
        for piece in trace_pieces(report, encodable(title), jsonable(about)):
            file.write(piece.encode())
    spans = sum(len(phase.spans) for phase in report.phases)
    out.note(written(path, f"{spans:,} spans, for ui.perfetto.dev or chrome://tracing"))
