"""`llmcli timing`: where the time of reading a prompt and of writing tokens goes."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from llmcli.errors import CheckFailed, PromptTooLong
from llmcli.records.document import members
from llmcli.records.numbers import counted
from llmcli.shell.encoding import ChatOptions, encode
from llmcli.shell.exits import SIGNALS
from llmcli.shell.files import check_size, kind_of_file, whole_file, written
from llmcli.shell.inspection import InChat, Shown
from llmcli.shell.options import GivenPromptOptions, ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output, jsonable
from llmcli.shell.params import Without, opt
from llmcli.shell.progress import Progress
from llmcli.shell.prompts import Prompt, prompt_or_default
from llmcli.shell.running import Loaded, header, load_model
from llmcli.ui.theme import encodable

if TYPE_CHECKING:
    import torch

    from llmcli.commands.timing.report import Stage, TimingReport
    from llmcli.config.model import ModelConfig
    from llmcli.graph.precision import Precision
    from llmcli.graph.spec import Phase
    from llmcli.model import Model
    from llmcli.prepare.prepared import Prepared
    from llmcli.records.machine import Ceilings

LOOK_NEW, LOOK_PAIRS = 8, 3  # of `/look`: tokens that are generated, and pairs of runs

EPILOG = """
Parts: embed, norm, qkv, rope, attention, out (W_o), ffn_up (with the gate),
ffn_act, ffn_down, residual, head, sample (choosing a token), and gaps: the time
in none of them; for a short convolution conv_in, conv and conv_out, for a
mixture of experts router, experts (bytes are those of the experts that ran) and
shared, embeddings of each layer ple. A part lasts from the end of the part
before it to its own end, so that all parts add up to the wall time.

The table has both phases side by side. "of ceiling" is what a part is bound by,
and the share that it reaches of its nearest ceiling (measured on this machine
before the model is loaded). What it is bound by: that ceiling (memory, a cache,
or compute) from half of it on; else calls, where starting the operations
explains the time; else kernel, the code of the operations. With --phase or
--layers each phase has its own table, with FLOPs (2 per multiply-add; causal: of
the pairs that the mask leaves; full square: of all), bytes and rates, and all
ceilings and memory peaks are shown.

Examples:

  llmcli timing
  llmcli timing -f page.txt --phase prefill --layers
  llmcli timing "Once upon a time" -n 64 --trace run.json
  llmcli timing -m tiny --threads 1 --json
"""

_HINT = "other programs may have taken the processor: run it again when they are done"
_TOKEN_BYTES = 3  # of a text in each token, at least, in most texts and vocabularies


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """What is run and how often, how much of it is shown, and where the trace is written."""

    panel: ClassVar[str] = "Timing"
    phase: Literal["prefill", "decode", "both"] = opt(
        "both",
        "--phase PHASE",
        "Time reading the prompt (prefill), writing after it (decode), or both.",
    )
    max_tokens: int = opt(
        16,
        "-n --max-tokens N",
        "Tokens to generate after the prompt, ignoring the end token.",
        at_least=1,
    )
    pairs: int | None = opt(
        None,
        "--pairs N",
        "Pairs of runs with and without instrumentation, alternating; the median run is shown. "
        "[default: until the quartiles are within 3 %, for at most 10 seconds]",
        at_least=1,
        at_most=10_000,
    )
    layers: bool = opt(
        False, "--layers", "Also the parts of every layer, and all details of each phase."
    )
    trace: str | None = opt(
        None, "--trace FILE", "Write the run to FILE.json, for ui.perfetto.dev or chrome://tracing."
    )
    force: bool = opt(
        False, "--force", "Write the trace even if it is very large.", needs=("--trace",)
    )

    def check_trace(self, layers: int, tokens: int, device: str) -> None:
        """Raises UsageError or WriteFailed where the trace of a prompt of `tokens` is too large."""
        from llmcli.commands.timing.trace import trace_size
        from llmcli.graph.memory import prompt_chunk

        if self.trace is not None:
            calls = self.new_tokens
            if "prefill" in self.phases:
                calls += -(-tokens // prompt_chunk(device, 1))
            smaller = "write fewer tokens with --max-tokens"
            nbytes = trace_size(layers, calls)
            check_size(self.trace, nbytes, force=self.force, smaller=smaller)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that are timed."""
        from llmcli.graph.spec import PHASES

        return PHASES if self.phase == "both" else (self.phase,)

    @property
    def new_tokens(self) -> int:
        """Tokens to write after the prompt; 0 where only reading is timed."""
        return 0 if self.phase == "prefill" else self.max_tokens

    @property
    def details(self) -> bool:
        """Whether each phase is shown with all that is known of it: not where two have to fit."""
        return self.layers or self.phase != "both"


def command(
    prompt: GivenPromptOptions,
    timing: TimingOptions,
    model: Annotated[ModelOptions, Without(("edit",))],
    output: ViewOutputOptions,
) -> None:
    """Where the time goes: load, prompt and new tokens, part by part, against this machine.

    Each part's time, FLOPs and bytes, what share it reaches of this machine's memory and matrix
    rates, which are measured first, and what limits it. Runs with and without instrumentation
    alternate, which shows the overhead; parts and gaps add up to the wall time, or the command
    exits 1.
    """
    from llmcli.commands.timing.report import Stage
    from llmcli.commands.timing.view import render_opening, render_timing
    from llmcli.ui.facts import model_line

    out = Output("timing", output)
    if timing.trace is not None:  # refused before anything is loaded
        kind_of_file(timing.trace, ("json",), option="--trace")
    given = prompt_or_default(prompt, out.note)
    tokens, fresh = prompt_tokens(given) + timing.new_tokens, "torch" not in sys.modules
    baseline = partial(_baseline, options=model, tokens=tokens, out=out, fresh=fresh)
    loaded = load_model(model, out, text=not given.ids, before=baseline)
    from llmcli.commands.timing.measure.run import measure_timing  # which imports torch

    ceilings, base = loaded.before
    stages = _stages(loaded)
    begin = perf_counter()
    ids = _ids(given, timing, model, loaded.model)
    if not given.ids:
        stages.append(Stage(name="tokenize", seconds=perf_counter() - begin))
    about = loaded.model.describe()
    title = model_line(about)
    if loaded.model.random_seed is not None:  # which take as long as others, and mean nothing
        title += ", random weights"
    head = header(about)
    if not out.json:  # shown even if the runs are cut short
        shown = about if timing.details else None
        out.show(render_opening(title, head["environment"], stages, shown))
    with Progress(out) as progress:
        report = measure_timing(
            loaded.model,
            ids,
            timing.new_tokens,
            phases=timing.phases,
            pairs=timing.pairs,
            ceilings=ceilings,
            stages=stages,
            base=base,
            progress=progress,
        )
    try:
        out.present(
            lambda: render_timing(report, layers=timing.layers, details=timing.details),
            members(report),
            **head,
            checks=report.checks,
            hint=_HINT,
        )
    except CheckFailed:
        if not report.interrupted:
            raise
    finally:
        if report.machine_load.slowed:
            out.note(report.machine_load.words)
        if timing.trace is not None and report.phases:
            _write_trace(timing.trace, report, title, about | asdict(head["environment"]), out)
    if report.interrupted:
        after = f" after {report.phases[-1].name}" if report.phases else ""
        raise SIGNALS.stopped(reported=out.json, where=after)


def _baseline(
    prepared: Prepared, *, options: ModelOptions, tokens: int, out: Output, fresh: bool
) -> tuple[Ceilings, int | None]:
    """The machine's ceilings, and the bytes held without a model, before it is loaded.

    So what measuring leaves in the process is no memory of the model, and nothing of the model is
    pushed out of a cache between loading and running. From the checkpoint's headers; `tokens` of
    the run, about. The bytes are 0 on a GPU, and None where they are not known: layers may be on
    several devices, the system may not say, and a process that is not `fresh`, in which torch has
    computed before, keeps some of what that took. Raises UsageError for a missing device or dtype.
    """
    import torch

    from llmcli.graph.memory import PlannedRun, memory_need
    from llmcli.loading.load import placed_on, resolve_devices
    from llmcli.measure.peaks import resident_bytes

    config = prepared.config
    every, context = resolve_devices(options.device), options.context_length
    placement = placed_on(every, prepared, context, **options.precision_options)
    device, precision = torch.device(placement.home), placement.precision
    tokens = min(config.room(options.context_length), tokens)
    held = resident_bytes()
    with Progress(out) as progress:
        ceilings = _ceilings(device, config, precision, tokens, progress)
    if "," in placement.devices:
        return ceilings, None
    if device.type == "cuda":
        return ceilings, 0
    after = resident_bytes()
    if not fresh or held is None or after is None:
        return ceilings, None
    # measuring loads the libraries' code, as every run does: the estimate of a run includes it
    one = PlannedRun(config, precision, batch=1, context=1)
    code = memory_need(one).runtime_bytes_estimate
    return ceilings, max(held, after - code)


def _ceilings(
    device: torch.device, config: ModelConfig, precision: Precision, tokens: int, progress: Progress
) -> Ceilings:
    """What this machine can do at most, with what a step streams that reaches so many tokens."""
    from llmcli.graph.cost import step_bytes
    from llmcli.measure.ceilings import measure_ceilings

    streamed = step_bytes(config, tokens, precision=precision)
    return measure_ceilings(device, precision, working_set=streamed, progress=progress)


def prompt_tokens(given: Prompt) -> int:
    """Estimate the tokens of the prompt: the tokenizer is loaded later, with the model."""
    if given.ids:
        return len(given.ids)
    return 1 + len((given.text or "").encode()) // _TOKEN_BYTES


def _ids(
    given: Prompt, timing: TimingOptions, options: ModelOptions, model: Model
) -> tuple[int, ...]:
    """The prompt's ids; raises UsageError where they and the new tokens do not fit."""
    ids = encode(given, ChatOptions(raw=True), model).ids
    room, new = model.config.room(options.context_length), timing.new_tokens
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
    timing.check_trace(len(model.config.layers), len(ids), model.device.type)
    return ids


def _stages(loaded: Loaded) -> list[Stage]:
    """The steps that run once in each process."""
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


def _write_trace(
    path: str, report: TimingReport, title: str, about: dict[str, Any], out: Output
) -> None:
    from llmcli.commands.timing.trace import trace_pieces

    events = -3  # lines around them
    with whole_file(path) as file:
        for piece in trace_pieces(report, encodable(title), jsonable(about)):
            file.write(piece.encode())
            events += 1
    out.note(written(path, f"{events:,} events, for ui.perfetto.dev or chrome://tracing"))


def look(chat: InChat, _given: dict[str, str]) -> Shown:
    """Times in `/look` the conversation's last tokens as a prompt, and a few new ones."""
    from llmcli.commands.timing.measure.run import measure_timing
    from llmcli.commands.timing.view import render_timing

    model, tokens = chat.model, min(len(chat.ids), chat.room - LOOK_NEW)
    with Progress(chat.out) as progress:
        length = tokens + LOOK_NEW
        ceilings = _ceilings(model.device, model.config, model.precision, length, progress)
        report = measure_timing(
            model,
            chat.ids[-tokens:],
            LOOK_NEW,
            pairs=LOOK_PAIRS,
            ceilings=ceilings,
            progress=progress,
        )
    if report.interrupted:
        raise KeyboardInterrupt
    return render_timing(report), report.checks
