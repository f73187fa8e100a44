"""What is requested of the heads: one object, which measuring, files and views all read.

Letters: H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llmcli.anatomy.graph import graph
from llmcli.config import ModelConfig
from llmcli.graph.recurrence import LinearMap, Recurrence
from llmcli.records.head_metrics import (
    COLOURED_BY,
    LEARNED_SINK,
    LINEAR,
    METRICS,
    OVERWRITTEN,
    USUAL,
    Metric,
)
from llmcli.records.matrix import What

Span = tuple[int, int]  # positions `first` … `last`-1
MOST_CELLS = 480  # of a side of a matrix that is drawn: more than any terminal is wide


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """Which heads, what of them, and how it is shown.

    `heads[layer]`: the numbers of its heads, None for all of all layers. `what` matrices hold.
    `map`: the metric that a map of all heads shows, `table`: those of a table; `metrics` are
    computed whether they are shown or not, always of the weights.
    `drawn`: the report has matrices, of these `queries` and `keys` (None: all); cells are put
    together, each the largest of a square, until no side is longer than `most_cells`.
    `pairs`: so many at most, the largest first, of these queries and keys; without the first key,
    BOS and the token itself. `generate`: likeliest tokens after the prompt.
    `scale`: how numbers become colours, None for the usual way.
    """

    heads: Mapping[int, tuple[int, ...]] | None = None
    what: What = "pattern"
    metrics: tuple[str, ...] = USUAL
    map: Metric | None = None
    table: tuple[Metric, ...] = ()
    drawn: bool = False
    queries: Span | None = None
    keys: Span | None = None
    most_cells: int = MOST_CELLS
    pairs: int = 0
    generate: int = 0
    scale: Literal["linear", "sqrt", "log"] | None = None

    def chosen(self, config: ModelConfig) -> dict[int, tuple[int, ...]]:
        """The heads of every layer in order, those that the layer does not have left out."""
        found = {}
        for layer, count in head_counts(config).items():
            if self.heads is None or layer in self.heads:
                numbers = range(count) if self.heads is None else sorted(set(self.heads[layer]))
                found[layer] = tuple(head for head in numbers if head < count)
        return found

    @property
    def zoomed(self) -> bool:
        """Whether only some queries or keys are requested."""
        return self.queries is not None or self.keys is not None

    @property
    def coloured_by(self) -> str:
        """The metric of the map of all heads."""
        return COLOURED_BY if self.map is None else self.map.name

    @property
    def matrix_scale(self) -> Literal["linear", "sqrt", "log"]:
        """How the numbers of matrices become colours."""
        return self.scale or ("sqrt" if self.what == "pattern" else "linear")


def head_counts(config: ModelConfig) -> dict[int, int]:
    """How many heads each layer has that mixes tokens."""
    model = graph(config)
    return {layer: model.sizes(layer)["H"] for layer in model.mixers}


def computed(named: set[str]) -> tuple[str, ...]:
    """The metrics that one pass gives, and those that are `named` besides."""
    return tuple(metric.name for metric in METRICS if metric.name in {*USUAL, *named})


def unknown_metrics(config: ModelConfig) -> dict[str, str]:
    """The metrics that no head of the model has, and why."""
    found = {}
    mixers = (layer.attention for layer in config.layers)
    if not any(mixer is not None and mixer.sinks for mixer in mixers):
        found[LEARNED_SINK] = "no head of this model has a learned sink"
    mixed = recurrent_layers(config)
    if not mixed:
        found |= dict.fromkeys(LINEAR, "no head of this model has a state in place of a softmax")
    elif all(recurrence.plain for recurrence in mixed.values()):
        found[OVERWRITTEN] = "no head of this model takes anything off its state"
    return found


def recurrent_layers(config: ModelConfig) -> dict[int, Recurrence]:
    """The layers whose map is that of a recurrence: its weights have signs."""
    found, model = {}, graph(config)
    for layer, node in model.mixers.items():
        above = model[node.op.inputs[0]].op
        if isinstance(above, LinearMap):
            found[layer] = above.of
    return found
