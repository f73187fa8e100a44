"""Faults planted in the decoder: each is a mistake that somebody makes when writing a transformer,
and the documents make two of them.

Whoever claims to prove what the decoder computes has to see them.
"""

import torch
import torch.nn.functional as F
from blocks import ffn_of, norm_of
from small_models import random_model, weights
from zoo import CONFIGS, in_blocks

from llmcli.formats.dense import Dense, writable
from llmcli.nn import step
from llmcli.nn.block import Block
from llmcli.nn.step import Step, Visible
from llmcli.parts.attention import forward as attention
from llmcli.parts.attention.forward import Attention
from llmcli.parts.mlp import forward as mlp
from llmcli.parts.norm import forward as norm

FAULTS = {}  # name: (configuration, plant(monkeypatch, what holds `decoder` and `config`))


def fault(config):
    """Registers a function that plants a fault in the decoder of the model `config`."""

    def register(plant):
        FAULTS[plant.__name__.replace("_", " ")] = (config, plant)
        return plant

    return register


def model(name, dtype):
    """`small rows`: gpt2 with embeddings of the size that trained ones have.

    `dtype` `packed`: its matrices in blocks.
    """
    if dtype == "packed":
        return packed_model(name)
    if name != "small rows":
        return weights(CONFIGS[name], dtype)
    of = weights(CONFIGS["gpt2"], dtype)
    of.W_E.mul_(0.02)
    of.W_P.mul_(0.02)
    return of


def packed_model(name):
    small = name == "small rows"
    tables = ("embed.W", "pos_embed.W") if small else ()
    config = CONFIGS["gpt2" if small else name]
    config, formats = in_blocks(config, "Q8_0", "Q4_1", "Q5_0", dense=tables)
    of = random_model(config, formats=formats)
    for table in tables:
        writable(of.decoder.weight(table)).mul_(0.02)
    return of


@fault("window")
def mask_shifted_by_one(monkeypatch, of):
    visible = step.visible_keys
    monkeypatch.setattr(step, "visible_keys", lambda at, keys, w: visible(at + 1, keys, w))


@fault("llama")
def no_mask(monkeypatch, of):
    everything = slice(None)
    monkeypatch.setattr(
        Step, "_see", lambda self, window: (Visible(everything, 0, self.keys, False, None),)
    )


@fault("window")
def window_too_wide_by_one(monkeypatch, of):
    see = Step._see
    monkeypatch.setattr(Step, "_see", lambda self, window: see(self, window + 1))


@fault("gpt2")
def no_scale(monkeypatch, of):
    attend = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda *qkv, scale, **mask: attend(*qkv, scale=1.0, **mask)
    )


@fault("llama")
def scale_by_the_width_and_not_the_heads_size(monkeypatch, of):
    """`√d` of the documents' single head, kept where there are h of them."""
    attend, scale = attention.attend, of.config.width**-0.5
    monkeypatch.setattr(
        attention,
        "attend",
        lambda *qkv, scale_=scale, **rest: attend(*qkv, **(rest | {"scale": scale_})),
    )


@fault("keys of their own")
def heads_viewed_without_the_transpose(monkeypatch, of):
    """`[T, H·d]` read as `[H, T, d]`: the same shape, other numbers."""

    def viewed(self, x_BTNd):
        batch, tokens, heads, size = x_BTNd.shape
        return x_BTNd.reshape(batch, heads, tokens, size)

    monkeypatch.setattr(Attention, "_heads", viewed)


@fault("llama")
def shared_keys_interleaved(monkeypatch, of):
    """Head h reads key head h mod k, not h // (H / k)."""
    attend = attention.attend

    def tiled(q, k, v, **rest):
        group = q.shape[1] // k.shape[1]
        return attend(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), **rest)

    monkeypatch.setattr(attention, "attend", tiled)


@fault("gpt2")
def no_bias_of_the_queries(monkeypatch, of):
    linear = of.decoder.blocks[1].mixers[0].qkv
    bias = linear.bias.clone()
    bias[: linear.rows[0]] = 0
    monkeypatch.setattr(linear, "bias", bias)


@fault("gpt2")
def no_bias_in_the_feed_forward(monkeypatch, of):
    monkeypatch.setattr(ffn_of(of.decoder.blocks[1]).up, "bias", None)


@fault("gpt2")
def no_bias_after_the_heads(monkeypatch, of):
    monkeypatch.setattr(of.decoder.blocks[0].mixers[0].out, "bias", None)


@fault("gpt2")
def another_gelu(monkeypatch, of):
    """`x Φ(x)` for its tanh approximation: they differ by less than 0.0005."""
    for block in of.decoder.blocks:
        monkeypatch.setattr(ffn_of(block), "act", F.gelu)


@fault("small rows")
def another_epsilon(monkeypatch, of):
    """1e-6 for 1e-5: seen where rows are small, as embeddings of trained models are."""
    layer_norm = norm.layer_norm
    monkeypatch.setattr(
        norm, "layer_norm",
        lambda x, w, b, eps, dtype, **rest: layer_norm(x, w, b, eps / 10, dtype, **rest),
    )


@fault("gpt2")
def variance_with_one_less(monkeypatch, of):
    """Divided by d - 1, as statistics of a sample are."""

    def unbiased(x, w, b, eps, dtype, *, offset):
        out = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * w + b
        return out.to(dtype)

    monkeypatch.setattr(norm, "layer_norm", unbiased)


@fault("qk norm")
def queries_not_normalized(monkeypatch, of):
    monkeypatch.setattr(of.decoder.blocks[1].mixers[0], "q_norm", lambda x: x.to(of.decoder.dtype))


@fault("llama")
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


@fault("llama")
def rotated_backwards(monkeypatch, of):
    rotate = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, cos, sin: rotate(x, cos, -sin))


@fault("llama")
def neighbours_rotated_and_not_halves(monkeypatch, of):
    """Numbers 2i and 2i + 1 as a pair: what checkpoints in the other layout want."""
    rotate = attention.rotate

    def interleaved(x, cos, sin):
        halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return rotate(halves, cos, sin)

    monkeypatch.setattr(attention, "rotate", interleaved)


@fault("partial rotation")
def rotated_wholly_and_not_in_part(monkeypatch, of):
    rotate = attention.rotate

    def whole(x, cos, sin):
        return rotate(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))

    monkeypatch.setattr(attention, "rotate", whole)


@fault("gpt2")
def learned_positions_from_one(monkeypatch, of):
    positions = Step.positions.fget
    monkeypatch.setattr(Step, "positions", property(lambda self: positions(self) + 1))


@fault("llama")
def no_residual_around_attention(monkeypatch, of):
    def without(self, x, kept, step_):
        def emit(name, tensor):
            step_.emit(f"{self.name}.{name}", tensor)
            return tensor

        (_, (attention,)), (_, (ffn,)) = self.sublayers
        pre = emit("resid_pre", x)
        mid = attention(attention.pre_norm.observed(pre, step_), kept, step_, pre)
        mlp_out = ffn(ffn.pre_norm.observed(emit("resid_mid", mid), step_), None, step_, mid)
        return emit("resid_post", mid + mlp_out)

    monkeypatch.setattr(Block, "__call__", without)


@fault("llama")
def stream_rounded_to_16_bits(monkeypatch, of):
    """As where the whole model computes in bfloat16: a step between numbers near 16 is 1/8."""
    call = Block.__call__

    def rounded(self, x, kept, step_):
        out = call(self, x, kept, step_)
        return out.bfloat16().to(out.dtype)

    monkeypatch.setattr(Block, "__call__", rounded)


@fault("llama")
def stream_kept_in_16_bits(monkeypatch, of):
    """The same, its dtype with it."""
    call = Block.__call__
    monkeypatch.setattr(
        Block, "__call__", lambda self, x, kept, step_: call(self, x, kept, step_).bfloat16()
    )


@fault("llama")
def feed_forward_of_t3_and_not_of_t4(monkeypatch, of):
    """The documents' slip: their own equations normalize before the feed-forward."""
    norm_ = norm_of(of.decoder.blocks[1], 2)
    observed = norm_.observed

    def skipped(x, step_):
        return x.to(observed(x, step_).dtype)

    monkeypatch.setattr(norm_, "observed", skipped)


@fault("llama")
def gate_and_up_exchanged(monkeypatch, of):
    split = mlp.Linear.split
    monkeypatch.setattr(mlp.Linear, "split", lambda self, y: split(self, y)[::-1])


@fault("gpt2")
def tied_head_in_another_order(monkeypatch, of):
    rolled = of.decoder.head.dense().roll(1, 0)
    monkeypatch.setattr(of.decoder, "head", Dense(rolled))


@fault("llama")
def cached_one_slot_late(monkeypatch, of):
    """The tokens after the prompt: their keys lie behind the slots that are read."""
    write = Step.write

    def late(self, x, slots):
        late_by = int(self.starts[0] > 0)
        self.starts = [start + late_by for start in self.starts]
        self.keys += late_by
        write(self, x, slots)
        self.starts = [start - late_by for start in self.starts]
        self.keys -= late_by

    monkeypatch.setattr(Step, "write", late)


@fault("llama")
def keys_cached_before_the_rotation(monkeypatch, of):
    """Prompt right, later tokens wrong: the kept keys never see their rotation."""
    write, rotate, plain = Step.write, attention.rotate, []

    def remember(x, cos, sin):
        plain[:] = [x[:, :, -of.config.layers[0].attention.kv_heads :].transpose(1, 2)]
        return rotate(x, cos, sin)

    monkeypatch.setattr(attention, "rotate", remember)
    monkeypatch.setattr(  # values are written after their keys
        Step, "write", lambda self, x, slots: write(self, plain.pop() if plain else x, slots)
    )


@fault("llama")
def attention_in_three_digits(monkeypatch, of):
    attend = attention.attend

    def narrow(q, k, v, **rest):
        return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), **rest).to(q.dtype)

    monkeypatch.setattr(attention, "attend", narrow)
