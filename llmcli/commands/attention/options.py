"""What `llmcli attention` takes: which heads, what of them is shown, and where files go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.cli.looking import parse_span
from llmcli.cli.params import Range

if TYPE_CHECKING:
    from llmcli.reports.matrix import What

HEADS, VIEW = "Heads", "View"
FILES = ("safetensors", "npz", "json", "csv", "html", "png")


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
        Literal["pattern", "scores", "state"],
        typer.Option(
            "--what",
            metavar="pattern|scores|state",
            rich_help_panel=HEADS,
            help="What matrices hold: weights, or what softmax makes them of. Metrics and pairs "
            "are always of the weights. `state`: norm and effective rank over time of what gated "
            "DeltaNet and Mamba-2 layers keep in place of keys and values.",
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

    @property
    def matrices(self) -> What:
        """What matrices hold: `state` is of none."""
        return "scores" if self.what == "scores" else "pattern"

    @property
    def named(self) -> bool:
        """Whether some layers or heads are chosen."""
        return self.layer is not None or self.head is not None

    @property
    def single(self) -> bool:
        """Whether one head is chosen, by one number each."""
        return all(re.fullmatch(r"\s*-?\d+\s*", text or "") for text in (self.layer, self.head))


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """What is shown of the heads; nothing of it: the map, or the matrices of the heads named.

    A single head is drawn whatever else is shown of it.
    """

    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            metavar="SPAN",
            rich_help_panel=VIEW,
            help="Only these rows of the matrices, and pairs of these queries: 40:80, :10 or -5:.",
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="SPAN",
            rich_help_panel=VIEW,
            help="Only these columns of the matrices, and pairs of these keys.",
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
            help="A table of metrics, a row for each head; a single head's stand one below the "
            "other.",
        ),
    ] = None
    top_pairs: Annotated[
        int,
        typer.Option(
            "--top-pairs",
            metavar="N",
            rich_help_panel=VIEW,
            help="The N largest weights (within --query and --key), without the first key and the "
            "token itself.",
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
        """Whether a part of the queries or keys is asked for."""
        return self.query is not None or self.key is not None

    def draws(self, heads: HeadOptions) -> bool:
        """Whether matrices are drawn: a single head's always, others' where nothing is listed."""
        return heads.single or (heads.named and not self.listed)

    def spans(self, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The queries and the keys that are asked for, of so many tokens."""
        return parse_span(self.query, tokens, "--query"), parse_span(self.key, tokens, "--key")
