"""Metrics against their definitions: whole models in blocks, made-up matrices, known answers."""

import math

import numpy as np
import pytest
import torch
from attention_models import (
    BASE,
    MIXERS,
    config_of,
    ids_of,
    metrics_of,
    model_of,
    naive,
    patterns,
    seen_keys,
    small,
)
from covers import in_turn
from decoder_parameters import parameters_of

from llmcli.commands.attention.measure import layers
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.measure.summaries import RowMeans, effective_rank, labels_of
from llmcli.commands.attention.options import AttentionOptions
from llmcli.config.attention import AttentionConfig, ScoreConfig
from llmcli.inspect.attention import Block, Tokens
from llmcli.inspect.passes import Passes
from llmcli.records.attention import LABELS, USUAL

NEAR = {"float64": 1e-10, "float32": 1e-5}


@pytest.mark.parametrize(
    ("kind", "rows", "dtype"), in_turn(list(MIXERS), [1, 7, 75], list(NEAR))
)
def test_in_blocks_as_by_definition(kind, rows, dtype):
    model, ids = small(kind, dtype), ids_of(75)
    report = measure_attention(Passes(model, ids), block_rows=rows)
    assert report.ok, report.checks
    window = model.config.layers[0].attention.scores.window
    for layer, a in enumerate(patterns(model, ids)):
        for head, found in enumerate(metrics_of(report, layer)):
            expected = naive(a[head], ids, seen_keys(75, window))
            assert found == pytest.approx(expected, abs=NEAR[dtype], rel=NEAR[dtype], nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "cells"), in_turn(["mha", "gqa", "window", "window-1"], [3000, 1, 120, 700])
)
def test_blocks_are_as_large_as_memory_lets_them_be(kind, cells, monkeypatch):
    """Whatever that is: no number depends on it."""
    model, ids = small(kind), ids_of(75)
    expected = measure_attention(Passes(model, ids))
    sizes, make = [], Block.__init__
    for module in ("inspect.attention", "commands.attention.measure.summaries"):
        monkeypatch.setattr(f"llmcli.{module}.CELLS", cells)
    monkeypatch.setattr(
        Block, "__init__", lambda self, a, *rest: (sizes.append(a.numel()), make(self, a, *rest))[1]
    )
    report = measure_attention(Passes(model, ids))
    assert report.ok, report.checks
    assert max(sizes) <= max(cells, 4 * 77)  # a row of a key/value head's heads at least
    for one, other in zip(report.layers, expected.layers, strict=True):
        for head, same in zip(one.heads, other.heads, strict=True):
            assert head.metrics == pytest.approx(same.metrics, abs=1e-10, nan_ok=True)
    assert report.unlabelled == expected.unlabelled


def made_up(kind: str, count: int) -> tuple[np.ndarray, list[int]]:
    """A matrix that no family of today has, and how many keys its rows see."""
    random = np.random.default_rng(1)
    s = random.normal(size=(count, count)) * 3
    distance = np.arange(count)[:, None] - np.arange(count)
    hidden, extra = distance < 0, np.zeros((count, 1))
    if kind == "capped":
        s = 2 * np.tanh(s / 2)
    if kind == "alibi":
        s = s - 0.3 * distance
    if kind == "padded":  # the first five tokens are padding: those rows see themselves
        hidden = hidden | ((np.arange(count) < 5) & (distance != 0))
    if kind == "window":
        hidden = hidden | (distance >= 9)
    e = np.where(hidden, 0, np.exp(s))
    if kind == "sink":  # a learned share that goes to no key
        extra = np.exp(random.normal(size=(count, 1)) + 1)
    return e / (e.sum(1, keepdims=True) + extra), (~hidden).sum(1).tolist()


@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("kind", ["plain", "capped", "alibi", "padded", "sink", "window"])
def test_made_up_matrices_in_blocks(kind, rows):
    """Under a window blocks begin at a later key: what lies before is masked, the first key too."""
    a, seen = made_up(kind, 70)
    ids, window = ids_of(70), 9 if kind == "window" else 70
    means = RowMeans(2)
    tokens = Tokens(ids, torch.device("cpu"))
    both = torch.tensor(np.stack((a, a)))
    kept = both.clone()
    for first in range(0, 70, rows):
        low, part = max(0, first - window), slice(first, first + rows)
        cut = both[:, part, low : first + rows]
        taken = 1 - cut.sum(-1) if kind == "sink" else None
        block = Block(cut, first, low, torch.tensor(seen[part]), tokens, taken)
        means.add(block, slice(0, 2))
    assert torch.equal(both, kept), "what is looked at is not changed"
    for name, expected in naive(a, ids, seen).items():
        assert means.means()[name] == pytest.approx([expected] * 2, abs=1e-10, nan_ok=True)


# hand-built heads


def built(targets: list[list[int] | None], count: int):
    """A model whose head h sends row i to key `targets[h][i]` alone, or evenly to all (None).

    The residual stream is the position as a one-hot vector; queries are the one-hot vector of the
    target, so large that every other weight is 0 in floating point; keys are what they are.
    """
    heads = len(targets)
    mixer = AttentionConfig(
        heads=heads, kv_heads=heads, head_dim=count, value_dim=count, rope=None,
        scores=ScoreConfig(scale=1.0),
    )  # fmt: skip
    model = model_of(config_of(mixer, positions=count, width=count, vocab=count))
    slots = parameters_of(model.decoder)
    slots["embed.W"].zero_()
    slots["pos_embed.W"].copy_(torch.eye(count))
    slots["blocks.0.ln1.w"].fill_(1.0)
    slots["blocks.0.attn.W_k"].copy_(torch.eye(count).repeat(heads, 1))
    w_q = slots["blocks.0.attn.W_q"].zero_().view(heads, count, count)
    for head, target in enumerate(targets):
        for i, key in enumerate(target or ()):
            w_q[head, key, i] = 1e4
    return model


def test_perfect_heads_get_exactly_their_scores():
    n = 31
    ids = [0, *range(1, n + 1), *range(1, n + 1)]
    count = len(ids)
    previous = [max(0, i - 1) for i in range(count)]
    itself = list(range(count))
    induction = [i if i <= n else i - n + 1 for i in range(count)]
    duplicate = [i if i <= n else i - n for i in range(count)]
    first = [0] * count
    model = built([previous, induction, duplicate, itself, first, None], count)
    report = measure_attention(Passes(model, ids), AttentionOptions(metrics="all"))
    assert report.ok, report.checks
    prev, ind, dup, own, sink, even = metrics_of(report)
    assert prev["previous_token"] == 1
    assert ind["induction"] == 1, "eligible rows only: not 0.492 of all, nor 0.970 of a diagonal"
    assert report.rows["induction"] == n
    assert dup["duplicate"] == 1
    assert (own["current_token"], own["entropy"], own["distance"]) == (1, 0, 0)
    assert own["effective_rank"] == pytest.approx(count, rel=1e-12)
    assert own["effective_keys"] == own["max_weight"] == 1
    assert sink["sink"] == sink["sink_rate"] == 1
    assert math.isnan(sink["distance_without_sink"])
    assert sink["effective_rank"] == pytest.approx(1)
    labels = [head.labels for head in report.layers[0].heads]
    assert labels[0] == ("previous-token", "local")
    assert labels[1] == ("induction",)
    assert labels[2] == ("duplicate",)
    assert labels[4] == ("sink",)
    assert labels[5] == ("broad",)
    assert even["normalized_entropy"] == pytest.approx(1, abs=1e-12)


def test_a_uniform_head_has_the_scores_of_theory():
    T = 64
    report = measure_attention(Passes(built([None], T), ids_of(T)))
    (even,) = metrics_of(report)
    harmonic = sum(1 / k for k in range(1, T + 1))
    assert even["normalized_entropy"] == pytest.approx(1, abs=1e-12)
    expected = sum(1 / (k + 1) for k in range(1, T)) / (T - 1)
    assert even["previous_token"] == pytest.approx(expected, abs=1e-12)
    assert even["previous_token"] == pytest.approx(0.05943, abs=5e-6)
    assert even["sink_rate"] == pytest.approx(harmonic / T, abs=1e-12)
    assert even["sink_rate"] == pytest.approx(0.07412, abs=5e-6)
    assert even["distance"] == pytest.approx((T - 1) / 4, abs=1e-12)


def test_one_token_has_the_metrics_that_it_can_have():
    report = measure_attention(Passes(small(), [3]))
    assert report.ok
    found = report.layers[0].heads[0].metrics
    assert found["current_token"] == found["sink_rate"] == found["max_weight"] == 1
    assert found["entropy"] == found["distance"] == 0
    absent = {name for name, value in found.items() if math.isnan(value)}
    assert absent == {
        "normalized_entropy", "previous_token", "sink", "induction", "duplicate",
        "distance_without_sink", "locality_8", "locality_64",
    }  # fmt: skip
    assert all(report.rows[name] == 0 for name in absent)
    assert report.layers[0].heads[0].labels == ()
    assert set(report.unlabelled) == {label.name for label in LABELS}


def labelled(targets, ids):
    report = measure_attention(Passes(built(targets, len(ids)), ids))
    assert report.ok, report.checks
    return [head.labels for head in report.layers[0].heads], report.unlabelled


def test_a_short_prompt_tells_no_kind_that_equal_weights_have_too():
    first = [0] * 40
    for count in range(1, 20):
        labels, untold = labelled([first[:count], None], list(range(count)))
        at_first = sum(1 / k for k in range(2, count + 1)) / max(count - 1, 1)
        told = count > 5
        assert told == (count - 1 >= 4 and at_first < 0.3)
        assert ("sink" in labels[0]) == told == ("sink" not in untold)
        assert "sink" not in labels[1]
        assert ("broad" in labels[1]) == (count >= 5), "even is what it means"
        if count <= 2:
            assert labels == [(), ()]
            assert set(untold) == {label.name for label in LABELS}
    assert labelled([first[:5]], list(range(5)))[1]["sink"] == "equal weights would give 0.32"


def test_kinds_that_too_few_rows_could_tell_or_all_heads_would_be():
    ids = [*range(1, 10), 1, 2, 3]
    induction = [i if i < 9 else i - 8 for i in range(12)]
    labels, untold = labelled([induction], ids)
    assert "induction" not in labels[0]
    assert untold["induction"] == untold["duplicate"] == "only 3 rows qualify"
    labels, untold = labelled([[*induction, 4]], [*ids, 4])
    assert "induction" not in untold
    labels, untold = labelled([None], [1] * 20)
    assert untold["duplicate"].startswith("equal weights would give 0.8")
    assert labels == [("broad",)]


def test_a_window_is_no_kind_of_head():
    """What its mask leaves is not what the head chooses; and what it hides is not 0 but nothing."""
    model, ids = small("window-1"), [*range(20), *range(20)]
    report = measure_attention(Passes(model, ids))
    assert all(not head.labels for layer in report.layers for head in layer.heads)
    (found, *_) = metrics_of(report)
    for name in ("previous_token", "sink", "induction", "duplicate", "locality_8"):
        assert math.isnan(found[name]), name
        assert report.rows[name] == 0
    assert report.unlabelled.keys() == {label.name for label in LABELS}
    model = small("window")  # of 5
    found = metrics_of(measure_attention(Passes(model, ids)))[0]
    assert math.isnan(found["locality_8"])
    assert math.isnan(found["induction"]), "the earlier tokens are out of sight"
    report = measure_attention(Passes(model, [*range(5), 2, 7, 6, 9, 6]))
    assert report.rows["duplicate"] == report.rows["induction"] == 2
    assert report.rows["sink"] == 4


def test_the_reason_names_the_kind_of_layer_where_there_are_several():
    full, near = (BASE.changed(window=window) for window in (None, 2))
    report = measure_attention(Passes(model_of(config_of(full, near)), ids_of(30)))
    why = report.unlabelled
    assert why["local"] == "window 2: no row qualifies"
    assert report.rows["locality_8"] == 22, "of the layer that has most"
    assert why["previous-token"] == "window 2: equal weights would give 0.50"
    assert "broad" not in why
    second = AttentionOptions(layer="1")
    alone = measure_attention(Passes(model_of(config_of(full, near)), ids_of(30)), second)
    assert alone.unlabelled["local"] == "no row qualifies"


def test_a_rank_is_left_out_with_the_reason_where_the_prompt_is_long(monkeypatch):
    monkeypatch.setattr(layers, "MOST_RANKED", 20)
    names = AttentionOptions(metrics="effective_rank")
    model = small()
    within = measure_attention(Passes(model, ids_of(20)), names)
    a = torch.tensor(patterns(model, ids_of(20))[1])
    ranks = [head["effective_rank"] for head in metrics_of(within, 1)]
    assert ranks == pytest.approx(effective_rank(a), rel=1e-9)
    beyond = measure_attention(Passes(model, ids_of(21)), names)
    assert "effective_rank" not in beyond.layers[0].heads[0].metrics
    assert list(beyond.skipped) == ["effective_rank"]
    assert "21" in beyond.skipped["effective_rank"]


def test_labels_begin_at_their_thresholds():
    low = {label.metric: label.threshold - 1e-9 for label in LABELS}
    assert labels_of(low) == ()
    for label in LABELS:
        assert labels_of(low | {label.metric: label.threshold}) == (label.name,)
        assert labels_of(low | {label.metric: math.nan}) == ()
        assert label.source
        assert labels_of(low | {label.metric: label.threshold}, {label.name}) == ()
    assert len({label.letter for label in LABELS}) == len(LABELS)
    assert {label.metric for label in LABELS} <= set(USUAL)
