"""`llmcli weights`: norms, damage, spectra and circuits of the parameters, without a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

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
    from llmcli.config.model import ModelConfig

HINT = "where a parameter is damaged, fetch the file again; otherwise this is a bug in llmcli"
EPILOG = """
Norms of every matrix by layer, outliers, and damage: what is not finite, rows of
zeros, blocks and single numbers far from their row and columns. A damaged file
exits 1. A wrong sign, or a scale off by less than 6, looks like any other weight.

Examples:

  llmcli weights
  llmcli weights "blocks.0-3.attn.W_*"
  llmcli weights --layer 5 --head 2 --token " Paris"
  llmcli weights --layer 5
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
        None, "--layer LAYERS", "Layers of the heads. [default: all]", excludes=("NAME",)
    )
    head: str | None = opt(
        None, "--head HEADS", "QK and OV circuits of heads such as 2 or 0-3.", excludes=("NAME",)
    )
    token: str | None = opt(
        None,
        "--token TOKEN",
        "What the heads write and seek for a token.",
        needs=("--layer", "--head"),
        excludes=("--composition",),
    )
    composition: bool = opt(
        False,
        "--composition",
        "Which heads read what earlier ones write: Q-, K- and V-composition of all pairs.",
        excludes=("NAME", "--head"),
    )

    def check(self, config: ModelConfig) -> None:
        """Refuses names, layers and heads that are not there, before the weights are read."""
        self.names(config)
        if self.composition or self.of_heads:
            self.heads(config)

    @property
    def of_heads(self) -> bool:
        """Whether circuits are shown; `--layer` alone chooses all of its heads."""
        return self.head is not None or self.layer is not None

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
        mixers = ((layer, node.op) for layer, node in model.mixers.items())
        having = [layer for layer, op in mixers if isinstance(op, Mix) and model.score(op)]
        chosen: Sequence[int] = having or [0]
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
            every = f"0-{count - 1}" if self.head is None else self.head
            found += ((layer, at) for at in parse_numbers(every, count, "--head", "heads"))
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
    loaded = load_model(model, out, text=weights.token is not None, check=weights.check).model
    from llmcli.commands.weights import view
    from llmcli.commands.weights.measure import circuits, tensors

    config, token = loaded.config, None
    report: Checked
    with Progress(out) as progress:
        if weights.token is not None:
            token = parse_token(weights.token, "--token", loaded.tokenizer, config.vocab)
        if weights.name is not None:
            report = tensors.measure_spectra(loaded, weights.names(config), progress)
        elif weights.composition:
            report = circuits.measure_composition(loaded, weights.heads(config), progress)
        elif weights.of_heads:
            report = circuits.measure_heads(loaded, weights.heads(config), token, progress)
        else:
            report = tensors.measure_weights(loaded, progress)
    about = loaded.describe()
    out.present(
        lambda: view.render(report, model_line(about)),
        members(report),
        **header(about), checks=report.checks, hint=HINT,
    )  # fmt: skip
