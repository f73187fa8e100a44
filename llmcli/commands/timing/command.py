"""`llmcli timing`: where the time of reading a prompt and of writing tokens goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.cli.encoding import encode
from llmcli.cli.exits import SIGNALS
from llmcli.cli.files import whole_file, written
from llmcli.cli.looking import room_for
from llmcli.cli.options import GivenPromptOptions, ModelOptions, OutputOptions
from llmcli.cli.output import Output, jsonable, require
from llmcli.cli.progress import Progress
from llmcli.cli.prompts import LOOKED_AT, Prompt, prompt_or_builtin
from llmcli.cli.running import Loaded, kernels_of, load_model
from llmcli.cli.template import ChatOptions
from llmcli.commands.timing.before import Before, measuring
from llmcli.commands.timing.document import timing_document
from llmcli.commands.timing.options import TimingOptions
from llmcli.commands.timing.report import Stage, TimingReport
from llmcli.errors import PromptTooLong
from llmcli.observe.environment import environment
from llmcli.reports.numbers import counted
from llmcli.ui.theme import encodable

if TYPE_CHECKING:
    from llmcli.model import Model

EPILOG = """
Parts: embed, norm, qkv, rope, attention, out (W_o), ffn_up (with the gate),
ffn_act, ffn_down, residual, head, sample (the choice of a token), and gaps:
what is in none of them; for a short convolution conv_in, conv and conv_out, for
a mixture of experts router, experts (bytes are those of the experts that ran)
and shared, embeddings of each layer ple. A part lasts from the end of the one
before it to its own, so that all of them add up to the wall time.

Of ceiling: the share that is reached of the nearest ceiling, as measured on
this machine before the model is loaded. Bound by: that ceiling (memory, a
cache, or compute) from half of it on; else calls, where starting the
operations explains the time; else kernel, the code of the operations.

FLOPs: matrix products, 2 a multiply-add; causal counts the pairs that the mask
leaves, full square all of them.

Examples:

  llmcli timing
  llmcli timing -f page.txt --phase prefill --layers
  llmcli timing "Once upon a time" -n 64 --trace run.json
  llmcli timing -m tiny --threads 1 --unfused --json
"""

_HINT = "other programs may have taken the processor: run it again when they are done"
_SHORT = LOOKED_AT[:24].rstrip() + " …"


def command(
    prompt: GivenPromptOptions, timing: TimingOptions, model: ModelOptions, output: OutputOptions
) -> None:
    """Where the time goes: load, prompt and new tokens, part by part, against this machine.

    Each part's time, FLOPs and bytes, what it reaches of the read and matrix rates that are
    measured here first, and what it waits for. Runs with clocks and without take turns, which
    shows what looking costs; parts and gaps add up to the wall time, or the command exits 1.
    """
    out = Output("timing", output)
    timing.check()
    given = prompt_or_builtin(prompt, LOOKED_AT, lambda s: out.note(s.replace(LOOKED_AT, _SHORT)))
    found: list[Before] = []
    before = measuring(given, timing.new_tokens, model, out, found)
    loaded = load_model(model, out, text=given.ids is None, before=before)
    begin = perf_counter()
    ids = _ids(given, timing, model, loaded.model)
    stages = [*_stages(loaded), Stage(name="tokenize", seconds=perf_counter() - begin)]
    stages = stages[: None if given.ids is None else -1]
    _open(loaded.model, stages, out)
    report = _measured(loaded.model, ids, found[0], stages, timing, out)
    _show(report, loaded.model, timing, out)
    if report.interrupted:
        after = f" after {report.phases[-1].name}" if report.phases else ""
        raise SIGNALS.stopped(told=out.json, where=after)
    require(report.checks, _HINT)


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


def _open(model: Model, stages: Sequence[Stage], out: Output) -> None:
    """What is known before the runs, so that it is there if they are cut short."""
    if out.json:
        return
    from llmcli.commands.timing.view.screen import render_opening

    about = model.describe()
    out.show(
        render_opening(
            _title(model), environment(kernels=kernels_of(about)), stages,
            weight_bytes=model.weight_bytes, format=about["weight_format"],
        )
    )  # fmt: skip


def _measured(
    model: Model,
    ids: Sequence[int],
    before: Before,
    stages: Sequence[Stage],
    timing: TimingOptions,
    out: Output,
) -> TimingReport:
    """The runs, held against the ceilings."""
    from llmcli.commands.timing.measure.report import measure_timing
    from llmcli.observe.busy import Busy

    busy = Busy()
    with Progress(out) as progress:
        report = measure_timing(
            model,
            ids,
            new_tokens=timing.new_tokens,
            pairs=timing.pairs,
            ceilings=before.ceilings,
            stages=stages,
            phases=timing.phases,
            base=before.base,
            unfused=timing.unfused,
            trace=timing.trace is not None,
            progress=progress,
        )
    ceilings = report.ceilings
    threads = ceilings.threads if ceilings.device == "cpu" else 1
    return replace(report, machine_load=busy.load(threads))


def _show(report: TimingReport, model: Model, timing: TimingOptions, out: Output) -> None:
    """The report to the screen or as JSON, then the trace, which a full disk may refuse."""
    about = model.describe()
    header = environment(kernels=kernels_of(about))
    if out.json:
        out.document(timing_document(report), model=about, environment=header)
    else:
        from llmcli.commands.timing.view.screen import render_timing

        out.show(render_timing(report, layers=timing.layers))
    if report.machine_load is not None and report.machine_load.slowed:
        out.note(report.machine_load.words)
    if timing.trace is not None and report.phases:
        _write_trace(timing.trace, report, _title(model), about | asdict(header), out)


def _write_trace(
    path: str, report: TimingReport, title: str, about: dict[str, Any], out: Output
) -> None:
    from llmcli.commands.timing.view.trace import trace_pieces

    with whole_file(path) as file:
        for piece in trace_pieces(report, encodable(title), jsonable(about)):
            file.write(piece.encode())
    spans = sum(len(phase.spans) for phase in report.phases)
    out.note(written(path, f"{spans:,} spans, for ui.perfetto.dev or chrome://tracing"))
