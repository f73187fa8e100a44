"""`llmcli shapes`: every tensor of a model, with its letters and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from llmcli.errors import CheckFailed, PromptTooLong, UsageError
from llmcli.records.document import members
from llmcli.records.numbers import did_you_mean
from llmcli.shell.encoding import ChatOptions, check_fits, encode
from llmcli.shell.inspection import parse_numbers
from llmcli.shell.options import GivenPromptOptions, ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, opt
from llmcli.shell.prompts import read_prompt
from llmcli.shell.running import (
    chosen_devices,
    model_of_headers,
    note_quantize,
    opened_headers,
    unloaded_model,
)

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.commands.shapes.measure import ShapesRequest
    from llmcli.config.model import ModelConfig
    from llmcli.graph.precision import Precision
    from llmcli.graph.spec import Kind
    from llmcli.records.text import Token
    from llmcli.shell.prompts import Prompt

TOKENS = 12  # of the example prompt, where none is given
HINT = "where the file's shapes are wrong, fetch it again; otherwise this is a bug in llmcli"

EPILOG = """
Letters of the axes, in parentheses those of the papers:

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


@dataclass(frozen=True, kw_only=True)
class ShapesOptions:
    """Which calls of the model the numbers are for, which tensors, and how much is said of them."""

    panel: ClassVar[str] = "Shapes"
    phase: Literal["prefill", "decode", "both"] = opt(
        "both",
        "--phase PHASE",
        "Reading the prompt (prefill), one step after it (decode), or both.",
    )
    batch: int = opt(1, "--batch B", "Batch size.", at_least=1)
    tokens: int | None = opt(
        None,
        "--tokens T",
        f"Tokens of the prompt. [default: those of PROMPT, else {TOKENS}]",
        at_least=1,
        excludes=("PROMPT", "--file", "--ids"),
    )
    all: bool = opt(
        False,
        "--all",
        "Every tensor with dtype, bytes, FLOPs, memory and the file's own name. [default: where "
        "tensors are chosen by the options below]",
    )
    params: bool = opt(False, "--params", "Parameters only.", excludes=("--activations", "--phase"))
    only_activations: bool = opt(False, "--activations", "Activations and the cache only.")
    layer: str | None = opt(None, "--layer 0,3-5", "These layers only; -1 is the last.")
    filter: str | None = opt(
        None,
        "--filter GLOB",
        "Only names that match: blocks.*.attn.q, blocks.0-3.*; other programs' names work too.",
    )
    names: bool = opt(
        False,
        "--names",
        "What each tensor is, its formula, and its names in other programs.",
        excludes=("PROMPT", "--file", "--ids"),
    )

    def request(
        self, config: ModelConfig, precision: Precision, prompt: tuple[Token, ...] = ()
    ) -> ShapesRequest:
        """What is computed, for as many tokens as `prompt` has, where it has any.

        Raises UsageError for unknown layers and names, PromptTooLong where a model has learned too
        few positions.
        """
        from llmcli.commands.shapes.measure import ShapesRequest
        from llmcli.families.sources import sources
        from llmcli.graph.names import Names
        from llmcli.graph.spec import PHASES

        kinds: tuple[Kind, ...] = ("parameter", "activation", "state")
        if self.params or self.only_activations:
            kinds = kinds[:1] if self.params else kinds[1:]
        layers = names = None
        if self.layer is not None:
            layers = parse_numbers(self.layer, len(config.layers), "--layer", "layers")
        if self.filter is not None:
            names = frozenset(Names(config, sources(config)).select(self.filter, kinds))
        found = ShapesRequest(
            config=config,
            precision=precision,
            batch=self.batch,
            tokens=len(prompt) or self.tokens or TOKENS,
            phases=PHASES if self.phase == "both" else (self.phase,),
            kinds=kinds,
            layers=layers,
            names=names,
            prompt=prompt,
            example=not (prompt or self.tokens),
        )
        positions = config.embedding.positions
        if positions is not None and found.tokens + 1 > positions:
            raise PromptTooLong(
                f"{found.tokens} tokens and one step more do not fit the {positions} positions "
                "that the model has learned",
                hint=f"use at most {positions - 1} tokens",
            )
        return found


def command(
    prompt: GivenPromptOptions,
    shapes: ShapesOptions,
    model: Annotated[
        ModelOptions, Without(("activations", "threads", "seed", "random_weights", "edit"))
    ],
    output: ViewOutputOptions,
) -> None:
    """Every tensor of a model: symbolic and numeric shape, memory, formula, name in the file.

    From the configuration and the headers of the files alone, without weights and without
    PyTorch. A PROMPT gives the number of tokens. Layers that are identical are one row. A model as
    a whole is one table; `--all`, or a choice of tensors, shows everything about each of them.
    """
    from llmcli.commands.shapes import measure, view
    from llmcli.measure.machine import cpu, machine_devices
    from llmcli.prepare import placement
    from llmcli.prepare.prepared import prepare

    out = Output("shapes", output)
    text = None
    if prompt.prompt is not None or prompt.file is not None or prompt.ids is not None:
        text = read_prompt(prompt, out.note)
    # a driver is queried for its GPUs only where one may be meant
    devices = (cpu(),) if model.device == "cpu" else machine_devices()
    used = chosen_devices(model.device, devices)[: None if "," in model.device else 1]
    with opened_headers(model, out) as (checkpoint, place):
        if checkpoint.config is None and shapes.params and text is None:
            _show_stored(checkpoint, shapes, out)
            return
        prepared = prepare(checkpoint)
        config = prepared.config
        context = model.context_length
        placed = placement.place(prepared, used, context=context, **model.precision_options)
        precision = placed.precision
        note_quantize(model, checkpoint, out)
        tokens: tuple[Token, ...] = ()
        if text is not None:
            tokens = _tokens(text, checkpoint, config, model.context_length, out)
        request = shapes.request(config, precision, tokens)
        about = model_of_headers(checkpoint, place, config, precision, placed.devices)
        if shapes.names:
            names = measure.model_names(request)
            out.present(lambda: view.render_names(names, about), members(names), model=about)
            return
        stored, checks = measure.stored_tensors(prepared), measure.stored_check(prepared)
        report = measure.model_shapes(request, stored, checks)
        if not report.rows:
            raise UsageError(
                "these options together leave no tensor to show",
                hint="embeddings, the final norm and the head are in no layer",
            )
        chosen = {shapes.layer, shapes.filter} != {None}
        detailed = shapes.all or shapes.params or shapes.only_activations or chosen
        try:
            out.present(
                lambda: view.render_shapes(report, about, detailed=detailed),
                members(report),
                model=about,
                checks=report.checks,
                hint=HINT,
            )
        except CheckFailed:
            if checkpoint.tensors:
                from llmcli.loading.load import check_loadable  # and so PyTorch, to report a fault

                check_loadable(prepared)  # raises what loading would raise
            raise


def _tokens(
    prompt: Prompt, checkpoint: Checkpoint, config: ModelConfig, context: int | None, out: Output
) -> tuple[Token, ...]:
    """Every token of the prompt; the texts are empty without a tokenizer.

    Raises UsageError, PromptTooLong where they do not fit the context (`context`: as the user gave
    it), and CheckpointError for a text without a tokenizer.
    """
    from llmcli.text.load import text_interface

    model = text_interface(checkpoint, config, text=not prompt.ids)
    for note in () if model.tokenizer is None or prompt.ids else model.tokenizer.notes:
        out.note(note)
    encoded = encode(prompt, ChatOptions(raw=True), model)
    check_fits([encoded], config, context)
    return model.tokens(encoded.ids)


def _show_stored(checkpoint: Checkpoint, shapes: ShapesOptions, out: Output) -> None:
    """The file's own tensors, without letters, formulas and places: nothing describes them.

    Raises UsageError for what needs a configuration, and where no name matches.
    """
    from llmcli.commands.shapes.measure import file_tensors
    from llmcli.commands.shapes.view import render_stored

    for flag, given in (("--layer", shapes.layer is not None), ("--names", shapes.names)):
        if given:
            raise UsageError(
                f"`{flag}` needs the model's config.json beside the file",
                hint='choose tensors by the names in the file: `--filter "*.0.*"`',
            )
    stored, wanted = file_tensors(checkpoint), shapes.filter
    names = [tensor.source for tensor in stored]
    if wanted is not None:  # a name may have brackets of its own
        stored = [one for one in stored if wanted == one.source or fnmatchcase(one.source, wanted)]
    if wanted is not None and not stored:
        near = get_close_matches(wanted, names, 1)
        otherwise = 'leave it out to see all of them, or use `*`, as in `--filter "*norm*"`'
        raise UsageError(
            f"the file has no tensor `{wanted}`",
            hint=did_you_mean(near, otherwise),
        )
    if not out.json:
        out.note("there is no config.json beside the file: these are its tensors as stored")
    tensors = [
        {
            "name": one.source,
            "kind": "parameter",
            "shape": one.stored_shape,
            "dtype": one.stored_format,
            "bytes": one.stored_bytes,
            **dict.fromkeys(("axes", "phase", "layer", "formula")),
            **members(one),
        }
        for one in stored
    ]
    out.present(
        lambda: render_stored(stored, checkpoint.name),
        {"tensors": tensors, "checks": {}},
        model=unloaded_model(checkpoint, str(checkpoint.path)),
    )
