"""What a look at attention gives: metrics against their definitions, matrices, pairs, new tokens.

Of whole models in blocks, of made-up matrices, and of heads whose answers are known.
"""

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch
from attention_models import BASE, MIXERS, ids_of, looked, metrics_of, model_of, patterns, small
from covers import in_turn
from decoder_parameters import parameters_of
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmcli import devices
from llmcli.commands.attention.command import synthetic
from llmcli.commands.attention.measure import layers
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.measure.summaries import Pooled, RowMeans, effective_rank, labels_of
from llmcli.commands.attention.options import AttentionOptions
from llmcli.config.attention import AttentionConfig, ScoreConfig
from llmcli.errors import OutOfMemory, UsageError
from llmcli.inspect.attention import Block, Tokens
from llmcli.inspect.passes import Passes
from llmcli.records.attention import LABELS, USUAL

NEAR = {"float64": 1e-10, "float32": 1e-5}


def naive(a: np.ndarray, ids, seen) -> dict[str, float]:
    """Every metric of one matrix `[T, T]`, cell by cell; `seen[i]` keys are visible to row i.

    Where rows sum to less than 1 a sink takes the rest.
    """
    T, sums = len(ids), [sum(row) for row in a]
    sinks = min(sums) < 1 - 1e-9

    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else math.nan

    def entropy(i):
        return -sum(x * math.log(x) for x in a[i] / sums[i] if x > 0)

    def local(w):
        return mean(sum(a[i, max(0, i - w + 1) : i + 1]) for i in range(T) if seen[i] > w)

    def sees(i, j):
        return i - seen[i] < j <= i

    def matching(i, after):  # keys that equal the query, or that follow one that does
        keys = range(after, i + after)
        return [j for j in keys if ids[j - after] == ids[i] and sees(i, j)]

    def rest(i):
        mass = sum(a[i, 1:])
        return sum(a[i, j] * (i - j) for j in range(1, T)) / mass

    return {
        "entropy": mean(map(entropy, range(T))),
        "normalized_entropy": mean(entropy(i) / math.log(seen[i]) for i in range(T) if seen[i] > 1),
        "effective_keys": mean(math.exp(entropy(i)) for i in range(T)),
        "max_weight": mean(max(a[i]) for i in range(T)),
        "current_token": mean(a[i, i] for i in range(T)),
        "previous_token": mean(a[i, i - 1] for i in range(1, T) if sees(i, i - 1)),
        "sink": mean(a[i, 0] for i in range(1, T) if sees(i, 0)),
        "sink_rate": mean(a[i, 0] for i in range(T) if sees(i, 0)),
        "learned_sink": mean(1 - x for x in sums) if sinks else math.nan,
        "negative": math.nan,
        "induction": mean(a[i, matching(i, 1)].sum() for i in range(T) if matching(i, 1)),
        "duplicate": mean(a[i, matching(i, 0)].sum() for i in range(T) if matching(i, 0)),
        "distance": mean(sum(a[i, j] * (i - j) for j in range(T)) / sums[i] for i in range(T)),
        "distance_without_sink": mean(rest(i) for i in range(1, T) if sum(a[i, 1:]) > 0),
        "locality_8": local(8),
        "locality_64": local(64),
    }


@cache
def by_definition(kind, dtype):
    """A model, and the metrics of each head of each layer for 75 tokens."""
    model, ids = small(kind, dtype), ids_of(75)
    seen = [min(i + 1, model.config.layers[0].attention.scores.window or 75) for i in range(75)]
    return model, [[naive(one, ids, seen) for one in a] for a in patterns(model, ids)]


@pytest.mark.parametrize(("kind", "rows", "dtype"), in_turn(list(MIXERS), [1, 7, 75], list(NEAR)))
def test_in_blocks_as_by_definition(kind, rows, dtype):
    model, expected = by_definition(kind, dtype)
    report = looked(model, ids_of(75), block_rows=rows)
    for layer, heads in enumerate(expected):
        for one, found in zip(heads, metrics_of(report, layer), strict=True):
            assert found == pytest.approx(one, abs=NEAR[dtype], rel=NEAR[dtype], nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "cells"), in_turn(["mha", "gqa", "window", "window-1"], [900, 1, 210])
)
def test_blocks_are_as_large_as_memory_lets_them_be(kind, cells, monkeypatch):
    """Whatever that is: no number depends on it."""
    model, ids = small(kind), ids_of(40)
    expected = looked(model, ids)
    sizes, make = [], Block.__init__
    for module in ("inspect.attention", "commands.attention.measure.summaries"):
        monkeypatch.setattr(f"llmcli.{module}.CELLS", cells)

    def made(self, a, *rest, **more):
        sizes.append(a.numel())
        make(self, a, *rest, **more)

    monkeypatch.setattr(Block, "__init__", made)
    report = looked(model, ids)
    assert max(sizes) <= max(cells, 4 * 42)  # a row of a key/value head's heads at least
    for one, other in zip(report.layers, expected.layers, strict=True):
        for head, same in zip(one.heads, other.heads, strict=True):
            assert head.metrics == pytest.approx(same.metrics, abs=1e-10, nan_ok=True)
    assert report.unlabelled == expected.unlabelled


@cache
def made_up(kind):
    """A matrix that no family of today has, how many keys its rows see, and its metrics."""
    random, count = np.random.default_rng(1), 70
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
    a, seen = e / (e.sum(1, keepdims=True) + extra), (~hidden).sum(1).tolist()
    return a, seen, naive(a, ids_of(count), seen)


@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("kind", ["plain", "capped", "alibi", "padded", "sink", "window"])
def test_made_up_matrices_in_blocks(kind, rows):
    """Under a window blocks begin at a later key: what lies before is masked, the first key too."""
    a, seen, expected = made_up(kind)
    window = 9 if kind == "window" else 70
    means, tokens = RowMeans(2), Tokens(ids_of(70), torch.device("cpu"))
    both = torch.tensor(np.stack((a, a)))
    kept = both.clone()
    for first in range(0, 70, rows):
        low, part = max(0, first - window), slice(first, first + rows)
        cut = both[:, part, low : first + rows]
        taken = 1 - cut.sum(-1) if kind == "sink" else None
        block = Block(cut, first, low, torch.tensor(seen[part]), tokens, taken)
        means.add(block)
    assert torch.equal(both, kept), "what is looked at is not changed"
    for name, one in expected.items():
        assert means.means()[name] == pytest.approx([one] * 2, abs=1e-10, nan_ok=True)


def test_a_row_of_zeros_has_no_shares():
    a = torch.tensor([[[-1.0, 0, 0], [0, 0, 0], [1, -2, 1]]])
    means, tokens = RowMeans(1), Tokens(ids_of(3), torch.device("cpu"))
    means.add(Block(a, 0, 0, torch.arange(1, 4), tokens).shares())
    assert (means.means()["negative"], means.rows()["negative"]) == ([0.75], 2)


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
    model = model_of(mixer, positions=count, width=count, vocab=count)
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
    report = looked(model, ids, AttentionOptions(metrics="all"))
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
    assert labels[:3] == [("previous-token", "local"), ("induction",), ("duplicate",)]
    assert labels[4:] == [("sink",), ("broad",)]
    assert even["normalized_entropy"] == pytest.approx(1, abs=1e-12)


def test_a_uniform_head_has_the_scores_of_theory():
    T = 64
    (even,) = metrics_of(looked(built([None], T), ids_of(T)))
    harmonic = sum(1 / k for k in range(1, T + 1))
    assert even["normalized_entropy"] == pytest.approx(1, abs=1e-12)
    expected = sum(1 / (k + 1) for k in range(1, T)) / (T - 1)
    assert even["previous_token"] == pytest.approx(expected, abs=1e-12)
    assert even["previous_token"] == pytest.approx(0.05943, abs=5e-6)
    assert even["sink_rate"] == pytest.approx(harmonic / T, abs=1e-12)
    assert even["sink_rate"] == pytest.approx(0.07412, abs=5e-6)
    assert even["distance"] == pytest.approx((T - 1) / 4, abs=1e-12)


def test_one_token_has_the_metrics_that_it_can_have():
    report = looked(small(), [3])
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
    report = looked(built(targets, len(ids)), ids)
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
    report = looked(model, ids)
    assert all(not head.labels for layer in report.layers for head in layer.heads)
    (found, *_) = metrics_of(report)
    for name in ("previous_token", "sink", "induction", "duplicate", "locality_8"):
        assert math.isnan(found[name]), name
        assert report.rows[name] == 0
    assert report.unlabelled.keys() == {label.name for label in LABELS}
    model = small("window")  # of 5
    found = metrics_of(looked(model, ids))[0]
    assert math.isnan(found["locality_8"])
    assert math.isnan(found["induction"]), "the earlier tokens are out of sight"
    report = looked(model, [*range(5), 2, 7, 6, 9, 6])
    assert report.rows["duplicate"] == report.rows["induction"] == 2
    assert report.rows["sink"] == 4


def test_the_reason_names_the_kind_of_layer_where_there_are_several():
    full, near = (BASE.changed(window=window) for window in (None, 2))
    report = looked(model_of(full, near), ids_of(30))
    why = report.unlabelled
    assert why["local"] == "window 2: no row qualifies"
    assert report.rows["locality_8"] == 22, "of the layer that has most"
    assert why["previous-token"] == "window 2: equal weights would give 0.50"
    assert "broad" not in why
    second = AttentionOptions(layer="1")
    alone = looked(model_of(full, near), ids_of(30), second)
    assert alone.unlabelled["local"] == "no row qualifies"


def test_a_rank_is_left_out_with_the_reason_where_the_prompt_is_long(monkeypatch):
    monkeypatch.setattr(layers, "MOST_RANKED", 20)
    names = AttentionOptions(metrics="effective_rank")
    model = small()
    within = looked(model, ids_of(20), names)
    a = torch.tensor(patterns(model, ids_of(20))[1])
    ranks = [head["effective_rank"] for head in metrics_of(within, 1)]
    assert ranks == pytest.approx(effective_rank(a), rel=1e-9)
    beyond = looked(model, ids_of(21), names)
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


# matrices, pairs and new tokens

ALL = AttentionOptions(layer="0-1")  # their matrices are drawn


def exported(model, ids, heads=None, *, generate=0, **options):
    found = {}

    def keep(layer, matrix):
        assert layer not in found
        found[layer] = matrix.copy()

    report = looked(model, ids, heads, generate=generate, on_matrix=keep, **options)
    return found, report


@pytest.mark.parametrize("kind", ["mha", "gqa", "window", "window-1"])
def test_whole_matrices_are_handed_on_layer_by_layer(kind):
    model, ids = small(kind), ids_of(33)
    found, report = exported(model, ids, block_rows=7)
    assert list(found) == [0, 1]
    for layer, a in enumerate(patterns(model, ids)):
        assert found[layer].dtype == np.float64  # the model's
        assert np.abs(found[layer] - a).max() < 1e-12
        assert (found[layer][a == 0] == 0).all()
    scores, _ = exported(model, ids, AttentionOptions(what="scores"), block_rows=5)
    for layer, a in enumerate(patterns(model, ids)):
        assert (np.isneginf(scores[layer]) == (a == 0)).all()
        e = np.exp(scores[layer] - scores[layer].max(-1, keepdims=True))
        assert np.abs(e / e.sum(-1, keepdims=True) - a).max() < 1e-5
    assert report.what == "pattern"


def test_only_the_layers_and_heads_that_are_requested():
    model, ids = small("gqa", layers=3), ids_of(20)
    found, report = exported(model, ids, AttentionOptions(layer="2,1", head="3,1"))
    assert [layer.layer for layer in report.layers] == [1, 2]
    assert [(head.head, head.kv_head) for head in report.layers[0].heads] == [(1, 0), (3, 1)]
    whole, everything = exported(model, ids)
    assert np.allclose(found[2], whole[2][[1, 3]], atol=1e-6)
    for one, other in zip(metrics_of(report, 0), (1, 3), strict=True):
        assert one == pytest.approx(metrics_of(everything, 1)[other], nan_ok=True)
    shown = [(m.layer, m.head, m.kv_head) for m in report.matrices]
    assert shown == [(1, 1, 0), (1, 3, 1), (2, 1, 0), (2, 3, 1)]
    part = AttentionOptions(layer="2,1", head="3,1", query="10:20", key="4:20")
    for one in exported(model, ids, part)[1].matrices:
        a = whole[one.layer][one.head, 10:20, 4:20]
        assert (one.queries, one.keys, one.pool) == ((10, 20), (4, 20), 1)
        assert (np.isnan(one.values) == (a == 0)).all(), "NaN where masked"
        assert np.nanmax(np.abs(one.values - a)) < 1e-6


spans = st.tuples(st.integers(0, 39), st.integers(1, 40)).map(
    lambda ends: (min(ends[0], ends[1] - 1), ends[1])
)


@given(st.integers(1, 45), spans, spans, st.integers(1, 11), st.integers(1, 41))
def test_pooled_cells_are_the_largest_of_their_squares(most, q, k, rows, window):
    a = np.random.default_rng(0).normal(size=(2, 40, 40))
    i, j = np.arange(40)[:, None], np.arange(40)
    a[:, (j > i) | (i - j >= window)] = -np.inf
    pooled = Pooled((q, k), most, 2, 40)
    assert (pooled.queries, pooled.keys) == (q, k)
    for first in range(0, 40, rows):
        low = max(0, first - window)
        cut = torch.tensor(a[:, first : first + rows, low : first + rows])
        pooled.add(cut, slice(0, 2), first, low)
    for head in range(2):
        values = pooled.cells(head)
        assert max(values.shape) <= most
        for (row, column), value in np.ndenumerate(values):
            top, left = q[0] + row * pooled.pool, k[0] + column * pooled.pool
            bottom, right = min(top + pooled.pool, q[1]), min(left + pooled.pool, k[1])
            largest = np.float32(a[head, top:bottom, left:right].max())
            assert (math.isnan(value) and np.isneginf(largest)) or value == largest


@pytest.mark.parametrize("rows", [1, 4, None])
@pytest.mark.parametrize("kind", ["gqa", "window"])
@pytest.mark.parametrize(("given", "queries", "keys"), [
    ({"top_pairs": 9}, range(11), range(11)),
    ({"top_pairs": 1000, "query": "5:9", "key": ":7"}, range(5, 9), range(7)),
])  # fmt: skip
def test_the_largest_pairs_of_some_queries_and_keys(rows, kind, given, queries, keys):
    model, ids = small(kind), ids_of(11)
    report = looked(model, ids, AttentionOptions(**given), block_rows=rows)
    allowed = [
        (weight, layer, head, i, j) for layer, a in enumerate(patterns(model, ids))
        for (head, i, j), weight in np.ndenumerate(a)
        if weight > 0 and i in queries and j in keys and 0 < j != i
    ]  # fmt: skip
    expected = sorted(allowed, reverse=True)[: given["top_pairs"]]
    assert [pair.weight for pair in report.pairs] == pytest.approx([pair[0] for pair in expected])
    places = [(pair.layer, pair.head, pair.query, pair.key) for pair in report.pairs]
    assert places == [pair[1:] for pair in expected]
    group = model.config.layers[0].attention.heads // model.config.layers[0].attention.kv_heads
    for pair in report.pairs:
        assert (pair.rank_value, pair.kv_head) == (pair.weight, pair.head // group)


def test_bos_is_no_key_wherever_it_stands():
    model, ids = small(), ids_of(25)
    model.config = dataclasses.replace(model.config, bos=ids[3])
    report = looked(model, ids, AttentionOptions(top_pairs=10_000))
    assert ids.count(ids[3]) > 1
    assert all(ids[pair.key] != ids[3] and pair.key > 0 for pair in report.pairs)


# new tokens


@pytest.mark.parametrize("kind", ["gqa", "window", "no-rotation"])
@pytest.mark.parametrize("whole", [False, True])
def test_new_tokens_are_rows_like_the_others(kind, whole, monkeypatch):
    """As if the whole text had been the prompt: the cache's offset changes no number."""
    monkeypatch.setattr(layers, "MOST_CELLS", 10)
    model, ids, options = small(kind), ids_of(21), ALL if whole else AttentionOptions(top_pairs=5)

    def look(ids, generate=0):
        if whole:
            return exported(model, ids, options, generate=generate)
        return {0: 0, 1: 0}, looked(model, ids, options, generate=generate)

    found, report = look(ids, 6)
    every = [one.id for one in report.tokens]
    assert (report.prompt_tokens, len(every), every[:21]) == (21, 27, ids)
    usual, again = look(every)
    for layer in (0, 1):
        assert np.abs(found[layer] - usual[layer]).max() < 1e-6
        for one, other in zip(metrics_of(report, layer), metrics_of(again, layer), strict=True):
            assert one == pytest.approx(other, abs=1e-10, nan_ok=True)
    for one, other in zip(report.matrices, again.matrices, strict=True):
        assert (one.queries, one.pool) == (other.queries, other.pool) == ((0, 27), 3)
        assert np.allclose(one.values, other.values, atol=1e-6, equal_nan=True)
    assert [(p.query, p.key) for p in report.pairs] == [(p.query, p.key) for p in again.pairs]
    assert report.rows == again.rows


@pytest.mark.parametrize("generate", [0, 3])
def test_progress_ends_with_all_rows_of_all_heads(generate):
    told = []
    passes = Passes(small("window"), ids_of(15), generate, lambda *said: told.append(said))
    measure_attention(passes, AttentionOptions(head="0,2,3"), block_rows=4)
    looked = [said[1:] for said in told if said[0] == "looking at the heads"]
    total = (15 + generate) * 2 * 3
    assert looked == sorted(looked)
    assert looked[-1] == (total, total)
    assert len(looked) > 8


# memory


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return out


@pytest.mark.parametrize("given", [{"layer": "0"}, {"top_pairs": 5}])
def test_nothing_square_is_kept_for_metrics(monkeypatch, given):
    """Blocks bound the memory: no tensor is larger than a block's cells or a layer's rows."""
    monkeypatch.setattr("llmcli.inspect.formulas.CHEAP", 1)
    monkeypatch.setattr(layers, "MOST_CELLS", 20)
    for module in ("inspect.attention", "commands.attention.measure.summaries"):
        monkeypatch.setattr(f"llmcli.{module}.CELLS", 8192)
    model, count = small("gqa", "float32", layers=1), 240
    with Largest() as seen:
        looked(model, ids_of(count), AttentionOptions(**given))
    assert count * 24 <= seen.most < count**2 / 4


def test_whole_matrices_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: 4 * 30**2 * 4 - 1)
    with pytest.raises(OutOfMemory, match="4 heads and 30 tokens"):
        exported(small(), ids_of(30))


# synthetic prompts


SPECIAL = model_of(BASE, bos=4, eos=(9,))


@given(st.integers(1, 21), st.integers(0, 50))
def test_synthetic_prompts_repeat_different_tokens(count, seed):
    ids = synthetic(SPECIAL, count, seed)
    assert ids[0] == 4
    assert ids[1 : count + 1] == ids[count + 1 :]
    assert len(set(ids)) == count + 1
    assert not {4, 9} & set(ids[1:])
    assert synthetic(SPECIAL, count, seed) == ids


def test_more_different_tokens_than_there_are():
    for count in (0, 22):
        with pytest.raises(UsageError, match=f"`--synthetic {count}`"):
            synthetic(SPECIAL, count, 0)
    assert len(synthetic(small(), 23, 0)) == 46, "without BOS, and every token may be drawn"
    drawn = {tuple(synthetic(SPECIAL, 9, seed)) for seed in range(20)}
    assert len(drawn) == 20
