"""`llmcli timing`: where the time of reading a prompt and of writing tokens goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmcli.cli.encoding import ChatOptions, encode
from llmcli.cli.files import whole_file, written
from llmcli.cli.looking import require, room_for
from llmcli.cli.options import GivenPromptOptions, ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.progress import Progress
from llmcli.cli.prompts import LOOKED_AT, Prompt, prompt_or_builtin
from llmcli.cli.running import KERNELS, Loaded, load_model
from llmcli.cli.timing.document import timing_document
from llmcli.cli.timing.options import TimingOptions
from llmcli.errors import PromptTooLong
from llmcli.measure.environment import environment
from llmcli.reports.timing import Stage, TimingReport

if TYPE_CHECKING:
    from llmcli.model import Model

EPILOG = """
Parts: embed, norm, qkv, rope, attention, out (W_o), ffn_up (with the gate),
ffn_act, ffn_down, residual, head, sample (the choice of a token), and gaps:
what is in none of them. A part lasts from the end of the one before it to its
own, so that all of them add up to the wall time.

Bound by: memory or a cache, where the bytes come from; compute; or calls, for
parts with so little to do that starting their operations takes longer. Of it:
the share of the nearest ceiling, as measured on this machine, that is reached.

FLOPs: matrix products, 2 a multiply-add, of the pairs that the mask leaves.

Examples:

  llmcli timing
  llmcli timing -f page.txt --phase prefill --layers
  llmcli timing "Once upon a time" -n 64 --trace run.json
  llmcli timing -m tiny --threads 1 --unfused --json
"""

_HINT = "other programs may have taken the processor: run it again when they are done"


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
    given = prompt_or_builtin(prompt, LOOKED_AT, out.note)
    loaded = load_model(model, out, text=given.ids is None)
    begin = perf_counter()
    ids = _ids(given, timing, model, loaded.model)
    stages = [*_stages(loaded), Stage(name="tokenize", seconds=perf_counter() - begin)]
    report = _measured(loaded, ids, stages[: None if given.ids is None else -1], timing, out)
    _show(report, loaded.model, timing, out)
    require(report.checks, _HINT)


def _ids(
    given: Prompt, timing: TimingOptions, options: ModelOptions, model: Model
) -> tuple[int, ...]:
    """The prompt's ids; raises UsageError where they and the new tokens do not fit."""
    ids = encode(given, ChatOptions(raw=True), model).ids
    room = room_for(options, model)
    new = 0 if timing.phase == "prefill" else timing.max_tokens
    if len(ids) + new > room:
        left = room - len(ids)
        fewer = f"use at most {left} with --max-tokens, or " if left > 0 and new else ""
        raise PromptTooLong(
            f"the prompt of {len(ids)} tokens and {new} new ones do not fit the context of {room}",
            hint=f"{fewer}shorten the prompt",
        )
    timing.check_trace(len(model.config.layers), new + -(-len(ids) // 512))
    return ids


def _stages(loaded: Loaded) -> list[Stage]:
    """What is done once in each process."""
    peaks = {peak.phase: peak for peak in loaded.peaks}
    held = peaks["load"]
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


def _base(loaded: Loaded) -> int | None:
    """What the process held before the model: nothing on a GPU."""
    if loaded.model.device.type == "cuda":
        return 0
    return next(peak.resident_bytes for peak in loaded.peaks if peak.phase == "import")


def _measured(
    loaded: Loaded, ids: Sequence[int], stages: Sequence[Stage], timing: TimingOptions, out: Output
) -> TimingReport:
    """The ceilings of this machine, then the runs, held against them."""
    import torch

    from llmcli.measure.ceilings import measure_ceilings
    from llmcli.measure.timing import measure_timing, working_set

    model = loaded.model
    new = 0 if timing.phase == "prefill" else timing.max_tokens
    with Progress(out) as progress:
        ceilings = measure_ceilings(
            model.device,
            model.dtype,
            threads=torch.get_num_threads(),
            working_set=working_set(model, tokens=len(ids) + new),
            progress=progress,
        )
        report = measure_timing(
            model,
            ids,
            new_tokens=new,
            pairs=timing.pairs,
            ceilings=ceilings,
            stages=stages,
            phases=timing.phases,
            base=_base(loaded),
            unfused=timing.unfused,
            trace=timing.trace is not None,
            progress=progress,
        )
    # measuring the ceilings took memory too, which no run would
    peaks = [stage.peak for stage in report.stages] + [phase.peak for phase in report.phases]
    return replace(report, peak=max((peak for peak in peaks if peak is not None), default=None))


def _show(report: TimingReport, model: Model, timing: TimingOptions, out: Output) -> None:
    """The trace to its file, the report to the screen or as JSON."""
    from llmcli.render.stats import model_line

    about, header = model.describe(), environment(kernels=KERNELS)
    if timing.trace is not None:
        _write_trace(timing.trace, report, model_line(about), about | asdict(header), out)
    if out.json:
        out.document(timing_document(report), model=about, environment=header)
    else:
        from llmcli.render.timing.view import render_timing

        out.show(render_timing(report, model_line(about), layers=timing.layers))


def _write_trace(
    path: str, report: TimingReport, title: str, about: dict[str, Any], out: Output
) -> None:
    from llmcli.render.trace import trace_pieces

    with whole_file(path) as file:
        for piece in trace_pieces(report, title, about):
            file.write(piece.encode())
    spans = sum(len(phase.spans) for phase in report.phases)
    out.note(written(path, f"{spans:,} spans, for ui.perfetto.dev or chrome://tracing"))
