"""What else the look at a model gives: matrices, pairs, new tokens; and that it changes nothing."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_models import (
    BASE,
    config_of,
    ids_of,
    metrics_of,
    model_of,
    patterns,
    small,
)
from decoder_parameters import parameters_of
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmcli import devices
from llmcli.commands.attention.command import synthetic
from llmcli.commands.attention.measure import layers
from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.attention.measure.summaries import Pooled
from llmcli.commands.attention.options import AttentionOptions
from llmcli.decoder.decoder import Decoder
from llmcli.errors import OutOfMemory, UsageError
from llmcli.inspect.passes import Passes

ALL = AttentionOptions(layer="0-1")  # their matrices are drawn


def exported(model, ids, heads=None, *, generate=0, **options):
    found = {}

    def keep(layer, matrix):
        assert layer not in found
        found[layer] = matrix.copy()

    report = measure_attention(Passes(model, ids, generate), heads, on_matrix=keep, **options)
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


def all_pairs(model, ids):
    for layer, a in enumerate(patterns(model, ids)):
        for (head, i, j), weight in np.ndenumerate(a):
            yield weight, layer, head, i, j


@pytest.mark.parametrize("rows", [1, 4, None])
@pytest.mark.parametrize("kind", ["gqa", "window"])
@pytest.mark.parametrize(("given", "queries", "keys"), [
    ({"top_pairs": 9}, range(11), range(11)),
    ({"top_pairs": 1000, "query": "5:9", "key": ":7"}, range(5, 9), range(7)),
])  # fmt: skip
def test_the_largest_pairs_of_some_queries_and_keys(rows, kind, given, queries, keys):
    model, ids = small(kind), ids_of(11)
    report = measure_attention(Passes(model, ids), AttentionOptions(**given), block_rows=rows)
    allowed = [
        pair
        for pair in all_pairs(model, ids)
        if pair[0] > 0 and pair[3] in queries and pair[4] in keys and 0 < pair[4] != pair[3]
    ]
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
    report = measure_attention(Passes(model, ids), AttentionOptions(top_pairs=10_000))
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
        return {0: 0, 1: 0}, measure_attention(Passes(model, ids, generate), options)

    found, report = look(ids, 6)
    assert report.ok, report.checks
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


# innocence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("generate", [0, 3])
def test_one_forward_pass_whose_numbers_are_the_usual_ones(monkeypatch, dtype, generate):
    """And none of what was captured is changed."""
    model, ids = small("window", dtype), ids_of(18)
    weights = {name: slot.clone() for name, slot in parameters_of(model.decoder).items()}
    calls, captured, plain = [], [], Decoder.__call__

    def counted(decoder, tokens, state=None, *, tap, **options):
        def both(name, tensor):
            captured.append((name, tensor, tensor.clone()))
            tap(name, tensor)

        begin = 0 if state is None else state.lengths[0]
        out = plain(decoder, tokens, state, tap=both, **options)
        calls.append((begin, tokens, options, out.clone()))
        return out

    monkeypatch.setattr(Decoder, "__call__", counted)
    exported(model, ids, AttentionOptions(layer="1", head="0", top_pairs=3), generate=generate)
    steps = [0, *range(18, 18 + generate)] if generate else []
    assert [begin for begin, *_ in calls] == [*steps, 0]
    state = model.decoder.new_state(1, 30)
    for _, tokens, options, out in calls[:-1]:
        assert torch.equal(plain(model.decoder, tokens, state, **options), out)
    _, tokens, options, out = calls[-1]
    assert torch.equal(plain(model.decoder, tokens, **options), out)
    assert len(captured) > 20
    for name, tensor, before in captured:
        assert torch.equal(tensor, before), name
    for name, slot in parameters_of(model.decoder).items():
        assert torch.equal(slot, weights[name]), name


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
        report = measure_attention(Passes(model, ids_of(count)), AttentionOptions(**given))
    assert report.ok
    assert count * 24 <= seen.most < count**2 / 4


def test_whole_matrices_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: 4 * 30**2 * 4 - 1)
    with pytest.raises(OutOfMemory, match="4 heads and 30 tokens"):
        exported(small(), ids_of(30))


# synthetic prompts


SPECIAL = model_of(dataclasses.replace(config_of(BASE), bos=4, eos=(9,)))


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
