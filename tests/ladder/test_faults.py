"""Faults planted in the walk, in every rung and in the decoder: the ladder must see each of them.

A fault in rung k shows between k - 1 and k (of rung 1 between 1 and 2), one in what rungs 1 to 7
share, or in the decoder, between 7 and 8.
"""

import math
from collections import Counter
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
# name: (rung, configuration, plant(monkeypatch, weights))
FAULTS = {name: (8, *planted) for name, planted in decoder_faults.FAULTS.items()}


def fault(rung, config):
    """Registers a function that plants a fault for `rung` of the model `config`."""

    def register(plant):
        name = plant.__name__.replace("_", " ")
        assert name not in FAULTS
        FAULTS[name] = (rung, config, plant)
        return plant

    return register


def wrap(monkeypatch, owner, name, change):
    """Replaces a function by `change(it, *its arguments)`."""
    kept = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: change(kept, *a, **k))


def differences(of, *numbers):
    """What the ladder reports for the rungs `numbers`, after the first of them."""
    tokens = ids(3, 9)
    workload = Workload(prompts=tokens[:, :6], more=tokens[0, 6:], rounds=0)
    return run_ladder(of, workload, numbers=numbers)[1:]


# Rung 1, against rung 2.


@fault(1, "llama")
def a_token_that_does_not_see_itself(monkeypatch, of):
    wrap(monkeypatch, loops, "seen", lambda seen, i, mixer: seen(max(0, i - 1), mixer))


@fault(1, "window")
def loops_without_the_window(monkeypatch, of):
    wrap(monkeypatch, loops, "seen", lambda seen, i, mixer: seen(i, replace(mixer, window=None)))


@fault(1, "gpt2")
def scores_scaled_by_the_width(monkeypatch, of):
    """`√d` of the documents' single head, kept where there are h of them."""
    scale = of.config.width**-0.5
    wrap(monkeypatch, loops, "softmax",
         lambda f, s, mixer, *rest: f(s, replace(mixer, scale=scale), *rest))  # fmt: skip


@fault(1, "llama")
def weights_that_do_not_sum_to_one(monkeypatch, of):
    def by_the_largest(softmax, *args):
        found = softmax(*args)
        return [weight / max(found) for weight in found]

    wrap(monkeypatch, loops, "softmax", by_the_largest)


@fault(1, "gpt2")
def neurons_without_their_biases(monkeypatch, of):
    wrap(monkeypatch, loops, "times", lambda times, t, neurons: times(t, (neurons[0], None)))


@fault(1, "llama")
def variance_with_one_less_in_the_loops(monkeypatch, of):
    def smaller(normalized, y, x, row, *rest):
        return [a * ((len(row) - 1) / len(row)) ** 0.5 for a in normalized(y, x, row, *rest)]

    wrap(monkeypatch, loops, "normalized", smaller)


@fault(1, "llama")
def queries_rotated_one_position_late(monkeypatch, of):
    def late(rotated, self, name, x, position, *rest):
        return rotated(self, name, x, position + (name == "q"), *rest)

    wrap(monkeypatch, Loops, "_rotated", late)


@fault(1, "llama")
def keys_of_the_other_head(monkeypatch, of):
    wrap(monkeypatch, Loops, "_key", lambda key, self, t, j, w, head, show:
         key(self, t, j, w, 1 - head, show))  # fmt: skip


@fault(1, "gpt2")
def another_function_for_tanh(monkeypatch, of):
    other = replace(FLOATS, tanh=lambda x: x / (1 + abs(x)))
    monkeypatch.setattr(Loops, "functions", other)


@fault(1, "llama")
def values_weighted_in_reverse_order(monkeypatch, of):
    wrap(monkeypatch, loops, "softmax", lambda softmax, *args: softmax(*args)[::-1])


@fault(1, "sinks")
def a_sink_that_takes_nothing(monkeypatch, of):
    wrap(monkeypatch, loops, "softmax", lambda f, s, mixer, sink, *rest: f(s, mixer, None, *rest))


# Rung 2, against rung 1.


@fault(2, "window")
def rows_forget_the_window(monkeypatch, of):
    wrap(monkeypatch, rows, "attend", lambda attend, q, K, V, i, mixer, *rest:
         attend(q, K, V, i, replace(mixer, window=None), *rest))  # fmt: skip


@fault(2, "llama")
def a_query_that_sees_the_next_token(monkeypatch, of):
    wrap(monkeypatch, rows, "attend", lambda attend, q, K, V, i, *rest:
         attend(q, K, V, min(i + 1, len(K) - 1), *rest))  # fmt: skip


@fault(2, "gpt2")
def rows_scaled_by_the_width(monkeypatch, of):
    scale = of.config.width**-0.5
    wrap(monkeypatch, rows, "attend", lambda attend, q, K, V, i, mixer, *rest:
         attend(q, K, V, i, replace(mixer, scale=scale), *rest))  # fmt: skip


@fault(2, "llama")
def keys_stacked_in_reverse(monkeypatch, of):
    wrap(monkeypatch, VectorRows, "_stacked_rows", lambda stacked, self, K, V, mixer:
         stacked(self, [k[::-1] for k in K], V, mixer))  # fmt: skip


@fault(2, "llama")
def heads_of_keys_exchanged(monkeypatch, of):
    wrap(monkeypatch, VectorRows, "_stacked_rows", lambda stacked, *args: stacked(*args)[::-1])


@fault(2, "llama")
def keys_that_are_not_rotated(monkeypatch, of):
    wrap(monkeypatch, VectorRows, "placed", lambda placed, self, letter, X, *rest:
         X if letter == "K" else placed(self, letter, X, *rest))  # fmt: skip


@fault(2, "gpt2")
def values_without_their_bias(monkeypatch, of):
    def without(product, self, name, of, X, W, *rest, **more):
        W = replace(W, b=None) if name == "V" else W
        return product(self, name, of, X, W, *rest, **more)

    wrap(monkeypatch, VectorRows, "product", without)


@fault(2, "gpt2")
def rows_from_which_no_mean_is_subtracted(monkeypatch, of):
    def rms(normalized, y, x, X, norm, *rest):
        norm = replace(norm, config=replace(norm.config, kind="rms"))
        return normalized(y, x, X, norm, *rest)

    wrap(monkeypatch, rows, "normalized", rms)


@fault(2, "gpt2")
def learned_positions_from_one_in_rows(monkeypatch, of):
    after = property(lambda self: Walk.positions.fget(self) + 1)
    monkeypatch.setattr(VectorRows, "positions", after)


# Rung 3, against rung 2.


@fault(3, "gpt2")
def mask_without_the_next_token(monkeypatch, of):
    monkeypatch.setattr(matrices, "mask", lambda n, w: torch.full((n, n), -torch.inf).triu(2))


@fault(3, "llama")
def matrices_without_a_mask(monkeypatch, of):
    monkeypatch.setattr(Matrices, "mask", lambda self, mixer: None)


@fault(3, "window")
def a_mask_one_key_too_wide(monkeypatch, of):
    wrap(monkeypatch, matrices, "mask", lambda mask, n, window: mask(n, window + 1))


@fault(3, "gpt2")
def activation_after_the_output_layer(monkeypatch, of):
    """The documents' slip: `Activation(X W + B)` for every layer, the last one too."""
    wrap(monkeypatch, Matrices, "feed_forward",
         lambda f, *args: activate("gelu_tanh", f(*args), TENSORS))  # fmt: skip


@fault(3, "llama")
def softmax_over_the_queries(monkeypatch, of):
    """Down the columns: the right shape, and the wrong sum is 1."""

    def columns(scores, sink=None):
        powers = (scores - scores.max(-2, keepdim=True).values).exp()
        return powers / powers.sum(-2, keepdim=True)

    monkeypatch.setattr(matrices, "softmax", columns)


@fault(3, "gpt2")
def keys_times_queries(monkeypatch, of):
    """`K Qᵀ`: the transposed scores, of the same shape."""
    wrap(monkeypatch, Matrices, "attend", lambda attend, self, Q, K, *rest:
         attend(self, K, Q, *rest))  # fmt: skip


@fault(3, "llama")
def feed_forward_of_t3_in_matrices(monkeypatch, of):
    """The documents' slip: their own equations normalize before the feed-forward."""
    wrap(monkeypatch, Matrices, "norm", lambda norm, self, name, x, X, *rest:
         X if name == "T⁴" else norm(self, name, x, X, *rest))  # fmt: skip


@fault(3, "llama")
def no_residual_around_the_feed_forward(monkeypatch, of):
    wrap(monkeypatch, Matrices, "sum", lambda sum, self, name, names, *X, **more:
         X[0] if name == "H" else sum(self, name, names, *X, **more))  # fmt: skip


@fault(3, "gpt2")
def one_bias_for_all_columns(monkeypatch, of):
    def mean(product, self, name, of, X, W, *rest, **more):
        if W.b is not None:
            W = replace(W, b=W.b.mean().expand_as(W.b))
        return product(self, name, of, X, W, *rest, **more)

    wrap(monkeypatch, Matrices, "product", mean)


# Rung 4, against rung 3.


@fault(4, "keys of their own")
def heads_first_without_the_transpose(monkeypatch, of):
    monkeypatch.setattr(
        HeadsAsDimension, "_split", lambda self, name, X, h, letter="h": X.view(h, len(X), -1)
    )


@fault(4, "gpt2")
def merged_without_the_transpose(monkeypatch, of):
    monkeypatch.setattr(HeadsAsDimension, "_merge", lambda self, C: C.reshape(C.shape[1], -1))


@fault(4, "gpt2")
def biases_left_out_as_heads_are_concatenated(monkeypatch, of):
    wrap(monkeypatch, HeadsAsDimension, "own_matrices", lambda made, self, layer:
         [replace(one, b=None) for one in made(self, layer)])  # fmt: skip


@fault(4, "gpt2")
def heads_concatenated_in_reverse(monkeypatch, of):
    def reverse(made, self, layer):
        q, k, v = made(self, layer)
        W = torch.cat(q.W.chunk(layer.config.heads, 1)[::-1], 1)
        return [replace(q, W=W), k, v]

    wrap(monkeypatch, HeadsAsDimension, "own_matrices", reverse)


@fault(4, "llama")
def shared_keys_repeated_in_turns(monkeypatch, of):
    """Head h reads key head h mod k, not h // (h / k)."""
    monkeypatch.setattr(HeadsAsDimension, "_repeated", lambda self, K, V, mixer: tuple(
        X.repeat(mixer.heads // mixer.kv_heads, 1, 1) for X in (K, V)
    ))  # fmt: skip


@fault(4, "keys of their own")
def softmax_over_the_heads(monkeypatch, of):
    def over(softmax, scores, sink=None):
        return softmax(scores, sink) if scores.ndim < 3 else scores.softmax(0).nan_to_num(0)

    wrap(monkeypatch, matrices, "softmax", over)


@fault(4, "llama")
def keys_of_the_first_block_in_all(monkeypatch, of):
    monkeypatch.setattr(HeadsAsDimension, "read_kept", lambda self, layer: self.kept[0])


@fault(4, "llama")
def heads_of_queries_rotated_by_their_number(monkeypatch, of):
    def turned(placed, self, letter, X, mixer, axes="d/h"):
        if letter == "K":
            return placed(self, letter, X, mixer, axes)
        return torch.stack([
            placed(self, letter, x.roll(h, 0), mixer, axes).roll(-h, 0) for h, x in enumerate(X)
        ])  # fmt: skip

    wrap(monkeypatch, HeadsAsDimension, "placed", turned)


@fault(4, "qk norm")
def heads_of_values_normalized_like_keys(monkeypatch, of):
    def all_of_them(split, self, name, X, heads, h, norm, together, axes):
        if name == "V":
            norm = next(of.blocks[0].parts).k_norm
        return split(self, name, X, heads, h, norm, together, axes)

    wrap(monkeypatch, HeadsAsDimension, "_split_normed", all_of_them)


# Rung 5, against rung 4.


def combined(monkeypatch, change):
    """Replaces W_qkv by `change(W, b, layer)`, the matrix and the bias."""

    def made(own, self, layer):
        (one,) = own(self, layer)
        W, b = change(one.W, one.b, layer)
        return [replace(one, W=W, b=b)]

    wrap(monkeypatch, CombinedQKV, "own_matrices", made)


@fault(5, "gpt2")
def keys_and_values_exchanged(monkeypatch, of):
    def exchanged(W, b, layer):
        q, k, v = W.chunk(3, 1)
        return torch.cat((q, v, k), 1), b

    combined(monkeypatch, exchanged)


@fault(5, "gpt2")
def biases_of_keys_and_values_exchanged(monkeypatch, of):
    def exchanged(W, b, layer):
        q, k, v = b.chunk(3)
        return W, torch.cat((q, v, k))

    combined(monkeypatch, exchanged)


@fault(5, "gpt2")
def combined_head_by_head(monkeypatch, of):
    """q k v of head 1, then of head 2: a layout that other models have."""

    def interleaved(W, b, layer):
        heads = layer.config.heads
        parts = [part.chunk(heads, 1) for part in W.chunk(3, 1)]
        return torch.cat([part[h] for h in range(heads) for part in parts], 1), b

    combined(monkeypatch, interleaved)


@fault(5, "gpt2")
def combined_without_a_bias(monkeypatch, of):
    combined(monkeypatch, lambda W, b, layer: (W, None))


@fault(5, "llama")
def columns_one_too_far(monkeypatch, of):
    combined(monkeypatch, lambda W, b, layer: (W.roll(1, 1), b))


@fault(5, "llama")
def matrices_of_the_first_block_in_all(monkeypatch, of):
    first = next(of.blocks[0].parts)
    wrap(monkeypatch, CombinedQKV, "own_matrices", lambda own, self, layer: own(self, first))


@fault(5, "keys of their own")
def values_read_from_the_columns_of_keys(monkeypatch, of):
    def twice(made, self, *args):
        Q, K, _ = made(self, *args)
        return [Q, K, K]

    wrap(monkeypatch, CombinedQKV, "queries_keys_values", twice)


@fault(5, "llama")
def queries_scaled_already_in_their_matrix(monkeypatch, of):
    """The scale folded into W_q, and applied once more."""

    def scaled(W, b, layer):
        W = W.clone()
        W[:, : layer.q.W.shape[1]] *= layer.config.scale
        return W, b

    combined(monkeypatch, scaled)


@fault(5, "llama")
def product_that_drops_the_last_columns(monkeypatch, of):
    def dropped(W, b, layer):
        W = W.clone()
        W[:, -1] = 0
        return W, b

    combined(monkeypatch, dropped)


# Rung 6, against rung 5.


@fault(6, "llama")
def a_cache_that_loses_the_newest_key(monkeypatch, of):
    wrap(monkeypatch, Cache, "write", lambda write, self, K, V, start:
         write(self, K * 0 if start else K, V, start))  # fmt: skip


@fault(6, "llama")
def a_cache_that_loses_the_newest_value(monkeypatch, of):
    wrap(monkeypatch, Cache, "write", lambda write, self, K, V, start:
         write(self, K, V * 0 if start else V, start))  # fmt: skip


@fault(6, "gpt2")
def a_new_token_at_position_zero(monkeypatch, of):
    monkeypatch.setattr(KeyValueCache, "positions", property(lambda self: torch.arange(self.count)))


@fault(6, "llama")
def new_tokens_rotated_one_position_late(monkeypatch, of):
    late = property(lambda self: Walk.positions.fget(self) + (self.first > 0))
    monkeypatch.setattr(KeyValueCache, "positions", late)


@fault(6, "window")
def one_row_that_reads_beyond_its_window(monkeypatch, of):
    def beyond(read, self, layer):
        layer = replace(layer, config=replace(layer.config, window=None)) if self.row else layer
        return read(self, layer)

    wrap(monkeypatch, KeyValueCache, "read_kept", beyond)


@fault(6, "window")
def a_window_without_the_token_itself(monkeypatch, of):
    def before(read, self, layer):
        config = layer.config
        if self.row:
            layer = replace(layer, config=replace(config, window=config.window - 1))
        return read(self, layer)

    wrap(monkeypatch, KeyValueCache, "read_kept", before)


@fault(6, "llama")
def one_cache_for_all_blocks(monkeypatch, of):
    def first(made, self, tokens):
        caches = made(self, tokens)
        return dict.fromkeys(caches, caches[0])

    wrap(monkeypatch, KeyValueCache, "new_caches", first)


@fault(6, "llama")
def written_over_the_row_before(monkeypatch, of):
    wrap(monkeypatch, Cache, "write", lambda write, self, K, V, start:
         write(self, K, V, max(0, start - 1)))  # fmt: skip


@fault(6, "llama")
def keys_of_new_tokens_that_are_not_rotated(monkeypatch, of):
    """Prompt right, later tokens wrong: their keys never see a rotation."""
    wrap(monkeypatch, KeyValueCache, "placed", lambda placed, self, letter, X, *rest:
         X if self.row and letter == "K" else placed(self, letter, X, *rest))  # fmt: skip


@fault(6, "gpt2")
def a_cache_that_is_emptied_as_it_grows(monkeypatch, of):
    """New slots are allocated for every token, and the old rows are not copied."""

    def emptied(self, K, V, start):
        stop = start + K.shape[-2]
        self.keys = K.new_zeros(*K.shape[:-2], stop, K.shape[-1])
        self.values = V.new_zeros(*V.shape[:-2], stop, V.shape[-1])
        self.keys[..., start:stop, :] = K
        self.values[..., start:stop, :] = V

    monkeypatch.setattr(Cache, "write", emptied)


# Rung 7, against rung 6.


def shared_by_all(X):
    return X[:1].expand_as(X)


@fault(7, "llama")
def sequences_that_share_a_cache(monkeypatch, of):
    wrap(monkeypatch, Batch, "read_kept", lambda read, self, layer:
         tuple(map(shared_by_all, read(self, layer))))  # fmt: skip


@fault(7, "llama")
def sequences_that_share_values(monkeypatch, of):
    def values(read, self, layer):
        K, V = read(self, layer)
        return K, shared_by_all(V)

    wrap(monkeypatch, Batch, "read_kept", values)


@fault(7, "llama")
def new_tokens_of_the_neighbour(monkeypatch, of):
    """Keys and values of new tokens are written to the next sequence's cache."""
    wrap(monkeypatch, Batch, "keep", lambda keep, self, block, K, V: keep(
        self, block, K.roll(1, 0) if self.row else K, V.roll(1, 0) if self.row else V
    ))  # fmt: skip


@fault(7, "gpt2")
def positions_that_run_on_through_the_batch(monkeypatch, of):
    def on(rows_of, self, table, indices):
        if table is not of.W_P:
            return rows_of(self, table, indices)
        return torch.stack([rows_of(self, table, indices + b * len(indices)) for b in range(3)])

    wrap(monkeypatch, Batch, "rows_of", on)


@fault(7, "llama")
def a_batch_without_a_mask(monkeypatch, of):
    monkeypatch.setattr(Batch, "mask", lambda self, mixer: None)


@fault(7, "keys of their own")
def heads_merged_across_sequences(monkeypatch, of):
    """Batch and heads exchanged: the right shape, numbers of other sequences."""
    wrap(monkeypatch, Batch, "_merge", lambda merge, self, C:
         merge(self, C.transpose(0, 1).reshape(C.shape)))  # fmt: skip


@fault(7, "llama")
def means_over_the_whole_batch(monkeypatch, of):
    def together(norm, self, name, x, X, *rest):
        alone, whole = X.square().mean(-1, keepdim=True), X.square().mean((0, -1), keepdim=True)
        return norm(self, name, x, X, *rest) * (alone / whole).sqrt()

    wrap(monkeypatch, Batch, "norm", together)


@fault(7, "gpt2")
def a_bias_for_the_first_sequence_alone(monkeypatch, of):
    def first(product, self, name, x, X, W, *rest, **more):
        out = product(self, name, x, X, W, *rest, **more)
        if W.b is not None and name == "U":
            out[1:] -= W.b
        return out

    wrap(monkeypatch, Batch, "product", first)


@fault(7, "llama")
def residuals_of_the_first_sequence(monkeypatch, of):
    wrap(monkeypatch, Batch, "sum", lambda sum, self, name, names, T, X, **more:
         sum(self, name, names, T, shared_by_all(X), **more))  # fmt: skip


# What rungs 1 to 7 share, against rung 8: each is a mistake in a step of some family.


def without(monkeypatch, function, **values):
    """`function` of the walk with the branch or layer that it is given changed."""
    wrap(monkeypatch, Walk, function, lambda f, self, one, *rest:
         f(self, replace(one, **values), *rest))  # fmt: skip


@fault(SHARED, "multipliers")
def branches_without_their_multiplier(monkeypatch, of):
    without(monkeypatch, "branch", multiplier=1.0)


@fault(SHARED, "norms after")
def branches_without_the_norm_after(monkeypatch, of):
    without(monkeypatch, "branch", post=None)


@fault(SHARED, "blocks scaled by a parameter")
def blocks_that_are_not_scaled(monkeypatch, of):
    without(monkeypatch, "block", scale=1.0)


@fault(SHARED, "parallel with one norm")
def parallel_parts_of_which_one_reads_the_stream(monkeypatch, of):
    def unshared(terms, self, sublayer, X):
        branches = tuple(replace(one, shares_norm=False) for one in sublayer.branches)
        return terms(self, replace(sublayer, branches=branches), X)

    wrap(monkeypatch, Walk, "terms", unshared)


@fault(SHARED, "parallel with two norms")
def parallel_parts_one_after_the_other(monkeypatch, of):
    def sequential(terms, self, sublayer, X):
        added = []
        for one in sublayer.branches:
            alone = replace(sublayer, branches=(one,))
            added += terms(self, alone, add(X, *added) if torch.is_tensor(X) else X)
        return added

    wrap(monkeypatch, Walk, "terms", sequential)


@fault(SHARED, "offset norms")
def norms_that_multiply_by_their_weights_alone(monkeypatch, of):
    def plain(normalized, y, x, X, norm, *rest):
        return normalized(y, x, X, replace(norm, config=replace(norm.config, offset=0.0)), *rest)

    for module in (loops, rows, matrices):
        wrap(monkeypatch, module, "normalized", plain)


@fault(SHARED, "scaled ends")
def embeddings_that_are_not_scaled(monkeypatch, of):
    unscaled = replace(of.config, embedding=replace(of.config.embedding, scale=1.0))
    object.__setattr__(of, "config", unscaled)


@fault(SHARED, "scaled ends")
def logits_that_are_not_scaled(monkeypatch, of):
    object.__setattr__(of, "config", replace(of.config, head=replace(of.config.head, scale=1.0)))


@fault(SHARED, "caps")
def logits_without_their_cap(monkeypatch, of):
    object.__setattr__(of, "config", replace(of.config, head=replace(of.config.head, cap=None)))


@fault(SHARED, "caps")
def scores_capped_after_the_scale_is_forgotten(monkeypatch, of):
    wrap(monkeypatch, matrices, "soft_cap", lambda cap, x, c, of: cap(x * 8**0.5, c, of))


@fault(SHARED, "gated attention")
def gates_of_attention_left_open(monkeypatch, of):
    def opened(attention, self, name, x, T, layer):
        return attention(self, name, x, T, replace(layer, gate=None))

    wrap(monkeypatch, Walk, "attention", opened)


@fault(SHARED, "growing queries")
def queries_that_grow_one_token_early(monkeypatch, of):
    wrap(monkeypatch, walk, "growth", lambda growth, by, positions, like:
         growth(by, positions + 1, like))  # fmt: skip


@fault(SHARED, "embeddings for each layer")
def embeddings_of_layers_without_their_projection(monkeypatch, of):
    def alone(walked, self, name, x, T, layer):
        project = replace(layer.project, W=layer.project.W * 1e-9)
        return walked(self, name, x, T, replace(layer, project=project))

    wrap(monkeypatch, Walk, "layer_embedding", alone)


@fault(SHARED, "clamped gates")
def gates_that_are_not_clamped(monkeypatch, of):
    wrap(monkeypatch, walk, "gated", lambda gated, g, u, config, of:
         gated(g, u, replace(config, clamp=None), of))  # fmt: skip


@fault(SHARED, "qk norm over the width")
def wide_norms_head_by_head(monkeypatch, of):
    def narrow(split, self, name, X, heads, h, norm, together, axes):
        if together:
            size = X.shape[-1] // heads
            X = X * (X.square().mean(-1, keepdim=True).sqrt()
                     / X.view(*X.shape[:-1], heads, size).square().mean(-1).sqrt()
                     .repeat_interleave(size, -1))  # fmt: skip
        return split(self, name, X, heads, h, norm, together, axes)

    wrap(monkeypatch, HeadsAsDimension, "_split_normed", narrow)


@fault(SHARED, "keys and values of another layer")
def keys_of_the_wrong_layer(monkeypatch, of):
    def other(read, self, layer):
        lent = layer.config.kv.layer
        if lent is None:
            return read(self, layer)
        return self.kept_of(1 - lent)

    monkeypatch.setattr(KeyValueCache, "kept_of", lambda self, block: (
        self.caches[block].keys[..., : self.first + self.count, :],
        self.caches[block].values[..., : self.first + self.count, :],
    ), raising=False)  # fmt: skip
    wrap(monkeypatch, KeyValueCache, "read_kept", other)


@fault(SHARED, "some pairs of whole heads rotated")
def heads_rotated_wholly(monkeypatch, of):
    wrap(monkeypatch, walk, "frequencies", lambda frequencies, rope, length:
         frequencies(replace(rope, scaling=None), length))  # fmt: skip


@fault(SHARED, "llama")
def rows_rotated_backwards(monkeypatch, of):
    def backwards(rotated, X, cos, sin):
        half = cos.shape[-1]
        a, b = X[..., :half], X[..., half : 2 * half]
        return torch.cat((b * cos - a * sin, a * cos + b * sin, X[..., 2 * half :]), -1)

    wrap(monkeypatch, walk, "rotated", backwards)


def planted(name, dtype):
    """The rungs to compare, the model, and what plants the fault."""
    rung, config, plant = FAULTS[name]
    of = decoder_faults.model(config, dtype) if rung == 8 else weights(DENSE[config], dtype)
    numbers = {SHARED: (7, 8), 1: (1, 2)}.get(rung) or (rung - 1, rung)
    return numbers, of, plant


def check_seen(name, monkeypatch, dtype):
    numbers, of, plant = planted(name, dtype)
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


def test_there_are_faults_in_the_decoder_in_every_rung_and_in_what_they_share():
    counts = Counter(rung for rung, _, _ in FAULTS.values())
    assert set(counts) == {*range(1, 9), SHARED}
    assert min(counts.values()) >= 8
    assert counts[8] >= 20


def test_a_fault_in_the_loops_is_one_between_two_rungs_only(monkeypatch):
    """The rungs above agree among themselves: the report names the place."""
    of = weights(DENSE["llama"])
    a_token_that_does_not_see_itself(monkeypatch, of)
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
