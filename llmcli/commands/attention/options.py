"""What `llmcli attention` takes: which heads, what of them is shown, and where files go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.cli.looking import parse_span
from llmcli.cli.params import opt

if TYPE_CHECKING:
    from llmcli.reports.matrix import What

HEADS, VIEW = "Heads", "View"
FILES = ("safetensors", "npz", "json", "csv", "html", "png")


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Which heads, and what of them."""

    panel: ClassVar[str] = HEADS
    layer: str | None = opt(None, "--layer", "LAYERS", "Layers such as 0,3-5,-1. [default: all]")
    head: str | None = opt(
        None, "--head", "HEADS",
        "Heads of these layers, such as 2 or 0-3. [default: all]",
    )  # fmt: skip
    what: Literal["pattern", "scores", "state"] = opt(
        "pattern", "--what", "pattern|scores|state",
        "What matrices hold: weights, or what softmax makes them of. Metrics and pairs are always "
        "of the weights. `state`: norm and effective rank over time of what gated DeltaNet and "
        "Mamba-2 layers keep in place of keys and values.",
    )  # fmt: skip
    weighted: bool = opt(
        False, "--weighted",
        "Metrics of A[i,j] ‖v_j W_O‖, what is really moved, and pairs ranked by it.",
    )  # fmt: skip
    synthetic: int | None = opt(
        None, "--synthetic", "N",
        "Instead of a text N random tokens, twice (32 is plenty): induction and duplicate-token "
        "heads show there. --seed (here 0 by default) draws others.", at_least=2, at_most=100_000,
    )  # fmt: skip

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

    panel: ClassVar[str] = VIEW
    query: str | None = opt(
        None, "--query", "SPAN",
        "Only these rows of the matrices, and pairs of these queries: 40:80, :10 or -5:.",
    )  # fmt: skip
    key: str | None = opt(
        None, "--key", "SPAN",
        "Only these columns of the matrices, and pairs of these keys.",
    )  # fmt: skip
    scale: Literal["linear", "sqrt", "log"] | None = opt(
        None, "--scale", "linear|sqrt|log",
        "How values become colours. [default: sqrt for weights, else linear]",
    )  # fmt: skip
    map: str | None = opt(
        None, "--map", "METRIC",
        "One metric of every head, as a map of layers and heads.",
    )  # fmt: skip
    metrics: str | None = opt(
        None, "--metrics", "all|A,B",
        "A table of metrics, a row for each head; a single head's stand one below the other.",
    )  # fmt: skip
    top_pairs: int = opt(
        0, "--top-pairs", "N",
        "The N largest weights (within --query and --key), without the first key and the token "
        "itself.", at_least=0, at_most=10_000,
    )  # fmt: skip
    all_pairs: bool = opt(
        False, "--all-pairs",
        "With --top-pairs: the first key and the token itself count, too.",
    )  # fmt: skip
    patterns: bool = opt(False, "--patterns", "With --json: the matrices are in it, too.")
    save: str | None = opt(
        None, "-o", "--output", "FILE",
        f"Also write the heads to a file, by its ending: {', '.join(FILES)}.",
    )  # fmt: skip
    force: bool = opt(False, "--force", "Write a file however large it gets.")

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
