"""Faults planted in the decoder and in the rungs: the ladder must see every one of them.

Each is a mistake that somebody makes when writing a transformer; the documents make two of them.
A fault in the decoder shows between rungs 7 and 8, one in rung k between k - 1 and k.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rung_models import CONFIGS, ids, weights

from llmcli.ladder import cache, combined, heads, loops, matrices, rows
from llmcli.ladder.batch import Batch
from llmcli.ladder.cache import Cache, KeyValueCache
from llmcli.ladder.climb import Course, climb
from llmcli.ladder.heads import HeadsAsDimension
from llmcli.ladder.matrices import Matrices
from llmcli.nn import attention, mlp, norm, step
from llmcli.nn.attention import Attention
from llmcli.nn.block import Block
from llmcli.nn.step import Step, Visible

FAULTS = {}  # name: (rung, configuration, plant(monkeypatch, weights))


def fault(rung, config):
    """Registers a function that plants a fault for `rung` of the model `config`."""

    def register(plant):
        name = plant.__name__.replace("_", " ")
        FAULTS[name] = (rung, config, plant)
        return plant

    return register


def differences(of, *numbers):
    """What the climb reports for the rungs `numbers`, after the first of them."""
    tokens = ids(3, 9)
    course = Course(prompts=tokens[:, :6], more=tokens[0, 6:], rounds=0)
    return climb(of, course, numbers=numbers)[1:]


# In the decoder: rung 8 against rung 7.


@fault(8, "window")
def mask_shifted_by_one(monkeypatch, of):
    visible = step.visible_keys
    monkeypatch.setattr(step, "visible_keys", lambda at, keys, w: visible(at + 1, keys, w))


@fault(8, "llama")
def no_mask(monkeypatch, of):
    monkeypatch.setattr(Step, "_see", lambda self, window: Visible(0, self.keys, False, None))


@fault(8, "window")
def window_too_wide_by_one(monkeypatch, of):
    see = Step._see
    monkeypatch.setattr(Step, "_see", lambda self, window: see(self, window + 1))


@fault(8, "gpt2")
def no_scale(monkeypatch, of):
    attend = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda *qkv, scale, **mask: attend(*qkv, scale=1.0, **mask)
    )


@fault(8, "llama")
def scale_by_the_width_and_not_the_heads_size(monkeypatch, of):
    """`√d` of the documents' single head, kept where there are h of them."""
    attend, scale = attention.attend, of.config.width**-0.5
    monkeypatch.setattr(
        attention,
        "attend",
        lambda *qkv, scale_=scale, **rest: attend(*qkv, **(rest | {"scale": scale_})),
    )


@fault(8, "keys of their own")
def heads_viewed_without_the_transpose(monkeypatch, of):
    """`[T, H·d]` read as `[H, T, d]`: the same shape, other numbers."""

    def split(self, qk_BTNd):
        config = self.config
        batch, tokens, _, size = qk_BTNd.shape
        q, k = qk_BTNd.split_with_sizes([config.heads, config.kv_heads], 2)
        return (
            q.reshape(batch, config.heads, tokens, size),
            k.reshape(batch, config.kv_heads, tokens, size),
        )

    monkeypatch.setattr(Attention, "_heads", split)


@fault(8, "llama")
def shared_keys_interleaved(monkeypatch, of):
    """Head h reads key head h mod k, not h // (H / k)."""
    attend = attention.attend

    def tiled(q, k, v, **rest):
        group = q.shape[1] // k.shape[1]
        return attend(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), **rest)

    monkeypatch.setattr(attention, "attend", tiled)


@fault(8, "gpt2")
def no_bias_of_the_queries(monkeypatch, of):
    linear = of.decoder.blocks[1].mixer.qkv
    bias = linear.bias.clone()
    bias[: linear.rows[0]] = 0
    monkeypatch.setattr(linear, "bias", bias)


@fault(8, "gpt2")
def no_bias_in_the_feed_forward(monkeypatch, of):
    monkeypatch.setattr(of.decoder.blocks[1].ffn.up, "bias", None)


@fault(8, "gpt2")
def no_bias_after_the_heads(monkeypatch, of):
    monkeypatch.setattr(of.decoder.blocks[0].mixer.out, "bias", None)


@fault(8, "gpt2")
def another_gelu(monkeypatch, of):
    """`x Φ(x)` for its tanh approximation: they differ by less than 0.0005."""
    for block in of.decoder.blocks:
        monkeypatch.setattr(block.ffn, "act", F.gelu)


@fault(8, "small rows")
def another_epsilon(monkeypatch, of):
    """1e-6 for 1e-5: seen where rows are small, as embeddings of trained models are."""
    layer_norm = norm.layer_norm
    monkeypatch.setattr(norm, "layer_norm", lambda x, w, b, eps: layer_norm(x, w, b, eps / 10))


@fault(8, "gpt2")
def variance_with_one_less(monkeypatch, of):
    """Divided by d - 1, as statistics of a sample are."""

    def unbiased(x, w, b, eps):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * w + b

    monkeypatch.setattr(norm, "layer_norm", unbiased)


@fault(8, "qk norm")
def queries_not_normalized(monkeypatch, of):
    monkeypatch.setattr(of.decoder.blocks[1].mixer, "q_norm", lambda x: x)


@fault(8, "llama")
def rotated_one_position_late(monkeypatch, of):
    """Of the tokens after the prompt; of all tokens it would be no fault (tested below)."""
    rope = Step._rope

    def late(self, config):
        if self.starts[0] == 0:
            return rope(self, config)
        self.starts = [start + 1 for start in self.starts]
        self.keys += 1
        tables = rope(self, config)
        self.starts = [start - 1 for start in self.starts]
        self.keys -= 1
        return tables

    monkeypatch.setattr(Step, "_rope", late)


@fault(8, "llama")
def rotated_backwards(monkeypatch, of):
    rotate = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, cos, sin: rotate(x, cos, -sin))


@fault(8, "llama")
def neighbours_rotated_and_not_halves(monkeypatch, of):
    """Numbers 2i and 2i + 1 as a pair: what checkpoints in the other layout want."""
    rotate = attention.rotate

    def interleaved(x, cos, sin):
        halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return rotate(halves, cos, sin)

    monkeypatch.setattr(attention, "rotate", interleaved)


@fault(8, "partial rotation")
def rotated_wholly_and_not_in_part(monkeypatch, of):
    rotate = attention.rotate

    def whole(x, cos, sin):
        return rotate(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))

    monkeypatch.setattr(attention, "rotate", whole)


@fault(8, "gpt2")
def learned_positions_from_one(monkeypatch, of):
    positions = Step.positions.fget
    monkeypatch.setattr(Step, "positions", property(lambda self: positions(self) + 1))


@fault(8, "llama")
def no_residual_around_attention(monkeypatch, of):
    def without(self, x, kept, step_):
        mid = self.mixer(self.ln1(x), kept, step_)
        return mid + self.ffn(self.ln2(mid), step_)

    monkeypatch.setattr(Block, "__call__", without)


@fault(8, "llama")
def feed_forward_of_t3_and_not_of_t4(monkeypatch, of):
    """The documents' slip: their own equations normalize before the feed-forward."""
    monkeypatch.setattr(of.decoder.blocks[1].ln2, "observed", lambda x, step_: x)


@fault(8, "llama")
def gate_and_up_exchanged(monkeypatch, of):
    split = mlp.Linear.split
    monkeypatch.setattr(mlp.Linear, "split", lambda self, y: split(self, y)[::-1])


@fault(8, "gpt2")
def tied_head_in_another_order(monkeypatch, of):
    rolled = type("Head", (), {"weight": of.decoder.embed.roll(1, 0)})
    monkeypatch.setattr(of.decoder, "head", rolled)


@fault(8, "llama")
def cached_one_slot_late(monkeypatch, of):
    """The tokens after the prompt: their keys lie behind the slots that are read."""
    write = Step.write

    def late(self, kept, k, v):
        late_by = int(self.starts[0] > 0)
        self.starts = [start + late_by for start in self.starts]
        self.keys += late_by
        write(self, kept, k, v)
        self.starts = [start - late_by for start in self.starts]
        self.keys -= late_by

    monkeypatch.setattr(Step, "write", late)


@fault(8, "llama")
def keys_cached_before_the_rotation(monkeypatch, of):
    """Prompt right, later tokens wrong: the kept keys never see their rotation."""
    write, rotate, plain = Step.write, attention.rotate, []

    def remember(x, cos, sin):
        plain[:] = [x[:, :, -of.config.layers[0].mixer.kv_heads :].transpose(1, 2)]
        return rotate(x, cos, sin)

    monkeypatch.setattr(attention, "rotate", remember)
    monkeypatch.setattr(Step, "write", lambda self, kept, k, v: write(self, kept, plain[0], v))


@fault(8, "llama")
def attention_in_three_digits(monkeypatch, of):
    attend = attention.attend

    def narrow(q, k, v, **rest):
        return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), **rest).to(q.dtype)

    monkeypatch.setattr(attention, "attend", narrow)


# In a rung, against the one below.


@fault(2, "llama")
def a_token_that_does_not_see_itself(monkeypatch, of):
    seen = loops.seen
    monkeypatch.setattr(
        loops, "seen", lambda i, mixer: seen(i, mixer) if i == 0 else seen(i - 1, mixer)
    )


@fault(2, "window")
def rows_forget_the_window(monkeypatch, of):
    attend = rows.attend

    def unlimited(q, K, V, i, mixer, show):
        return attend(q, K, V, i, replace(mixer, window=None), show)

    monkeypatch.setattr(rows, "attend", unlimited)


@fault(3, "gpt2")
def mask_without_the_next_token(monkeypatch, of):
    monkeypatch.setattr(matrices, "mask", lambda n, w: torch.full((n, n), -torch.inf).triu(2))


@fault(3, "gpt2")
def activation_after_the_output_layer(monkeypatch, of):
    """The documents' slip: `Activation(X W + B)` for every layer, the last one too."""
    feed_forward = Matrices._feed_forward
    monkeypatch.setattr(
        Matrices, "_feed_forward",
        lambda self, layer, T: matrices.activate("gelu_tanh", feed_forward(self, layer, T)),
    )  # fmt: skip


@fault(3, "llama")
def softmax_over_the_queries(monkeypatch, of):
    """Down the columns: the right shape, and the wrong sum is 1."""

    def columns(scores):
        powers = (scores - scores.max(-2, keepdim=True).values).exp()
        return powers / powers.sum(-2, keepdim=True)

    monkeypatch.setattr(matrices, "softmax", columns)


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
    concatenate = heads.concatenate
    monkeypatch.setattr(heads, "concatenate", lambda layer: replace(concatenate(layer), b_v=None))


@fault(5, "gpt2")
def keys_and_values_exchanged(monkeypatch, of):
    combine = combined.combine

    def exchanged(layer):
        W, b = combine(layer)
        q, k, v = W.chunk(3, 1)
        return torch.cat((q, v, k), 1), b

    monkeypatch.setattr(combined, "combine", exchanged)


@fault(5, "gpt2")
def combined_head_by_head(monkeypatch, of):
    """q k v of head 1, then of head 2: a layout that other models have."""
    heads_ = of.config.layers[0].mixer.heads
    combine = combined.combine

    def interleaved(layer):
        W, b = combine(layer)
        parts = [part.chunk(heads_, 1) for part in W.chunk(3, 1)]
        return torch.cat([part[h] for h in range(heads_) for part in parts], 1), b

    monkeypatch.setattr(combined, "combine", interleaved)


@fault(6, "llama")
def a_cache_that_loses_the_newest_key(monkeypatch, of):
    write = Cache.write
    monkeypatch.setattr(
        Cache, "write", lambda self, K, V, start: write(self, K * 0 if start else K, V, start)
    )


@fault(6, "gpt2")
def a_new_token_at_position_zero(monkeypatch, of):
    arange = torch.arange

    def restarted(start, stop=None):
        return arange(start) if stop is None else arange(stop - start)

    monkeypatch.setattr(cache, "torch", _Replaced(torch, arange=restarted))


@fault(6, "window")
def one_row_that_reads_beyond_its_window(monkeypatch, of):
    kept = KeyValueCache._kept
    monkeypatch.setattr(
        KeyValueCache, "_kept", lambda self, slots, count, window: kept(self, slots, count, None)
    )


@fault(7, "llama")
def sequences_that_share_a_cache(monkeypatch, of):
    kept = Batch._kept

    def first(self, slots, count, window):
        return tuple(x[:1].expand_as(x) for x in kept(self, slots, count, window))

    monkeypatch.setattr(Batch, "_kept", first)


class _Replaced:
    """A module with some of its names replaced, for one importer alone."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def model(name, dtype):
    """`small rows`: gpt2 with embeddings of the size that trained ones have."""
    if name != "small rows":
        return weights(CONFIGS[name], dtype)
    of = weights(CONFIGS["gpt2"], dtype)
    of.W_E.mul_(0.02)
    of.W_P.mul_(0.02)
    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, dtype, monkeypatch):
    rung, config, plant = FAULTS[name]
    of = model(config, dtype)
    (sound,) = differences(of, rung - 1, rung)
    assert sound.ok
    plant(monkeypatch, of)
    (found,) = differences(of, rung - 1, rung)
    assert not found.ok
    assert math.isfinite(found.difference)  # another number, not a crash or NaN
    assert found.difference > 3 * found.allowed


def test_there_are_faults_in_the_decoder_and_in_every_rung():
    assert {rung for rung, _, _ in FAULTS.values()} == set(range(2, 9))
    assert sum(rung == 8 for rung, _, _ in FAULTS.values()) >= 20


def test_a_fault_in_the_loops_is_one_between_two_rungs_only(monkeypatch):
    """The rungs above agree among themselves: the report names the place."""
    plant = FAULTS["a token that does not see itself"][2]
    of = model("llama", torch.float64)
    plant(monkeypatch, of)
    assert [rung.ok for rung in differences(of, *range(1, 9))] == [False] + [True] * 6


def test_all_positions_rotated_by_one_more_are_no_fault(monkeypatch):
    """A rotation is relative: q and k both turned on leave every product as it is."""
    of = model("llama", torch.float64)
    tables = step.rope.tables
    monkeypatch.setattr(
        step.rope, "tables", lambda f, positions, factor: tables(f, positions + 1, factor)
    )
    (found,) = differences(of, 7, 8)
    assert found.ok
