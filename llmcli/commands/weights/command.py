"""`llmcli weights`: norms, damage, spectra and circuits of the parameters, without a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from llmcli.errors import UsageError
from llmcli.records.document import Checked, members
from llmcli.shell.answer import parse_token
from llmcli.shell.inspection import parse_numbers
from llmcli.shell.options import ModelOptions, ViewOutputOptions
from llmcli.shell.output import Output
from llmcli.shell.params import Without, arg, opt
from llmcli.shell.progress import Progress
from llmcli.shell.running import header, load_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.config.model import ModelConfig
    from llmcli.model import Model

HINT = "where a parameter is damaged, fetch the file again; otherwise this is a bug in llmcli"
EPILOG = """
Norms of every matrix by layer, outliers, and damage: what is not finite, rows of
zeros, blocks and single numbers far from their row and columns. A damaged file
exits 1. A wrong sign, or a scale off by less than 6, looks like any other weight.

Examples:

  llmcli weights
  llmcli weights blocks.5.mlp.W_down
  llmcli weights "blocks.0-3.attn.W_*"
  llmcli weights --layer 5 --head 2 --token " Paris"
  llmcli weights --layer 5 --head 0-8
  llmcli weights --composition --layer 0-9
"""


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Which parameters or heads."""

    panel: ClassVar[str] = "Weights"
    name: str | None = arg(
        None, "[NAME]", "Parameters to decompose, such as blocks.5.attn.W_q or blocks.0-3.mlp.W_*."
    )
    layer: str | None = opt(
        None,
        "--layer LAYERS",
        "Layers of the heads, such as 0,3-5,-1. [default: all]",
        excludes=("NAME",),
    )
    head: str | None = opt(
        None,
        "--head HEADS",
        "QK and OV circuits of heads of these layers, such as 2 or 0-3.",
        excludes=("NAME",),
    )
    token: str | None = opt(
        None,
        "--token TOKEN",
        "What the heads write and seek for a token (in quotes to keep a space; an id without a "
        "tokenizer).",
        needs=("--head",),
    )
    composition: bool = opt(
        False,
        "--composition",
        "Which heads read what earlier ones write: Q-, K- and V-composition of all pairs.",
        excludes=("NAME", "--head"),
    )

    def check(self, config: ModelConfig) -> None:
        """Refuses names, layers and heads that are not there, before the weights are read."""
        if self.layer is not None and self.head is None and not self.composition:
            raise UsageError(
                "`--layer` chooses heads", hint="add `--head 0`, or name `blocks.0-3.*`"
            )
        self.names(config)
        if self.head is not None or self.composition:
            self.heads(config)

    def names(self, config: ModelConfig) -> tuple[str, ...]:
        """The parameters of NAME, none without one. Raises UsageError where none matches."""
        from llmcli.families.sources import sources
        from llmcli.graph.names import Names

        if self.name is None:
            return ()
        return Names(config, sources(config)).select(self.name, ("parameter",))

    def heads(self, config: ModelConfig) -> tuple[tuple[int, int], ...]:
        """The chosen (layer, head), all heads of the layers without `--head`.

        Raises UsageError for a layer without queries and keys.
        """
        from llmcli.graph.absent import absence_reason
        from llmcli.graph.graph import graph
        from llmcli.graph.ops import Mix

        model, found = graph(config), list[tuple[int, int]]()
        ops = {layer: node.op for layer, node in model.mixers.items()}
        having = [at for at, op in ops.items() if isinstance(op, Mix) and model.score(op)]
        chosen = having or [0]
        if self.layer is not None:
            chosen = sorted(parse_numbers(self.layer, len(config.layers), "--layer", "layers"))
        for layer in chosen:
            if layer not in having:
                why = absence_reason(f"blocks.{layer}.attn.scores", config)
                raise UsageError(
                    f"layer {layer} has no heads of queries and keys: {why}",
                    hint=f"`llmcli weights 'blocks.{layer}.*'` decomposes its matrices",
                )
            count = model.sizes(layer)["H"]
            numbers = parse_numbers(self.head or f"0-{count - 1}", count, "--head", "heads")
            found += ((layer, head) for head in numbers)
        return tuple(found)


def command(
    weights: WeightsOptions,
    model: Annotated[ModelOptions, Without(("edit",))],
    output: ViewOutputOptions,
) -> None:
    """Parameters without a prompt: norms by layer, damaged tensors, spectra, heads' circuits.

    The numbers are those that the model multiplies with, read from its own weights in their own
    format. Checks: no parameter is damaged, every number is read once, products with them are the
    model's own, Σσ² is the squared norm; otherwise the command exits 1.
    """
    from llmcli.ui.facts import model_line

    out = Output("weights", output)
    loaded = load_model(
        model, out, text=weights.token is not None, check=weights.check
    ).model
    with Progress(out) as progress:
        report, render = _measured(weights, loaded, progress)
    about = loaded.describe()
    out.present(
        lambda: render(report, model_line(about)),
        members(report),
        **header(about),
        checks=report.checks,
        hint=HINT,
    )


def _measured(
    weights: WeightsOptions, model: Model, progress: Progress
) -> tuple[Checked, Callable[[Any, str], RenderableType]]:
    """The report that the options request, and its view."""
    from llmcli.commands.weights import view
    from llmcli.commands.weights.measure import circuits, tensors

    if names := weights.names(model.config):
        return tensors.measure_spectra(model, names, progress), view.render_spectra
    if weights.head is None and not weights.composition:
        return tensors.measure_weights(model, progress), view.render_weights
    heads, token = weights.heads(model.config), None
    if weights.composition:
        return circuits.measure_composition(model, heads, progress), view.render_composition
    if weights.token is not None:
        token = parse_token(weights.token, "--token", model.tokenizer, model.config.vocab)
    return circuits.measure_heads(model, heads, token, progress), view.render_heads
