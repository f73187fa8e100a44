"""What `llmcli attention` takes: which heads, what of them is shown, and where files go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.cli.looking import parse_numbers, parse_span
from llmcli.cli.params import Range
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.config import ModelConfig
    from llmcli.reports.attention import Metric

HEADS, VIEW = "Heads", "View"
FILES = ("safetensors", "npz", "json", "csv", "html", "png")
MOST_DRAWN = 12  # matrices on one screen


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Which heads, and what of them."""

    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            metavar="LAYERS",
            rich_help_panel=HEADS,
            help="Layers such as 0,3-5,-1. [default: all]",
        ),
    ] = None
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="HEADS",
            rich_help_panel=HEADS,
            help="Heads of these layers, such as 2 or 0-3. [default: all]",
        ),
    ] = None
    what: Annotated[
        Literal["pattern", "scores"],
        typer.Option(
            "--what",
            metavar="pattern|scores",
            rich_help_panel=HEADS,
            help="What matrices hold: weights, or what softmax makes them of. Metrics and pairs "
            "are always of the weights.",
        ),
    ] = "pattern"
    weighted: Annotated[
        bool,
        typer.Option(
            "--weighted",
            rich_help_panel=HEADS,
            help="Metrics of A[i,j] ‖v_j W_O‖, what is really moved, and pairs ranked by it.",
        ),
    ] = False
    synthetic: Annotated[
        int | None,
        typer.Option(
            "--synthetic",
            metavar="N",
            rich_help_panel=HEADS,
            help="Instead of a text N random tokens, twice (32 is plenty): induction and "
            "duplicate-token heads show there. --seed (here 0 by default) draws others.",
        ),
        Range(2, 100_000),
    ] = None

    def numbers(self, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The layers, and the heads (None: all); raises UsageError for one that is not there."""
        count = len(config.layers)
        layers = tuple(range(count))
        if self.layer is not None:
            layers = parse_numbers(self.layer, count, "--layer", "layers")
        if self.head is None:
            return layers, None
        most = max(config.layers[layer].mixer.heads for layer in layers)
        return layers, parse_numbers(self.head, most, "--head", "heads")


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """What is shown of the heads; nothing of it: the map, or the matrices of the heads named."""

    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            metavar="SPAN",
            rich_help_panel=VIEW,
            help="Only these rows of the matrices, such as 40:80, :10 or -5:.",
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="SPAN",
            rich_help_panel=VIEW,
            help="Only these columns of the matrices.",
        ),
    ] = None
    scale: Annotated[
        Literal["linear", "sqrt", "log"] | None,
        typer.Option(
            "--scale",
            metavar="linear|sqrt|log",
            rich_help_panel=VIEW,
            help="How values become colours. [default: sqrt for weights, else linear]",
        ),
    ] = None
    map: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="METRIC",
            rich_help_panel=VIEW,
            help="One metric of every head, as a map of layers and heads.",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="all|A,B",
            rich_help_panel=VIEW,
            help="A table of metrics, a row for each head.",
        ),
    ] = None
    top_pairs: Annotated[
        int,
        typer.Option(
            "--top-pairs",
            metavar="N",
            rich_help_panel=VIEW,
            help="The N largest weights, without the first key and the token itself.",
        ),
        Range(0, 10_000),
    ] = 0
    all_pairs: Annotated[
        bool,
        typer.Option(
            "--all-pairs",
            rich_help_panel=VIEW,
            help="With --top-pairs: the first key and the token itself count, too.",
        ),
    ] = False
    patterns: Annotated[
        bool,
        typer.Option(
            "--patterns", rich_help_panel=VIEW, help="With --json: the matrices are in it, too."
        ),
    ] = False
    save: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            rich_help_panel=VIEW,
            help=f"Also write the heads to a file, by its ending: {', '.join(FILES)}.",
        ),
    ] = None
    force: Annotated[
        bool,
        typer.Option("--force", rich_help_panel=VIEW, help="Write a file however large it gets."),
    ] = False

    @property
    def listed(self) -> bool:
        """Whether something else than matrices is asked for."""
        return self.map is not None or self.metrics is not None or self.top_pairs > 0

    @property
    def zoomed(self) -> bool:
        """Whether a part of matrices is asked for."""
        return self.query is not None or self.key is not None

    def draws(self, heads: HeadOptions) -> bool:
        """Whether matrices are drawn."""
        named = heads.layer is not None or heads.head is not None
        return self.zoomed or (named and not self.listed)

    def check(self, heads: HeadOptions, *, json: bool) -> None:
        """Raises UsageError for options that have nothing to act on."""
        drawn = self.draws(heads)
        if self.zoomed and heads.layer is None and heads.head is None:
            raise UsageError(
                f"`--{'query' if self.query is not None else 'key'}` is a part of a head's matrix, "
                "and no head is named",
                hint="add --layer and --head",
            )
        if self.patterns and not json:
            raise UsageError("`--patterns` is for --json", hint="or write them with -o FILE.json")
        if self.all_pairs and not self.top_pairs:
            raise UsageError("`--all-pairs` is for --top-pairs", hint="such as `--top-pairs 20`")
        if heads.what == "scores" and not (drawn or self.patterns or self.save is not None):
            raise UsageError(
                "`--what scores` is about matrices, and none is shown",
                hint="add --layer and --head",
            )
        if self.scale is not None and not (drawn or self.map is not None or self.save is not None):
            raise UsageError(
                "`--scale` is for matrices and `--map`, and none is shown",
                hint="add --layer and --head, or --map METRIC",
            )

    def spans(self, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The queries and the keys that are drawn, of so many tokens."""
        return parse_span(self.query, tokens, "--query"), parse_span(self.key, tokens, "--key")


def metrics_named(text: str, known: Sequence[Metric], option: str) -> tuple[Metric, ...]:
    """`all`, or names separated by commas (`-` is as `_`); raises UsageError for others."""
    if text == "all":
        return tuple(known)
    by_name = {metric.name: metric for metric in known}
    found = {}
    for name in (part.strip().replace("-", "_") for part in text.split(",")):
        if name not in by_name:
            near = get_close_matches(name, by_name, 3, 0.5)
            raise UsageError(
                f"`{option}`: there is no metric `{name}`",
                hint=f"did you mean {' or '.join(near)}?" if near else f"of {', '.join(by_name)}",
            )
        found[name] = by_name[name]
    return tuple(found.values())
