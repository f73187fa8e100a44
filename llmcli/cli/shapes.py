"""`llmcli shapes`: every tensor of a model, with its letters and its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmcli.cli.options import GivenPromptOptions, ModelOptions, OutputOptions
from llmcli.cli.output import Output
from llmcli.cli.params import LARGEST, Range
from llmcli.cli.running import KERNELS, load_model, open_checkpoint_of
from llmcli.errors import CheckFailed, PromptTooLong, UsageError
from llmcli.measure.environment import environment
from llmcli.reports.checks import ViewCheck, checks_document

if TYPE_CHECKING:
    from llmcli.anatomy.spec import Kind, Phase
    from llmcli.checkpoints import Checkpoint
    from llmcli.config import ModelConfig
    from llmcli.measure.shapes import Asked, Calls
    from llmcli.reports.shapes import ShapesReport, ShapeTensor, Stored

SHAPES = "Shapes"
TOKENS = 12  # of the prompt that shapes are written out for where none is given
EPILOG = """
Letters, and what the papers call the same:

  B sequences (b)      T new tokens (n)       S tokens so far (n)
  D width (d)          H heads (h)            Hk heads of keys and values
  dh, dv  a head's key and value (d/h)        F neurons    V vocabulary (v)

Examples:

  llmcli shapes
  llmcli shapes "In the beginning" --phase prefill
  llmcli shapes --activations --layer 0 --batch 4 --tokens 512
  llmcli shapes --filter "blocks.*.attn.pattern,logits" --json
  llmcli shapes --names -m tiny
  llmcli shapes --params -m model.safetensors
"""


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Which calls of the model the numbers are for."""

    phase: Annotated[
        Literal["prefill", "decode", "both"],
        typer.Option(
            "--phase",
            metavar="PHASE",
            rich_help_panel=SHAPES,
            help="Reading the prompt (prefill), one step after it (decode), or both.",
        ),
    ] = "both"
    batch: Annotated[
        int,
        typer.Option(
            "--batch", metavar="B", rich_help_panel=SHAPES, help="Sequences side by side."
        ),
        Range(1, LARGEST),
    ] = 1
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="T",
            rich_help_panel=SHAPES,
            help=f"Tokens of the prompt. [default: those of PROMPT, else {TOKENS}]",
        ),
        Range(1, LARGEST),
    ] = None

    def phases(self) -> tuple[Phase, ...]:
        """Those that are shown."""
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Which tensors, and what is said of them."""

    params: Annotated[
        bool, typer.Option("--params", rich_help_panel=SHAPES, help="Parameters only.")
    ] = False
    activations: Annotated[
        bool,
        typer.Option(
            "--activations", rich_help_panel=SHAPES, help="Activations and the cache only."
        ),
    ] = False
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            metavar="0,3-5",
            rich_help_panel=SHAPES,
            help="These layers only; -1 is the last.",
        ),
    ] = None
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="GLOB",
            rich_help_panel=SHAPES,
            help="Names only that match: blocks.*.attn.q, blocks.0-3.*, others' names too.",
        ),
    ] = None
    names: Annotated[
        bool,
        typer.Option(
            "--names",
            rich_help_panel=SHAPES,
            help="What each tensor is, its formula, and what others call it.",
        ),
    ] = False

    def asked(self, config: ModelConfig) -> Asked:
        """What of that model is shown; UsageError for layers and names that are not there."""
        from llmcli.anatomy.names import select
        from llmcli.cli.looking import parse_numbers
        from llmcli.families.sources import sources
        from llmcli.measure.shapes import Asked

        kinds: tuple[Kind, ...] = ("parameter", "activation", "state")
        if self.params != self.activations:
            kinds = kinds[:1] if self.params else kinds[1:]
        layers = names = None
        if self.layer is not None:
            layers = parse_numbers(self.layer, len(config.layers), "--layer", "layers")
        if self.filter is not None:
            found = select(self.filter, config, kinds=kinds, sources=sources(config))
            names = frozenset(found)
        return Asked(kinds=kinds, layers=layers, names=names)


def command(
    prompt: GivenPromptOptions,
    call: CallOptions,
    choice: ChoiceOptions,
    model: ModelOptions,
    output: OutputOptions,
) -> None:
    """Every tensor of a model: letters, numbers, memory, formula, and the file's own name.

    From the configuration and the headers of the files alone, without weights and without
    PyTorch. With a PROMPT the model is loaded and run, and every shape, dtype and view is
    compared with what it really had. Layers that are identical are one row.
    """
    out = Output("shapes", output)
    given = prompt.prompt is not None or prompt.file is not None or prompt.ids is not None
    if given and call.tokens is not None:
        raise UsageError("`--tokens` goes without a prompt, which has its own")
    if given and choice.names:
        raise UsageError("`--names` goes without a prompt: names are the same for all")
    if given:
        calls, checkpoint, about, checks = _run(prompt, call, model, out)
    else:
        checkpoint = open_checkpoint_of(model, out)
        if checkpoint.config is None and choice.params:
            _show_stored(checkpoint, out)
            return
        calls, about, checks = _described(checkpoint, call, model)
    asked = choice.asked(calls.config)
    if choice.names:
        _show_names(calls, asked, about, out)
        return
    _show(_report(calls, call, asked, checkpoint, checks, ran=given), about, out)


def _described(
    checkpoint: Checkpoint, call: CallOptions, options: ModelOptions
) -> tuple[Calls, dict[str, Any], tuple[ViewCheck, ...]]:
    """The calls as the headers describe them, and the check that the headers agree."""
    from llmcli.families import translate
    from llmcli.measure.memory import auto_dtype
    from llmcli.measure.shapes import Calls, stored_check

    options.check()
    config, rules = translate(checkpoint)
    formats = {info.format for info in checkpoint.tensors.values()}
    device = _device(options.device)
    dtype = auto_dtype(device, formats) if options.dtype == "auto" else options.dtype
    calls = Calls(config=config, batch=call.batch, tokens=call.tokens or TOKENS, dtype=dtype)
    _check_positions(calls)
    about = {
        "name": checkpoint.name,
        "path": checkpoint.path,
        "family": config.family,
        "model_type": config.model_type,
        "parameters": sum(spec.count for spec in calls.parameters()),
        "context": config.context,
        "stored_formats": sorted(formats),
        "weight_format": dtype,
        "activation_format": dtype,
        "weight_bytes": sum(spec.bytes or 0 for spec in calls.parameters()),
        "device": device.device,
        "random_weights_seed": None,
    }
    return calls, about, stored_check(checkpoint, rules, config)


def _run(
    prompt: GivenPromptOptions, call: CallOptions, options: ModelOptions, out: Output
) -> tuple[Calls, Checkpoint, dict[str, Any], tuple[ViewCheck, ...]]:
    """The same from a loaded model that has read the prompt and taken one step more."""
    from llmcli.cli.encoding import ChatOptions, check_fits, encode
    from llmcli.cli.prompts import read_prompt

    given = read_prompt(prompt)
    loaded = load_model(options, out, text=given.ids is None).model
    encoded = encode(given, ChatOptions(raw=True), loaded)
    room = options.context_length or loaded.config.context
    list(check_fits([encoded], 1, room, largest=loaded.config.embedding.positions))
    ids = encoded.ids

    from llmcli.families import translate
    from llmcli.measure.ran import run_checks, sources_check
    from llmcli.measure.shapes import Calls, stored_tensors
    from llmcli.model import dtype_name

    dtype = dtype_name(loaded.dtype)
    calls = Calls(config=loaded.config, batch=call.batch, tokens=len(ids), dtype=dtype)
    _check_positions(calls)
    _, rules = translate(loaded.checkpoint)
    stored = stored_tensors(loaded.checkpoint, rules, loaded.config)
    checks = (*run_checks(loaded, ids, call.batch), *sources_check(loaded.ledger, stored))
    return calls, loaded.checkpoint, loaded.describe(), checks


def _report(
    calls: Calls,
    call: CallOptions,
    asked: Asked,
    checkpoint: Checkpoint,
    checks: Iterable[ViewCheck],
    *,
    ran: bool,
) -> ShapesReport:
    from llmcli.families import translate
    from llmcli.measure.shapes import model_shapes, stored_tensors

    _, rules = translate(checkpoint)
    stored = stored_tensors(checkpoint, rules, calls.config)
    return model_shapes(calls, call.phases(), asked, stored, checks, ran=ran)


def _show(report: ShapesReport, about: dict[str, Any], out: Output) -> None:
    if out.json:
        machine = environment(kernels=KERNELS if report.ran else ())
        out.document(_body(report), model=about, environment=machine)
    else:
        from llmcli.render.shapes import render_shapes
        from llmcli.render.stats import model_line

        out.show(render_shapes(report, model_line(about)))
    bad = [check for check in report.checks if not check.ok]
    if bad:
        where = f" (`{bad[0].where}`)" if bad[0].where else ""
        raise CheckFailed(
            f"not so: {bad[0].words}{where}",
            hint="where the file's shapes are wrong, fetch it again; else this is a fault of ours",
        )


def _show_names(calls: Calls, asked: Asked, about: dict[str, Any], out: Output) -> None:
    from llmcli.measure.names import name_rows

    rows = name_rows(calls, asked)
    if out.json:
        out.document({"names": rows}, model=about, environment=environment())
        return
    from llmcli.render.shapes import render_names
    from llmcli.render.stats import model_line

    out.show(render_names(rows, model_line(about)))


def _show_stored(checkpoint: Checkpoint, out: Output) -> None:
    """The file's own tensors, where nothing says what they are."""
    from llmcli.measure.shapes import file_tensors

    tensors = file_tensors(checkpoint)
    if out.json:
        about = {
            "name": checkpoint.name,
            "path": checkpoint.path,
            "weight_format": None,
            "activation_format": None,
        }
        body = {"tensors": [_file_tensor(tensor) for tensor in tensors], "checks": {}}
        out.document(body, model=about, environment=environment())
        return
    from llmcli.render.shapes import render_stored

    out.note("there is no config.json beside the file: these are its tensors as they are stored")
    out.show(render_stored(tensors, checkpoint.name))


def _check_positions(calls: Calls) -> None:
    """Raises PromptTooLong where a model that has learned its positions has too few of them."""
    positions = calls.config.embedding.positions
    if positions is not None and calls.tokens + 1 > positions:
        raise PromptTooLong(
            f"{calls.tokens} tokens and one step more do not fit the {positions} positions that "
            "the model has learned",
            hint=f"use at most {positions - 1} tokens",
        )


def _device(name: str) -> Any:
    """The device that a run would take; the GPUs are asked for only where one is meant."""
    from llmcli.measure.memory import cpu, machine_devices

    if name == "cpu":
        return cpu()
    asked = "cuda:0" if name == "cuda" else name
    devices = [
        device
        for device in machine_devices()
        if device.device == asked or (name == "auto" and device.usable)
    ]
    if not devices:
        raise UsageError(f"there is no device `{name}` here", hint="use --device cpu")
    return devices[0]


def _body(report: ShapesReport) -> dict[str, Any]:
    """The report as JSON has it: every tensor by itself, and which of them are one row."""
    rows = [{"name": row.name, "layers": row.layers, "formula": row.formula} for row in report.rows]
    return {
        "batch": report.batch,
        "tokens": report.tokens,
        "phases": report.phases,
        "ran": report.ran,
        "letters": report.letters,
        "tensors": [_tensor(tensor) for tensor in report.tensors],
        "rows": rows,
        "layers": report.kinds,
        "cache": report.growth,
        "checks": checks_document(report.checks),
    }


def _tensor(tensor: ShapeTensor) -> dict[str, Any]:
    fields = {name: value for name, value in vars(tensor).items() if name != "stored"}
    if tensor.stored is None:
        return fields
    return fields | _stored(tensor.stored)


def _stored(stored: Stored) -> dict[str, Any]:
    return {
        "source": stored.source,
        "stored_shape": stored.shape,
        "stored_format": stored.format,
        "stored_bytes": stored.bytes,
        "operations": stored.operations,
    }


def _file_tensor(stored: Stored) -> dict[str, Any]:
    """A tensor that nothing describes: without letters, formula and place."""
    return {
        "name": stored.source,
        "kind": "parameter",
        "axes": None,
        "shape": stored.shape,
        "dtype": stored.format,
        "bytes": stored.bytes,
        "phase": None,
        "layer": None,
        "formula": None,
        **_stored(stored),
    }
