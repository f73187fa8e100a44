"""What of the options of `llmcli attention` makes no sense, told before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from llmcli.anatomy.graph import graph
from llmcli.cli.looking import parse_numbers
from llmcli.commands.attention.options import HeadOptions, ViewOptions
from llmcli.commands.attention.report.metrics import METRICS
from llmcli.errors import UsageError
from llmcli.graph.ops import Mix
from llmcli.reports.numbers import spans

if TYPE_CHECKING:
    from llmcli.commands.attention.report.heads import Metric
    from llmcli.config import ModelConfig

MOST_DRAWN = 12  # matrices on one screen


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The views that are asked for: `map` of one metric, the `table` of several, matrices.

    `saved`: whole matrices go to a file, however many they are, drawn or not.
    """

    map: Metric | None
    table: tuple[Metric, ...]
    drawn: bool
    saved: bool

    @classmethod
    def of(cls, heads: HeadOptions, view: ViewOptions, *, json: bool) -> Asked:
        """Raises UsageError for options that have nothing to act on, and for unknown metrics."""
        mapped = () if view.map is None else metrics_named(view.map, "--map")
        if len(mapped) > 1:
            raise UsageError("`--map` takes one metric", hint="--metrics takes several")
        asked = cls(
            map=mapped[0] if mapped else None,
            table=() if view.metrics is None else metrics_named(view.metrics, "--metrics"),
            drawn=view.draws(heads),
            saved=view.save is not None and not view.zoomed,
        )
        asked._check_pointless(heads, view, json=json)
        return asked

    def _check_pointless(self, heads: HeadOptions, view: ViewOptions, *, json: bool) -> None:
        if view.zoomed and not (self.drawn or view.top_pairs):
            raise UsageError(
                f"`--{'query' if view.query is not None else 'key'}` is a part of a head's matrix, "
                f"and {'none is shown' if heads.named else 'no head is named'}",
                hint="add --layer and --head, or `--top-pairs 20` for pairs of that part",
            )
        if view.patterns and not json:
            raise UsageError("`--patterns` is for --json", hint="or write them with `-o FILE.json`")
        if view.all_pairs and not view.top_pairs:
            raise UsageError("`--all-pairs` is for --top-pairs", hint="such as `--top-pairs 20`")
        if view.force and view.save is None and not view.patterns:
            raise UsageError(
                "`--force` is about the size of a file, and none is written",
                hint="add `-o FILE`, or leave it out",
            )
        kept = self.drawn or view.save is not None
        if heads.what == "scores" and not (kept or view.patterns):
            raise UsageError(
                "`--what scores` is about matrices, and none is shown",
                hint="add --layer and --head",
            )
        if view.scale is not None and not (kept or self.map is not None):
            raise UsageError(
                "`--scale` is for matrices and `--map`, and none is shown",
                hint="add --layer and --head, or `--map METRIC`",
            )

    def heads(self, heads: HeadOptions, config: ModelConfig) -> dict[int, tuple[int, ...]]:
        """The heads of every layer that is asked for.

        Raises UsageError for layers and heads that are not there, and for too many to draw.
        """
        chosen = _chosen(heads, config)
        if heads.what == "scores":
            _check_scores(chosen, config)
        if self.drawn and not self.saved:
            _check_drawn(chosen)
        if not any(chosen.values()):
            raise UsageError(
                "none of these layers has such a head", hint="name others with --layer and --head"
            )
        return chosen

    def fitting(self, chosen: Mapping[int, tuple[int, ...]]) -> Asked:
        """The same, with the map instead of more matrices than a screen has room for."""
        return self if _count(chosen) <= MOST_DRAWN else replace(self, drawn=False)


def _chosen(heads: HeadOptions, config: ModelConfig) -> dict[int, tuple[int, ...]]:
    model = graph(config)
    layers = tuple(i for i in range(len(config.layers)) if model.mixing(i) is not None)
    if heads.layer is not None:
        named = parse_numbers(heads.layer, len(config.layers), "--layer", "layers")
        without = [layer for layer in named if layer not in layers]
        if without:
            raise UsageError(
                f"layer {without[0]} has no attention to look at",
                hint=f"layers that have: {spans(layers)}" if layers else "`llmcli info` says what",
            )
        layers = named
    if not layers:
        raise UsageError("no layer of this model has attention to look at")
    counts = {layer: model.sizes(layer)["H"] for layer in layers}
    if heads.head is None:
        return {layer: tuple(range(count)) for layer, count in counts.items()}
    numbers = parse_numbers(heads.head, max(counts.values()), "--head", "heads")
    return {
        layer: tuple(head for head in range(count) if head in numbers)
        for layer, count in counts.items()
    }


def _check_scores(chosen: Mapping[int, tuple[int, ...]], config: ModelConfig) -> None:
    """Raises UsageError where a map is made of no scores."""
    model = graph(config)
    nodes = ((layer, model.mixing(layer)) for layer in range(len(config.layers)))
    scored = [
        layer for layer, node in nodes
        if node is not None and isinstance(node.op, Mix) and model.score(node.op)
    ]  # fmt: skip
    if without := [layer for layer in chosen if layer not in scored]:
        raise UsageError(
            f"layer {without[0]} has no scores: no softmax makes its weights of any",
            hint=f"layers that have: {spans(scored)}; others have `--what pattern`"
            if scored else "use `--what pattern`",
        )


def _check_drawn(chosen: Mapping[int, tuple[int, ...]]) -> None:
    count = _count(chosen)
    if count > MOST_DRAWN:
        raise UsageError(
            f"those are {count} matrices, and at most {MOST_DRAWN} are drawn",
            hint="name fewer with --layer and --head, or see all heads with `--map METRIC`",
        )


def _count(chosen: Mapping[int, tuple[int, ...]]) -> int:
    return sum(map(len, chosen.values()))


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
