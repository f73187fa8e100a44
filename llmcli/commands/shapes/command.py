"""`llmcli shapes`: every tensor of a model, with its letters and its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.cli.headers import chosen_devices, opened_headers
from llmcli.cli.looking import token_texts
from llmcli.cli.options import GivenPromptOptions, ModelOptions, OutputOptions
from llmcli.cli.output import Output, require
from llmcli.cli.running import kernels_of, load_model
from llmcli.commands.shapes.document import shapes_document, stored_tensor
from llmcli.commands.shapes.options import TOKENS, CallOptions, ChoiceOptions
from llmcli.errors import CheckFailed, PromptTooLong, UsageError
from llmcli.observe.environment import environment
from llmcli.reports.info import NO_FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcli.checkpoints import Checkpoint
    from llmcli.commands.shapes.measure.tensors import Asked, Calls
    from llmcli.commands.shapes.report import ShapesReport
    from llmcli.config import ModelConfig
    from llmcli.families import Rule

EPILOG = """
Letters, and what the papers call the same:

  B  sequences (b)        H  heads (h)
  T  new tokens (n)       Hk heads of keys and values
  S  tokens so far (n)    dh a head's query and key (d/h)
  D  width (d)            dv a head's value (d/h)
  V  vocabulary (v)       F  neurons of the feed-forward

Examples:

  llmcli shapes
  llmcli shapes "In the beginning" --phase prefill
  llmcli shapes --layer 0 --batch 4 --tokens 512
  llmcli shapes --filter "blocks.*.attn.pattern" --json
  llmcli shapes --names -m tiny
  llmcli shapes --params -m model.safetensors
"""


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
    choice.check(call)
    if given and call.tokens is not None:
        raise UsageError(
            "`--tokens` goes without a prompt, which has its own", hint="leave one of them out"
        )
    if given and choice.names:
        raise UsageError(
            "`--names` goes without a prompt: names are the same for all",
            hint="leave one of them out",
        )
    if given:
        _show_run(prompt, call, choice, model, out)
    else:
        _show_headers(call, choice, model, out)


def _show_headers(
    call: CallOptions, choice: ChoiceOptions, options: ModelOptions, out: Output
) -> None:
    """What the configuration and the headers of the files say."""
    from llmcli.commands.shapes.measure.stored import stored_check, stored_tensors
    from llmcli.commands.shapes.measure.tensors import Calls, model_shapes
    from llmcli.families import plan, translate
    from llmcli.observe.fit import chosen_arithmetic
    from llmcli.observe.memory import cpu, machine_devices

    # a driver is asked for its GPUs only where one may be meant
    devices = (cpu(),) if options.device == "cpu" else machine_devices()
    device = chosen_devices(options.device, devices)[0]
    with opened_headers(options, out) as (checkpoint, place):
        if checkpoint.config is None and choice.params:
            _show_stored(checkpoint, choice, out)
            return
        config, rules = translate(checkpoint)
        formats = {info.format for info in checkpoint.tensors.values()}
        todo = plan(checkpoint.tensors, rules, config)
        numbers = chosen_arithmetic(
            checkpoint, config, todo, device, options.dtype, options.quantize
        )
        tokens = call.tokens or TOKENS
        calls = Calls(config=config, batch=call.batch, tokens=tokens, numbers=numbers)
        _check_positions(calls)
        asked = choice.asked(config)
        about = _about(calls, checkpoint.name, place, formats, device.device)
        if choice.names:
            _show_names(calls, asked, about, out, example=call.tokens is None)
            return
        stored = stored_tensors(checkpoint, rules, config)
        checks = stored_check(checkpoint, rules, config)
        report = model_shapes(calls, call.phases(), asked, stored, checks)
        try:
            _show(replace(report, example=call.tokens is None), about, out)
        except CheckFailed:
            _require_fit(checkpoint, rules, config)
            raise


def _require_fit(checkpoint: Checkpoint, rules: Sequence[Rule], config: ModelConfig) -> None:
    """Raises what loading those weights would raise, for a file whose headers do not fit."""
    from llmcli.anatomy import parameters
    from llmcli.families import plan

    if checkpoint.tensors:
        from llmcli.weights import check_fit  # and so PyTorch, where there is a fault to tell

        todo = plan(checkpoint.tensors, rules, config)
        check_fit(todo, checkpoint.tensors, parameters(config))


def _about(calls: Calls, name: str, place: str, formats: set[str], device: str) -> dict[str, Any]:
    """The `model` object of the document, as far as headers tell."""
    weights = calls.parameters()
    return {
        "name": name,
        "path": place,
        "family": calls.config.family,
        "model_type": calls.config.model_type,
        "parameters": sum(spec.count for spec in weights),
        "context": calls.config.context,
        "stored_formats": sorted(formats),
        **calls.numbers.describe(calls.config),
        "weight_bytes": sum(spec.bytes or 0 for spec in weights),
        "device": device,
        "random_weights_seed": None,
    }


def _show_run(
    prompt: GivenPromptOptions,
    call: CallOptions,
    choice: ChoiceOptions,
    options: ModelOptions,
    out: Output,
) -> None:
    """The same of a loaded model that has read the prompt and taken one step more."""
    from llmcli.cli.encoding import check_fits, encode
    from llmcli.cli.prompts import note_model_name, read_prompt
    from llmcli.cli.template import ChatOptions
    from llmcli.commands.shapes.measure.stored import stored_tensors
    from llmcli.commands.shapes.measure.tensors import Calls, model_shapes
    from llmcli.families import translate

    note_model_name(prompt.prompt, out.note)
    given = read_prompt(prompt)

    def check(config: ModelConfig) -> None:
        choice.asked(config)  # refuses layers and names that are not there

    model = load_model(options, out, text=given.ids is None, check=check).model
    config = model.config
    asked = choice.asked(config)
    encoded = encode(given, ChatOptions(raw=True), model)
    room = options.context_length or config.context
    list(check_fits([encoded], 1, room, largest=config.embedding.positions))

    from llmcli.commands.shapes.measure.ran import run_checks, sources_check

    tokens, numbers = len(encoded.ids), model.arithmetic
    calls = Calls(config=config, batch=call.batch, tokens=tokens, numbers=numbers)
    _check_positions(calls)
    stored = stored_tensors(model.checkpoint, translate(model.checkpoint)[1], config)
    checks = (
        *run_checks(model, encoded.ids, call.batch),
        *sources_check(model.ledger, stored),
    )
    report = model_shapes(calls, call.phases(), asked, stored, checks, ran=True)
    report = replace(report, prompt=token_texts(model, encoded.ids))
    _show(report, model.describe(), out)


def _show(report: ShapesReport, about: dict[str, Any], out: Output) -> None:
    if not report.rows:
        raise UsageError(
            "these options together leave no tensor to show",
            hint="embeddings, the final norm and the head are in no layer",
        )
    if out.json:
        machine = environment(kernels=kernels_of(about) if report.ran else ())
        out.document(shapes_document(report), model=about, environment=machine)
    else:
        from llmcli.commands.shapes.view.screen import render_shapes
        from llmcli.ui.stats import model_line

        out.show(render_shapes(report, model_line(about)))
    require(
        report.checks,
        "where the file's shapes are wrong, fetch it again; else this is a fault of ours",
    )


def _show_names(
    calls: Calls, asked: Asked, about: dict[str, Any], out: Output, *, example: bool
) -> None:
    from llmcli.commands.shapes.measure.names import name_rows
    from llmcli.commands.shapes.measure.tensors import letter_values

    rows = name_rows(calls, asked)
    if out.json:
        out.document({"names": rows}, model=about, environment=environment())
        return
    from llmcli.commands.shapes.view.names import render_names
    from llmcli.ui.stats import model_line

    letters = letter_values(calls, ("prefill",))
    out.show(render_names(rows, letters, model_line(about), example=example))


def _show_stored(checkpoint: Checkpoint, choice: ChoiceOptions, out: Output) -> None:
    """The file's own tensors, where nothing says what they are."""
    from llmcli.commands.shapes.measure.stored import file_tensors

    tensors = choice.chosen(file_tensors(checkpoint))
    if out.json:
        about = {"name": checkpoint.name, "path": checkpoint.path, **NO_FORMATS}
        body = {"tensors": [stored_tensor(tensor) for tensor in tensors], "checks": {}}
        out.document(body, model=about, environment=environment())
        return
    from llmcli.commands.shapes.view.screen import render_stored

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
