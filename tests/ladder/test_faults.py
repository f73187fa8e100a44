"""Faults planted in the walk, in every rung and in the decoder: the ladder must see each of them.

A fault in rung k shows between k - 1 and k (of rung 1 between 1 and 2), one in what rungs 1 to 7
share, or in the decoder, between 7 and 8.
"""

import math
from dataclasses import replace

import decoder_faults
import pytest
import torch
from ladder_models import DENSE
from small_models import ids, weights

from llmcli.commands.ladder.measure import walk
from llmcli.commands.ladder.measure.elementwise import FLOATS, TENSORS, activate, add
from llmcli.commands.ladder.measure.rungs import loops, matrices, rows
from llmcli.commands.ladder.measure.rungs.batch import Batch
from llmcli.commands.ladder.measure.rungs.cache import Cache, KeyValueCache
from llmcli.commands.ladder.measure.rungs.combined import CombinedQKV
from llmcli.commands.ladder.measure.rungs.heads import HeadsAsDimension
from llmcli.commands.ladder.measure.rungs.loops import Loops
from llmcli.commands.ladder.measure.rungs.matrices import Matrices
from llmcli.commands.ladder.measure.rungs.rows import VectorRows
from llmcli.commands.ladder.measure.runner import run_ladder
from llmcli.commands.ladder.measure.walk import Walk
from llmcli.commands.ladder.measure.workload import Workload
from llmcli.nn import step

SHARED = "shared"


def differences(of, *numbers):
    """What the ladder reports for the rungs `numbers`, after the first of them."""
    tokens = ids(3, 9)
    workload = Workload(prompts=tokens[:, :6], more=tokens[0, 6:], rounds=0)
    return run_ladder(of, workload, numbers=numbers)[1:]


# What plants a fault: called with the monkeypatch and the weights.


def put(owner, name, value):
    """Plants a value, or another function, of that name."""
    return lambda monkeypatch, of: monkeypatch.setattr(owner, name, value)


def wrap(owner, name, change):
    """Plants `change(it, *its arguments)` instead of a function."""

    def plant(monkeypatch, of):
        kept = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: change(kept, *a, **k))

    return plant


def all_of(*plants):
    """Several at once."""

    def plant(monkeypatch, of):
        for one in plants:
            one(monkeypatch, of)

    return plant


def changed(owner, name, place, **values):
    """Plants a function whose argument number `place`, a dataclass, has other values."""
    return wrap(owner, name, lambda f, *args: f(
        *args[:place], replace(args[place], **values), *args[place + 1 :]
    ))  # fmt: skip


def of_model(make):
    """Plants what `make(weights)` is."""
    return lambda monkeypatch, of: make(of)(monkeypatch, of)


def configured(change):
    """The walk has the configuration `change(config)`, the decoder its own."""
    return lambda monkeypatch, of: object.__setattr__(of, "config", change(of.config))


def by_the_largest(softmax, *args):
    found = softmax(*args)
    return [weight / max(found) for weight in found]


def with_one_less(normalized, y, x, row, *rest):
    return [a * ((len(row) - 1) / len(row)) ** 0.5 for a in normalized(y, x, row, *rest)]


def values_without_bias(product, self, name, of, X, W, *rest, **more):
    W = replace(W, b=None) if name == "V" else W
    return product(self, name, of, X, W, *rest, **more)


def without_the_mean(normalized, y, x, X, norm, *rest):
    norm = replace(norm, config=replace(norm.config, kind="rms"))
    return normalized(y, x, X, norm, *rest)


def down_the_columns(scores, sink=None):
    """The right shape, and the wrong sum is 1."""
    powers = (scores - scores.max(-2, keepdim=True).values).exp()
    return powers / powers.sum(-2, keepdim=True)


def mean_of_biases(product, self, name, of, X, W, *rest, **more):
    if W.b is not None:
        W = replace(W, b=W.b.mean().expand_as(W.b))
    return product(self, name, of, X, W, *rest, **more)


def heads_in_reverse(made, self, layer):
    q, k, v = made(self, layer)
    W = torch.cat(q.W.chunk(layer.config.heads, 1)[::-1], 1)
    return [replace(q, W=W), k, v]


def over_the_heads(softmax, scores, sink=None):
    return softmax(scores, sink) if scores.ndim < 3 else scores.softmax(0).nan_to_num(0)


def rotated_by_the_heads_number(placed, self, letter, X, mixer, axes="d/h"):
    if letter == "K":
        return placed(self, letter, X, mixer, axes)
    return torch.stack([
        placed(self, letter, x.roll(h, 0), mixer, axes).roll(-h, 0) for h, x in enumerate(X)
    ])  # fmt: skip


def values_normalized(of):
    norm_of_keys = next(of.blocks[0].parts).k_norm

    def split(split, self, name, X, heads, h, norm, *rest):
        return split(self, name, X, heads, h, norm_of_keys if name == "V" else norm, *rest)

    return wrap(HeadsAsDimension, "_split_normed", split)


def combined(change):
    """Replaces W_qkv by `change(W, b, layer)`, the matrix and the bias."""

    def made(own, self, layer):
        (one,) = own(self, layer)
        W, b = change(one.W, one.b, layer)
        return [replace(one, W=W, b=b)]

    return wrap(CombinedQKV, "own_matrices", made)


def q_v_k(parts, axis):
    q, k, v = parts.chunk(3, axis)
    return torch.cat((q, v, k), axis)


def head_by_head(W, b, layer):
    """q k v of head 1, then of head 2: a layout that other models have."""
    heads = layer.config.heads
    parts = [part.chunk(heads, 1) for part in W.chunk(3, 1)]
    return torch.cat([part[h] for h in range(heads) for part in parts], 1), b


def keys_twice(made, self, *args):
    Q, K, _ = made(self, *args)
    return [Q, K, K]


def queries_scaled(W, b, layer):
    """The scale folded into W_q, and applied once more."""
    W = W.clone()
    W[:, : layer.q.W.shape[1]] *= layer.config.scale
    return W, b


def last_column_dropped(W, b, layer):
    W = W.clone()
    W[:, -1] = 0
    return W, b


def windowed(window):
    """A new token sees a window of `window(config)` keys."""

    def read_kept(read, self, layer):
        config = layer.config
        if self.row:
            layer = replace(layer, config=replace(config, window=window(config)))
        return read(self, layer)

    return wrap(KeyValueCache, "read_kept", read_kept)


def emptied(self, K, V, start):
    """New slots are allocated for every token, and the old rows are not copied."""
    stop = start + K.shape[-2]
    self.keys = K.new_zeros(*K.shape[:-2], stop, K.shape[-1])
    self.values = V.new_zeros(*V.shape[:-2], stop, V.shape[-1])
    self.keys[..., start:stop, :] = K
    self.values[..., start:stop, :] = V


def shared_by_all(X):
    return X[:1].expand_as(X)


def values_shared(read, self, layer):
    K, V = read(self, layer)
    return K, shared_by_all(V)


def positions_running_on(of):
    def on(rows_of, self, table, indices):
        if table is not of.W_P:
            return rows_of(self, table, indices)
        return torch.stack([rows_of(self, table, indices + b * len(indices)) for b in range(3)])

    return wrap(Batch, "rows_of", on)


def means_together(norm, self, name, x, X, *rest):
    alone, whole = X.square().mean(-1, keepdim=True), X.square().mean((0, -1), keepdim=True)
    return norm(self, name, x, X, *rest) * (alone / whole).sqrt()


def bias_for_the_first(product, self, name, x, X, W, *rest, **more):
    out = product(self, name, x, X, W, *rest, **more)
    if W.b is not None and name == "U":
        out[1:] -= W.b
    return out


def unshared(terms, self, sublayer, X):
    branches = tuple(replace(one, shares_norm=False) for one in sublayer.branches)
    return terms(self, replace(sublayer, branches=branches), X)


def sequential(terms, self, sublayer, X):
    added = []
    for one in sublayer.branches:
        alone = replace(sublayer, branches=(one,))
        added += terms(self, alone, add(X, *added) if torch.is_tensor(X) else X)
    return added


def by_weights_alone(normalized, y, x, X, norm, *rest):
    return normalized(y, x, X, replace(norm, config=replace(norm.config, offset=0.0)), *rest)


def layer_alone(walked, self, name, x, T, layer):
    project = replace(layer.project, W=layer.project.W * 1e-9)
    return walked(self, name, x, T, replace(layer, project=project))


def narrow(split, self, name, X, heads, h, norm, together, axes):
    if together:
        size = X.shape[-1] // heads
        X = X * (X.square().mean(-1, keepdim=True).sqrt()
                 / X.view(*X.shape[:-1], heads, size).square().mean(-1).sqrt()
                 .repeat_interleave(size, -1))  # fmt: skip
    return split(self, name, X, heads, h, norm, together, axes)


def lent_by_the_other(read, self, layer):
    lent = layer.config.kv.layer
    if lent is None:
        return read(self, layer)
    cache, stop = self.caches[1 - lent], self.first + self.count
    return cache.keys[..., :stop, :], cache.values[..., :stop, :]


def backwards(rotated, X, cos, sin):
    half = cos.shape[-1]
    a, b = X[..., :half], X[..., half : 2 * half]
    return torch.cat((b * cos - a * sin, a * cos + b * sin, X[..., 2 * half :]), -1)


BLIND = wrap(loops, "seen", lambda seen, i, mixer: seen(max(0, i - 1), mixer))
# by rung: the model that a fault is planted in, and what plants it
PLANTED = {
    1: {
        "a token that does not see itself": ("llama", BLIND),
        "loops without the window": ("window", changed(loops, "seen", 1, window=None)),
        # `√d` of the documents' single head, kept where there are h of them
        "scores scaled by the width": ("gpt2", of_model(
            lambda of: changed(loops, "softmax", 1, scale=of.config.width**-0.5))),
        "weights that do not sum to one": ("llama", wrap(loops, "softmax", by_the_largest)),
        "neurons without their biases": ("gpt2", wrap(
            loops, "times", lambda times, t, neurons: times(t, (neurons[0], None)))),
        "variance with one less in the loops": ("llama", wrap(
            loops, "normalized", with_one_less)),
        "queries rotated one position late": ("llama", wrap(
            Loops, "_rotated", lambda rotated, self, name, x, position, *rest:
            rotated(self, name, x, position + (name == "q"), *rest))),
        "keys of the other head": ("llama", wrap(
            Loops, "_key", lambda key, self, t, j, w, head, show:
            key(self, t, j, w, 1 - head, show))),
        "another function for tanh": ("gpt2", put(
            Loops, "functions", replace(FLOATS, tanh=lambda x: x / (1 + abs(x))))),
        "values weighted in reverse order": ("llama", wrap(
            loops, "softmax", lambda softmax, *args: softmax(*args)[::-1])),
        "a sink that takes nothing": ("sinks", wrap(
            loops, "softmax", lambda f, s, mixer, sink, *rest: f(s, mixer, None, *rest))),
    },
    2: {
        "rows forget the window": ("window", changed(rows, "attend", 4, window=None)),
        "a query that sees the next token": ("llama", wrap(
            rows, "attend", lambda attend, q, K, V, i, *rest:
            attend(q, K, V, min(i + 1, len(K) - 1), *rest))),
        "rows scaled by the width": ("gpt2", of_model(
            lambda of: changed(rows, "attend", 4, scale=of.config.width**-0.5))),
        "keys stacked in reverse": ("llama", wrap(
            VectorRows, "_stacked_rows", lambda stacked, self, K, V, mixer:
            stacked(self, [k[::-1] for k in K], V, mixer))),
        "heads of keys exchanged": ("llama", wrap(
            VectorRows, "_stacked_rows", lambda stacked, *args: stacked(*args)[::-1])),
        "keys that are not rotated": ("llama", wrap(
            VectorRows, "placed", lambda placed, self, letter, X, *rest:
            X if letter == "K" else placed(self, letter, X, *rest))),
        "values without their bias": ("gpt2", wrap(VectorRows, "product", values_without_bias)),
        "rows from which no mean is subtracted": ("gpt2", wrap(
            rows, "normalized", without_the_mean)),
        "learned positions from one in rows": ("gpt2", put(
            VectorRows, "positions", property(lambda self: Walk.positions.fget(self) + 1))),
    },
    3: {
        "mask without the next token": ("gpt2", put(
            matrices, "mask", lambda n, w: torch.full((n, n), -torch.inf).triu(2))),
        "matrices without a mask": ("llama", put(Matrices, "mask", lambda self, mixer: None)),
        "a mask one key too wide": ("window", wrap(
            matrices, "mask", lambda mask, n, window: mask(n, window + 1))),
        # the documents' slip: `Activation(X W + B)` for every layer, the last one too
        "activation after the output layer": ("gpt2", wrap(
            Matrices, "feed_forward",
            lambda f, *args: activate("gelu_tanh", f(*args), TENSORS))),
        "softmax over the queries": ("llama", put(matrices, "softmax", down_the_columns)),
        # `K Qᵀ`: the transposed scores, of the same shape
        "keys times queries": ("gpt2", wrap(
            Matrices, "attend", lambda attend, self, Q, K, *rest: attend(self, K, Q, *rest))),
        # the documents' slip: their own equations normalize before the feed-forward
        "feed forward of t3 in matrices": ("llama", wrap(
            Matrices, "norm", lambda norm, self, name, x, X, *rest:
            X if name == "T⁴" else norm(self, name, x, X, *rest))),
        "no residual around the feed forward": ("llama", wrap(
            Matrices, "sum", lambda sum, self, name, names, *X, **more:
            X[0] if name == "H" else sum(self, name, names, *X, **more))),
        "one bias for all columns": ("gpt2", wrap(Matrices, "product", mean_of_biases)),
    },
    4: {
        "heads first without the transpose": ("keys of their own", put(
            HeadsAsDimension, "_split",
            lambda self, name, X, h, letter="h": X.view(h, len(X), -1))),
        "merged without the transpose": ("gpt2", put(
            HeadsAsDimension, "_merge", lambda self, C: C.reshape(C.shape[1], -1))),
        "biases left out as heads are concatenated": ("gpt2", wrap(
            HeadsAsDimension, "own_matrices", lambda made, self, layer:
            [replace(one, b=None) for one in made(self, layer)])),
        "heads concatenated in reverse": ("gpt2", wrap(
            HeadsAsDimension, "own_matrices", heads_in_reverse)),
        # head h reads key head h mod k, not h // (h / k)
        "shared keys repeated in turns": ("llama", put(
            HeadsAsDimension, "_repeated", lambda self, K, V, mixer: tuple(
                X.repeat(mixer.heads // mixer.kv_heads, 1, 1) for X in (K, V)))),
        "softmax over the heads": ("keys of their own", wrap(
            matrices, "softmax", over_the_heads)),
        "keys of the first block in all": ("llama", put(
            HeadsAsDimension, "read_kept", lambda self, layer: self.kept[0])),
        "heads of queries rotated by their number": ("llama", wrap(
            HeadsAsDimension, "placed", rotated_by_the_heads_number)),
        "heads of values normalized like keys": ("qk norm", of_model(values_normalized)),
    },
    5: {
        "keys and values exchanged": ("gpt2", combined(lambda W, b, layer: (q_v_k(W, 1), b))),
        "biases of keys and values exchanged": ("gpt2", combined(
            lambda W, b, layer: (W, q_v_k(b, 0)))),
        "combined head by head": ("gpt2", combined(head_by_head)),
        "combined without a bias": ("gpt2", combined(lambda W, b, layer: (W, None))),
        "columns one too far": ("llama", combined(lambda W, b, layer: (W.roll(1, 1), b))),
        "matrices of the first block in all": ("llama", of_model(lambda of: wrap(
            CombinedQKV, "own_matrices",
            lambda own, self, layer: own(self, next(of.blocks[0].parts))))),
        "values read from the columns of keys": ("keys of their own", wrap(
            CombinedQKV, "queries_keys_values", keys_twice)),
        "queries scaled already in their matrix": ("llama", combined(queries_scaled)),
        "product that drops the last columns": ("llama", combined(last_column_dropped)),
    },
    6: {
        "a cache that loses the newest key": ("llama", wrap(
            Cache, "write", lambda write, self, K, V, start:
            write(self, K * 0 if start else K, V, start))),
        "a cache that loses the newest value": ("llama", wrap(
            Cache, "write", lambda write, self, K, V, start:
            write(self, K, V * 0 if start else V, start))),
        "a new token at position zero": ("gpt2", put(
            KeyValueCache, "positions", property(lambda self: torch.arange(self.count)))),
        "new tokens rotated one position late": ("llama", put(
            KeyValueCache, "positions",
            property(lambda self: Walk.positions.fget(self) + (self.first > 0)))),
        "one row that reads beyond its window": ("window", windowed(lambda config: None)),
        "a window without the token itself": ("window", windowed(
            lambda config: config.window - 1)),
        "one cache for all blocks": ("llama", wrap(
            KeyValueCache, "new_caches", lambda made, self, tokens: dict.fromkeys(
                caches := made(self, tokens), caches[0]))),
        "written over the row before": ("llama", wrap(
            Cache, "write", lambda write, self, K, V, start:
            write(self, K, V, max(0, start - 1)))),
        # prompt right, later tokens wrong: their keys never see a rotation
        "keys of new tokens that are not rotated": ("llama", wrap(
            KeyValueCache, "placed", lambda placed, self, letter, X, *rest:
            X if self.row and letter == "K" else placed(self, letter, X, *rest))),
        "a cache that is emptied as it grows": ("gpt2", put(Cache, "write", emptied)),
    },
    7: {
        "sequences that share a cache": ("llama", wrap(
            Batch, "read_kept",
            lambda read, self, layer: tuple(map(shared_by_all, read(self, layer))))),
        "sequences that share values": ("llama", wrap(Batch, "read_kept", values_shared)),
        # keys and values of new tokens are written to the next sequence's cache
        "new tokens of the neighbour": ("llama", wrap(
            Batch, "keep", lambda keep, self, block, K, V: keep(
                self, block, K.roll(1, 0) if self.row else K, V.roll(1, 0) if self.row else V))),
        "positions that run on through the batch": ("gpt2", of_model(positions_running_on)),
        "a batch without a mask": ("llama", put(Batch, "mask", lambda self, mixer: None)),
        # batch and heads exchanged: the right shape, numbers of other sequences
        "heads merged across sequences": ("keys of their own", wrap(
            Batch, "_merge",
            lambda merge, self, C: merge(self, C.transpose(0, 1).reshape(C.shape)))),
        "means over the whole batch": ("llama", wrap(Batch, "norm", means_together)),
        "a bias for the first sequence alone": ("gpt2", wrap(
            Batch, "product", bias_for_the_first)),
        "residuals of the first sequence": ("llama", wrap(
            Batch, "sum", lambda sum, self, name, names, T, X, **more:
            sum(self, name, names, T, shared_by_all(X), **more))),
    },
    # what rungs 1 to 7 share, against rung 8: each is a mistake in a step of some family
    SHARED: {
        "branches without their multiplier": ("multipliers", changed(
            Walk, "branch", 1, multiplier=1.0)),
        "branches without the norm after": ("norms after", changed(Walk, "branch", 1, post=None)),
        "blocks that are not scaled": ("blocks scaled by a parameter", changed(
            Walk, "block", 1, scale=1.0)),
        "parallel parts of which one reads the stream": ("parallel with one norm", wrap(
            Walk, "terms", unshared)),
        "parallel parts one after the other": ("parallel with two norms", wrap(
            Walk, "terms", sequential)),
        "norms that multiply by their weights alone": ("offset norms", all_of(
            *(wrap(one, "normalized", by_weights_alone) for one in (loops, rows, matrices)))),
        "embeddings that are not scaled": ("scaled ends", configured(
            lambda config: replace(config, embedding=replace(config.embedding, scale=1.0)))),
        "logits that are not scaled": ("scaled ends", configured(
            lambda config: replace(config, head=replace(config.head, scale=1.0)))),
        "logits without their cap": ("caps", configured(
            lambda config: replace(config, head=replace(config.head, cap=None)))),
        "scores capped after the scale is forgotten": ("caps", wrap(
            matrices, "soft_cap", lambda cap, x, c, of: cap(x * 8**0.5, c, of))),
        "gates of attention left open": ("gated attention", changed(
            Walk, "attention", 4, gate=None)),
        "queries that grow one token early": ("growing queries", wrap(
            walk, "growth", lambda growth, by, positions, like:
            growth(by, positions + 1, like))),
        "embeddings of layers without their projection": ("embeddings for each layer", wrap(
            Walk, "layer_embedding", layer_alone)),
        "gates that are not clamped": ("clamped gates", changed(walk, "gated", 2, clamp=None)),
        "wide norms head by head": ("qk norm over the width", wrap(
            HeadsAsDimension, "_split_normed", narrow)),
        "keys of the wrong layer": ("keys and values of another layer", wrap(
            KeyValueCache, "read_kept", lent_by_the_other)),
        "heads rotated wholly": ("some pairs of whole heads rotated", changed(
            walk, "frequencies", 0, scaling=None)),
        "rows rotated backwards": ("llama", wrap(walk, "rotated", backwards)),
    },
}  # fmt: skip
# name: (rung, configuration, plant)
FAULTS = {name: (8, *planted) for name, planted in decoder_faults.FAULTS.items()} | {
    name: (rung, *planted) for rung, some in PLANTED.items() for name, planted in some.items()
}
assert len(FAULTS) == len(decoder_faults.FAULTS) + sum(map(len, PLANTED.values()))


def check_seen(name, monkeypatch, dtype):
    rung, config, plant = FAULTS[name]
    of = decoder_faults.model(config, dtype) if rung == 8 else weights(DENSE[config], dtype)
    numbers = {SHARED: (7, 8), 1: (1, 2)}.get(rung) or (rung - 1, rung)
    (sound,) = differences(of, *numbers)
    assert sound.ok
    plant(monkeypatch, of)
    (found,) = differences(of, *numbers)
    assert not found.ok
    assert math.isfinite(found.difference)  # another number, not a crash or NaN
    assert found.difference > 3 * found.allowed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, monkeypatch):
    check_seen(name, monkeypatch, torch.float32)


@pytest.mark.parametrize("name", decoder_faults.FAULTS)
def test_a_fault_of_the_decoder_is_seen_in_float64(name, monkeypatch):
    check_seen(name, monkeypatch, torch.float64)


def test_a_fault_in_the_loops_is_one_between_two_rungs_only(monkeypatch):
    """The rungs above agree among themselves: the report names the place."""
    of = weights(DENSE["llama"])
    BLIND(monkeypatch, of)
    assert [rung.ok for rung in differences(of, *range(1, 9))] == [False] + [True] * 6


def test_all_positions_rotated_by_one_more_are_no_fault(monkeypatch):
    """A rotation is relative: q and k both turned on leave every product as it is."""
    of = weights(DENSE["llama"])
    tables = step.rope.tables
    monkeypatch.setattr(
        step.rope, "tables", lambda f, positions, factor: tables(f, positions + 1, factor)
    )
    (found,) = differences(of, 7, 8)
    assert found.ok
