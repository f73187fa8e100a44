"""Faults planted in the decoder: each is a mistake that somebody makes when writing a transformer,
and the documents make two of them.

Whoever claims to prove what the decoder computes has to see them.
"""

from functools import partial

import torch
import torch.nn.functional as F
from blocks import ffn_of, norm_of
from small_models import random_model, weights
from zoo import CONFIGS, in_blocks

from llmcli.decoder.block import Block
from llmcli.nn import step
from llmcli.nn.step import KeyRange, Step
from llmcli.parts import attention, mlp, norm
from llmcli.parts.attention import Attention
from llmcli.weights.dense import Dense, writable


def model(name, dtype):
    """`small rows`: gpt2 with embeddings of the size that trained ones have.

    `dtype` `packed`: its matrices in blocks.
    """
    small = name == "small rows"
    config = CONFIGS["gpt2" if small else name]
    tables = ("embed.W", "pos_embed.W") if small else ()
    if dtype != "packed":
        of = weights(config, dtype)
    else:
        config, formats = in_blocks(config, "Q8_0", "Q4_1", "Q5_0", dense=tables)
        of = random_model(config, formats=formats)
    for table in tables:
        writable(of.decoder.weight(table)).mul_(0.02)
    return of


def red(checks):
    """The names of those that fail."""
    return {check.name for check in checks if not check.ok}


def wrap(owner, name, by):
    """Plants a function that is given the right one and its arguments."""
    return lambda patch, of: patch.setattr(owner, name, _bound(getattr(owner, name), by))


def _bound(right, by):
    return lambda *args, **rest: by(right, *args, **rest)


def in_the_model(find, name, value):
    """Plants another value of what `find` finds in a decoder; `value`: of the right one."""

    def plant(patch, of):
        patch.setattr(found := find(of.decoder), name, value(getattr(found, name)))

    return plant


def everything_seen(see, self, window):
    return (KeyRange(slice(None), 0, self.keys, False, None),)


def scaled_by_the_width(patch, of):
    """`√d` of the documents' single head, kept where there are h of them."""
    scale = of.config.width**-0.5
    by_width = wrap(attention, "attend", lambda attend, *qkv, **rest: attend(
        *qkv, **(rest | {"scale": scale})
    ))  # fmt: skip
    by_width(patch, of)


def viewed(heads, self, x_BTNd):
    """`[T, H·d]` read as `[H, T, d]`: the same shape, other numbers."""
    batch, tokens, number, size = x_BTNd.shape
    return x_BTNd.reshape(batch, number, tokens, size)


def interleaved(attend, q, k, v, **rest):
    """Head h reads key head h mod k, not h // (H / k)."""
    group = q.shape[1] // k.shape[1]
    return attend(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), **rest)


def no_bias_of_the_queries(patch, of):
    linear = of.decoder.blocks[1].mixers[0].qkv
    bias = linear.bias.clone()
    bias[: linear.rows[0]] = 0
    patch.setattr(linear, "bias", bias)


def unbiased(layer_norm, x, w, b, eps, dtype, *, offset):
    """Divided by d - 1, as statistics of a sample are."""
    out = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * w + b
    return out.to(dtype)


def one_slot_late(right, self, *args):
    """Of the tokens after the prompt; of all tokens a rotation by one more would be no fault."""
    late_by = int(self.starts[0] > 0)
    self.starts = [start + late_by for start in self.starts]
    self.keys += late_by
    found = right(self, *args)
    self.starts = [start - late_by for start in self.starts]
    self.keys -= late_by
    return found


def without_a_residual(right, self, x, kept, step_):
    def emit(name, tensor):
        step_.emit(f"{self.name}.{name}", tensor)
        return tensor

    (_, (attention,)), (_, (ffn,)) = self.sublayers
    pre = emit("resid_pre", x)
    mid = attention(attention.pre_norm.observed(pre, step_), kept, step_, pre)
    mlp_out = ffn(ffn.pre_norm.observed(emit("resid_mid", mid), step_), None, step_, mid)
    return emit("resid_post", mid + mlp_out)


def rounded(call, self, x, kept, step_):
    """As where the whole model computes in bfloat16: a step between numbers near 16 is 1/8."""
    out = call(self, x, kept, step_)
    return out.bfloat16().to(out.dtype)


def not_normalized(observed):
    """The documents' slip: their own equations normalize before the feed-forward."""
    return lambda x, step_: x.to(observed(x, step_).dtype)


def before_the_rotation(patch, of):
    """Prompt right, later tokens wrong: the kept keys never see their rotation."""
    plain, heads = [], of.config.layers[0].attention.kv_heads

    def remember(rotate, x, cos, sin):
        plain[:] = [x[:, :, -heads:].transpose(1, 2)]
        return rotate(x, cos, sin)

    def write(right, self, x, slots):  # values are written after their keys
        right(self, plain.pop() if plain else x, slots)

    wrap(attention, "rotate", remember)(patch, of)
    wrap(Step, "write", write)(patch, of)


def narrow(attend, q, k, v, **rest):
    return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), **rest).to(q.dtype)


def another_gelu(patch, of):
    """`x Φ(x)` for its tanh approximation: they differ by less than 0.0005."""
    for block in of.decoder.blocks:
        patch.setattr(ffn_of(block), "act", F.gelu)


def queries_not_normalized(patch, of):
    mixer, dtype = of.decoder.blocks[1].mixers[0], of.decoder.dtype
    patch.setattr(mixer, "q_norm", lambda x: x.to(dtype))


def positions_from_one(patch, of):
    positions = Step.positions.fget
    patch.setattr(Step, "positions", property(lambda self: positions(self) + 1))


def halves(rotate, x, cos, sin):
    """Numbers 2i and 2i + 1 as a pair: what checkpoints in the other layout want."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin)


def wholly(rotate, x, cos, sin):
    return rotate(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


rotating = partial(wrap, attention, "rotate")
attending = partial(wrap, attention, "attend")
in_a_block = partial(wrap, Block, "__call__")
# name: (configuration, plant(monkeypatch, what holds `decoder` and `config`))
FAULTS = {
    "mask shifted by one": ("window", wrap(
        step, "visible_keys", lambda visible, at, keys, w: visible(at + 1, keys, w))),
    "no mask": ("llama", wrap(Step, "_ranges", everything_seen)),
    "window too wide by one": ("window", wrap(
        Step, "_ranges", lambda see, self, window: see(self, window + 1))),
    "no scale": ("gpt2", attending(
        lambda attend, *qkv, scale, **mask: attend(*qkv, scale=1.0, **mask))),
    "scale by the width and not the heads size": ("llama", scaled_by_the_width),
    "heads viewed without the transpose": ("keys of their own", wrap(Attention, "_heads", viewed)),
    "shared keys interleaved": ("llama", attending(interleaved)),
    "no bias of the queries": ("gpt2", no_bias_of_the_queries),
    "no bias in the feed forward": ("gpt2", in_the_model(
        lambda decoder: ffn_of(decoder.blocks[1]).up, "bias", lambda bias: None)),
    "no bias after the heads": ("gpt2", in_the_model(
        lambda decoder: decoder.blocks[0].mixers[0].out, "bias", lambda bias: None)),
    "another gelu": ("gpt2", another_gelu),
    # 1e-6 for 1e-5: seen where rows are small, as embeddings of trained models are
    "another epsilon": ("small rows", wrap(
        norm, "layer_norm", lambda right, x, w, b, eps, dtype, **rest:
        right(x, w, b, eps / 10, dtype, **rest))),
    "variance with one less": ("gpt2", wrap(norm, "layer_norm", unbiased)),
    "queries not normalized": ("qk norm", queries_not_normalized),
    "rotated one position late": ("llama", wrap(Step, "_rope", one_slot_late)),
    "rotated backwards": ("llama", rotating(lambda rotate, x, cos, sin: rotate(x, cos, -sin))),
    "neighbours rotated and not halves": ("llama", rotating(halves)),
    "rotated wholly and not in part": ("partial rotation", rotating(wholly)),
    "learned positions from one": ("gpt2", positions_from_one),
    "no residual around attention": ("llama", in_a_block(without_a_residual)),
    "stream rounded to 16 bits": ("llama", in_a_block(rounded)),
    "stream kept in 16 bits": ("llama", in_a_block(  # its dtype with it
        lambda call, self, x, kept, step_: call(self, x, kept, step_).bfloat16())),
    "feed forward of t3 and not of t4": ("llama", in_the_model(
        lambda decoder: norm_of(decoder.blocks[1], 2), "observed", not_normalized)),
    "gate and up exchanged": ("llama", wrap(
        mlp.Linear, "split", lambda split, self, y: split(self, y)[::-1])),
    "tied head in another order": ("gpt2", in_the_model(
        lambda decoder: decoder, "head", lambda head: Dense(head.dense().roll(1, 0)))),
    # the tokens after the prompt: their keys lie behind the slots that are read
    "cached one slot late": ("llama", wrap(Step, "write", one_slot_late)),
    "keys cached before the rotation": ("llama", before_the_rotation),
    "attention in three digits": ("llama", attending(narrow)),
}  # fmt: skip
