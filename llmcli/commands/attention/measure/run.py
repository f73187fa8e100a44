"""One forward pass, and every layer's attention looked at while it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.anatomy.graph import graph
from llmcli.commands.attention.measure.look import Look
from llmcli.commands.attention.measure.wanted import Drawn, OnMatrix, Wanted, Within
from llmcli.commands.attention.report.heads import AttentionReport, PairsBy
from llmcli.commands.attention.report.metrics import (
    LEARNED_SINK,
    LINEAR,
    METRICS,
    MOST_RANKED,
    OVERWRITTEN,
    RANK,
    USUAL,
)
from llmcli.config import ModelConfig
from llmcli.graph.recurrence import LinearMap, Recurrence
from llmcli.model import Model
from llmcli.reports.matrix import What
from llmcli.reports.progress import Progress


def measure_attention(
    model: Model,
    ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    what: What = "pattern",
    metrics: Sequence[str] = USUAL,
    matrices: Drawn | None = None,
    pairs: int = 0,
    pairs_by: PairsBy = "weight",
    pairs_within: Within | None = None,
    everything: bool = False,
    weighted: bool = False,
    generate: int = 0,
    on_matrix: OnMatrix | None = None,
    block_rows: int | None = None,
    progress: Progress | None = None,
) -> AttentionReport:
    """What the heads of `ids`, and of up to `generate` likeliest tokens after them, attend to.

    `layers` and `heads`: which of them (None: all; a head that a layer has not got is passed
    over). `metrics` of `METRICS`, always of the pattern, `learned_sink` where heads have one,
    those of `LINEAR` where they have a state;
    `weighted`: of A[i,j] ‖v_j W_O‖ / Σ_j.
    `what` the `matrices` and `on_matrix` hold: weights, or scores (-∞ where masked).
    `on_matrix(layer, [H, T, S])`: float32 (float64 where the model is) of the heads asked for,
    layer by layer in order.
    `pairs`: so many at most, without the first key, BOS and the token itself unless `everything`;
    `pairs_within`: only of these queries and keys.
    `block_rows`: so many rows at a time (default: by memory); numbers depend on it by rounding.

    The forward pass runs once and is the usual one; nothing `[T, T]` is kept but for `on_matrix`,
    one layer at a time, and `effective_rank`. Raises OutOfMemory, and NotFinite for NaN.
    """
    metrics = [name for name in metrics if name not in unknown_metrics(model.config)]
    names, skipped = _possible(metrics, len(ids) + generate)
    wanted = Wanted(
        heads=None if heads is None else tuple(heads),
        what=what,
        metrics=names,
        matrices=matrices,
        pairs=pairs,
        pairs_by=pairs_by,
        pairs_within=pairs_within,
        everything=everything,
        weighted=weighted,
        on_matrix=on_matrix,
        block_rows=block_rows,
    )
    chosen = sorted(set(layers)) if layers is not None else [
        layer for layer in range(len(model.config.layers))
        if graph(model.config).mixing(layer) is not None
    ]  # fmt: skip
    look = Look(model, ids, chosen, wanted, generate=generate, progress=progress)
    return look.report(skipped)


def has_sinks(config: ModelConfig) -> bool:
    """Whether there are heads with learned sinks."""
    mixers = (layer.attention for layer in config.layers)
    return any(mixer is not None and mixer.sinks for mixer in mixers)


def unknown_metrics(config: ModelConfig) -> dict[str, str]:
    """The metrics that no head of the model has, and why."""
    found = {}
    if not has_sinks(config):
        found[LEARNED_SINK] = "no head of this model has a learned sink"
    mixed = of_recurrences(config)
    if not mixed:
        found |= dict.fromkeys(LINEAR, "no head of this model has a state in place of a softmax")
    elif all(recurrence.plain for recurrence in mixed.values()):
        found[OVERWRITTEN] = "no head of this model takes anything off its state"
    return found


def of_recurrences(config: ModelConfig) -> dict[int, Recurrence]:
    """The layers whose map is that of a recurrence."""
    found, model = {}, graph(config)
    for layer in range(len(config.layers)):
        node = model.mixing(layer)
        above = None if node is None else model[node.op.inputs[0]].op
        if isinstance(above, LinearMap):
            found[layer] = above.of
    return found


def part_name(config: ModelConfig, layer: int) -> str:
    """What the names of the activations of a layer's map begin with: `blocks.3.attn`."""
    node = graph(config).mixing(layer)
    assert node is not None
    return node.name.rpartition(".")[0]


def _possible(
    metrics: Sequence[str], tokens: int
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Those of `metrics` that are computed, in their own order, and the others with the reason."""
    asked = tuple(metric.name for metric in METRICS if metric.name in metrics)
    if RANK not in asked or tokens <= MOST_RANKED:
        return asked, ()
    reason = f"it needs whole matrices: up to {MOST_RANKED} tokens, and there are {tokens}"
    return tuple(name for name in asked if name != RANK), ((RANK, reason),)
