"""What `llmcli attention` takes: which heads, what of them is shown, and where files go.

All that makes no sense is refused here, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcli.errors import UsageError
from llmcli.records.head_metrics import METRICS, MOST_RANKED, RANK, Metric
from llmcli.records.numbers import spans
from llmcli.shell.looking import check_span, parse_numbers, parse_span
from llmcli.shell.params import opt

if TYPE_CHECKING:
    from llmcli.commands.attention.report.request import AttentionRequest
    from llmcli.config import ModelConfig
    from llmcli.records.matrix import What

HEADS, VIEW = "Heads", "View"
FILES = ("safetensors", "npz", "json", "html", "png")
MOST_DRAWN = 12  # matrices on one screen


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
    synthetic: int | None = opt(
        None, "--synthetic", "N",
        "Instead of a text N random tokens, twice (32 is plenty): induction and duplicate-token "
        "heads show there. --seed (here 0 by default) draws others.", at_least=2, at_most=100_000,
        excludes=("PROMPT", "--file", "--ids", "--chat", "--system", "--set"),
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

    A single head is always drawn, beside anything else that is shown.
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
    patterns: bool = opt(
        False, "--patterns", "With --json: the matrices are in it, too.", needs=("--json",)
    )
    save: str | None = opt(
        None, "-o", "--output", "FILE",
        f"Also write the heads to a file, by its ending: {', '.join(FILES)}.",
    )  # fmt: skip
    open: bool = opt(
        False, "--open",
        "Show it in a browser: the .html or .png of -o, without that a page with every head.",
    )  # fmt: skip
    force: bool = opt(
        False, "--force", "Write a file however large it gets.",
        needs=("--output", "--open", "--patterns"),
    )  # fmt: skip

    @property
    def listed(self) -> bool:
        """Whether something else than matrices is requested."""
        return self.map is not None or self.metrics is not None or self.top_pairs > 0

    @property
    def zoomed(self) -> bool:
        """Whether a part of the queries or keys is requested."""
        return self.query is not None or self.key is not None

    def draws(self, heads: HeadOptions) -> bool:
        """Whether matrices are drawn: a single head's always, others' where nothing is listed."""
        return heads.single or (heads.named and not self.listed)

    @property
    def named(self) -> tuple[Metric | None, tuple[Metric, ...]]:
        """The metrics of `--map` and of `--metrics`. Raises UsageError for unknown ones."""
        mapped = () if self.map is None else metrics_named(self.map, "--map")
        if len(mapped) > 1:
            raise UsageError("`--map` takes one metric", hint="--metrics takes several")
        table = () if self.metrics is None else metrics_named(self.metrics, "--metrics")
        return (mapped[0] if mapped else None), table

    def check(self, heads: HeadOptions) -> None:
        """Raises UsageError for options that have nothing to act on, and for unknown metrics."""
        mapped, _ = self.named
        drawn = self.draws(heads)
        for span, option in ((self.query, "--query"), (self.key, "--key")):
            if span is not None:
                check_span(span, option)
        if self.zoomed and not (drawn or self.top_pairs):
            raise UsageError(
                f"`--{'query' if self.query is not None else 'key'}` is a part of a head's matrix, "
                f"and {'none is shown' if heads.named else 'no head is named'}",
                hint="add --layer and --head, or `--top-pairs 20` for pairs of that part",
            )
        exported = self.save is not None or self.open
        if heads.what == "scores" and not (drawn or exported or self.patterns):
            raise UsageError(
                "`--what scores` is about matrices, and none is shown",
                hint="add --layer and --head",
            )
        if self.scale is not None and not (drawn or exported or mapped is not None):
            raise UsageError(
                "`--scale` is for matrices and `--map`, and none is shown",
                hint="add --layer and --head, or `--map METRIC`",
            )


def request_of(heads: HeadOptions, view: ViewOptions, config: ModelConfig) -> AttentionRequest:
    """What the options request of a model, but for positions (`at_positions`).

    Raises UsageError for layers, heads and metrics that the model does not have, and for too many
    matrices to draw.
    """
    from llmcli.commands.attention.report.request import AttentionRequest, computed, unknown_metrics

    mapped, table = view.named
    names = {metric.name for metric in (*table, *filter(None, [mapped]))}
    for name, why in unknown_metrics(config).items():
        if name in names and len(table) < len(METRICS):
            raise UsageError(f"`{name}`: {why}")
    chosen = _chosen(heads, config)
    if heads.what == "scores":
        _check_scores(chosen, config)
    drawn = view.draws(heads)
    count = sum(map(len, chosen.values()))
    if drawn and count > MOST_DRAWN:
        if view.zoomed or not (view.save or view.open):
            raise UsageError(
                f"those are {count} matrices, and at most {MOST_DRAWN} are drawn",
                hint="name fewer with --layer and --head, or see all heads with `--map METRIC`",
            )
        drawn = False
    if not count:
        raise UsageError(
            "none of these layers has such a head", hint="name others with --layer and --head"
        )
    return AttentionRequest(
        heads=chosen,
        what=heads.matrices,
        metrics=computed(names),
        map=mapped,
        table=table,
        drawn=drawn,
        pairs=view.top_pairs,
        scale=view.scale,
    )


def at_positions(
    request: AttentionRequest, view: ViewOptions, tokens: int, new: int = 0
) -> AttentionRequest:
    """The request for so many `tokens` and up to `new` ones after them.

    Raises UsageError for spans without tokens, and for a rank of matrices that are too large.
    """
    count = tokens + new
    if request.map is not None and request.map.name == RANK and count > MOST_RANKED:
        raise UsageError(
            f"`--map {RANK}` needs whole matrices: up to {MOST_RANKED} tokens, and there are "
            f"{count}"
        )
    queries, keys = (
        None if text is None else parse_span(text, count, option)
        for text, option in ((view.query, "--query"), (view.key, "--key"))
    )
    return replace(request, queries=queries, keys=keys, generate=new)


def _chosen(heads: HeadOptions, config: ModelConfig) -> dict[int, tuple[int, ...]]:
    from llmcli.commands.attention.report.request import head_counts

    counts = head_counts(config)
    layers = tuple(counts)
    if heads.layer is not None:
        layers = parse_numbers(heads.layer, len(config.layers), "--layer", "layers")
        if without := [layer for layer in layers if layer not in counts]:
            has = f"layers that have: {spans(tuple(counts))}"
            raise UsageError(
                f"layer {without[0]} has no attention to look at",
                hint=has if counts else "`llmcli info` says what",
            )
    if not layers:
        raise UsageError("no layer of this model has attention to look at")
    most = max(counts[layer] for layer in layers)
    numbers: Sequence[int] = range(most)
    if heads.head is not None:
        numbers = sorted(parse_numbers(heads.head, most, "--head", "heads"))
    return {
        layer: tuple(head for head in numbers if head < counts[layer]) for layer in layers
    }


def _check_scores(chosen: Mapping[int, tuple[int, ...]], config: ModelConfig) -> None:
    """Raises UsageError where a map is made of no scores."""
    from llmcli.anatomy.graph import graph
    from llmcli.graph.ops import Mix

    model = graph(config)
    scored = [
        layer for layer, node in model.mixers.items()
        if isinstance(node.op, Mix) and model.score(node.op)
    ]  # fmt: skip
    if without := [layer for layer in chosen if layer not in scored]:
        raise UsageError(
            f"layer {without[0]} has no scores: no softmax makes its weights of any",
            hint=f"layers that have: {spans(scored)}; others have `--what pattern`"
            if scored else "use `--what pattern`",
        )


def metrics_named(text: str, option: str) -> tuple[Metric, ...]:
    """`all`, or names separated by commas (`-` is as `_`); raises UsageError for others."""
    by_name = {metric.name: metric for metric in METRICS}
    found: dict[str, Metric] = {}
    for name in (part.strip().replace("-", "_") for part in text.split(",")):
        if name == "all":
            found |= by_name
        elif name not in by_name:
            near = get_close_matches(name, by_name, 3, 0.5)
            raise UsageError(
                f"`{option}`: there is no metric `{name}`",
                hint=f"did you mean {' or '.join(near)}?" if near else f"of {', '.join(by_name)}",
            )
        else:
            found[name] = by_name[name]
    return tuple(found.values())
