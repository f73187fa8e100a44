"""Every view proves itself: faults planted in the decoder turn the footer of one of them red.

Each view is asked alone, with nothing but its own checks. Between them they have to see all: what
can go wrong in any decoder, and in what only some families have (offsets, caps, factors, norms
after, parts side by side …), in a prompt or in the tokens after it.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import cycle

import pytest
import torch
from blocks import ffn_of, norm_of
from covers import in_turn
from decoder_faults import FAULTS, attending, in_the_model, model, red, wrap
from decoder_parameters import Times
from needs import needs_kernels
from small_models import as_model, ids, random_model
from test_experts import FAULTS as OF_EXPERTS
from zoo import MODELS

from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.commands.lens.measure import measure_lens
from llmcli.decoder import block
from llmcli.decoder import decoder as nn_decoder
from llmcli.graph.names import Names
from llmcli.inspect.passes import Passes
from llmcli.nn.step import Step
from llmcli.ops import compiled
from llmcli.ops.activations import activation, quick_gelu
from llmcli.parts import attention as nn_attention
from llmcli.parts import experts, latent, mlp, norm
from llmcli.parts.attention import Attention
from llmcli.parts.latent import LatentAttention
from llmcli.weights.packed import Packed

ARITHMETIC = [
    torch.float32, torch.float16, torch.bfloat16, pytest.param("packed", marks=needs_kernels)
]  # fmt: skip
PROMPT = tuple(ids(1, 9)[0].tolist())
# what is no fault in numbers of three digits: those of bfloat16 have no more
BELOW_16_BITS = {torch.bfloat16: {"attention in three digits"}, torch.float16: set()}


def whole(name, dtype):
    """A model of `decoder_faults` as the views take it."""
    return as_model(model(name, dtype).decoder)


def attention(of):
    return measure_attention(Passes(of, PROMPT)).checks


def attention_of_new_tokens(of):
    return measure_attention(Passes(of, PROMPT, 3)).checks


def lens(of):
    return measure_lens(Passes(of, PROMPT), span=range, mid=True).checks


def dump(of):
    plan = plan_dump(of, Names(of.config).select("*"), len(PROMPT))
    return measure_dump(Passes(of, PROMPT), plan).checks


# `attention` sees the way from a layer's norm to what it adds to the stream, and that of new tokens
# if there are some; `lens` the stream and what is made of it; `dump` what it is asked for
SEEN_BY = dict.fromkeys(FAULTS, attention) | dict.fromkeys((
    "rotated one position late", "cached one slot late", "keys cached before the rotation",
), attention_of_new_tokens) | dict.fromkeys((
    "no residual around attention", "stream rounded to 16 bits", "stream kept in 16 bits",
    "tied head in another order",
), lens) | dict.fromkeys((
    "no bias in the feed forward", "another gelu", "learned positions from one",
    "feed forward of t3 and not of t4", "gate and up exchanged",
), dump)  # fmt: skip


@cache
def red_without_a_fault(view, make, config, dtype):
    """Asked once of a view and a model, for all faults."""
    return red(view(make(config, dtype)))


@pytest.mark.parametrize(("name", "dtype"), in_turn(list(FAULTS), [torch.float64, *ARITHMETIC]))
def test_a_fault_turns_a_footer_red(name, dtype, monkeypatch):
    config, plant = FAULTS[name]
    assert not red_without_a_fault(SEEN_BY[name], whole, config, dtype)
    of = whole(config, dtype)
    plant(monkeypatch, of)
    assert bool(red(SEEN_BY[name](of))) != (name in BELOW_16_BITS.get(dtype, ()))


def one_head(by, attend, *qkv, **rest):
    z = attend(*qkv, **rest)
    return torch.cat((z[:, :1], z[:, 1:2] * by, z[:, 2:]), 1)


def weighted(part):
    """Makes faults that multiply a weight of the last block, `part(block)`."""
    return lambda by: in_the_model(
        lambda decoder: part(decoder.blocks[-1]), "weight", lambda weight: Times(weight, by)
    )


# what plants a factor; how far it may be off before it is seen: next to 1 in bfloat16 is 1.0078
FACTORS = {
    "scale": lambda by: attending(
        lambda attend, *qkv, scale, **mask: attend(*qkv, scale=scale * by, **mask)),
    "one head": lambda by: attending(partial(one_head, by)),
    "projection": weighted(lambda block: block.mixers[0].qkv),
    "output": weighted(lambda block: block.mixers[0].out),
    "first norm": lambda by: in_the_model(
        lambda decoder: norm_of(decoder.blocks[-1], 1), "w", lambda w: w * by),
    "feed forward": weighted(lambda block: ffn_of(block).down),
}  # fmt: skip
SMALL = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 0.01, "packed": 1e-3}


@pytest.mark.parametrize(("fault", "config", "dtype", "sign"), in_turn(
    list(FACTORS), ["gpt2", "llama", "keys of their own", "qk norm", "window"],
    list(ARITHMETIC), [1, -1],
))
def test_a_small_fault_turns_a_footer_red(fault, config, dtype, sign, monkeypatch):
    of = whole(config, dtype)
    FACTORS[fault](1 + sign * SMALL[dtype])(monkeypatch, of)
    assert red((dump if fault == "feed forward" else attention)(of))


# what a product may make of the low digits of its activations: of the results of `quantized_input`,
# rounded to 8 bits and to 16
LOW_DIGITS = {
    "left out": lambda high, both: high,
    "negated": lambda high, both: 2 * high - both,
    "doubled": lambda high, both: 2 * both - high,
    "of the column beside": lambda high, both: high + (both - high).roll(1, -1),
}


@needs_kernels
@pytest.mark.parametrize(
    ("fault", "config"), in_turn(list(LOW_DIGITS), ["gpt2", "llama", "qk norm"])
)
def test_a_fault_in_the_low_digits_turns_a_footer_red(fault, config, monkeypatch):
    of, seen = whole(config, "packed"), Packed.quantized_input

    def other(weight, x):
        monkeypatch.setattr(weight, "digits", 1)
        high = seen(weight, x)
        monkeypatch.setattr(weight, "digits", 2)
        return LOW_DIGITS[fault](high, seen(weight, x))

    monkeypatch.setattr(Packed, "quantized_input", other)
    assert all(red(view(of)) for view in (attention, lens, dump))


# What plants a fault: called with the monkeypatch and the decoder.


def attends(change):
    """Both ways to attend get other options."""

    def plant(monkeypatch, decoder):
        for module in (compiled, nn_attention):
            changed = wrap(module, "attend", lambda attend, *x, **rest: attend(*x, **change(rest)))
            changed(monkeypatch, decoder)

    return plant


def holding(name, value, *, of):
    """The objects `of(decoder)` have another value, or `value(object)`."""

    def plant(monkeypatch, decoder):
        for one in of(decoder):
            monkeypatch.setattr(one, name, value(one) if callable(value) else value)

    return plant


def unnormalized(of):
    """The norm `of(decoder)` gives what it gets."""

    def plant(monkeypatch, decoder):
        one = of(decoder)
        call = type(one).__call__
        monkeypatch.setattr(
            type(one), "__call__", lambda self, x: x if self is one else call(self, x)
        )

    return plant


def clamps(change):
    """Neurons are multiplied by gates under other bounds, those of `change(clamp)`."""
    return wrap(mlp, "gate", lambda gate, x, y, clamp: gate(x, y, change(clamp)))


def activated(act):
    """Gates through another function."""
    return holding("act", lambda one: act, of=lambda decoder: map(ffn_of, decoder.blocks))


def second_norm_is_the_first(monkeypatch, decoder):
    first, second = decoder.blocks[1].sublayers[0][1]
    monkeypatch.setattr(second.pre_norm, "w", first.pre_norm.w)


def one_after_the_other(monkeypatch, decoder):
    first, second = decoder.blocks[0].sublayers[0][1]
    call, seen = block.Branch.__call__, {}

    def called(self, x, state, step, stream):
        if self is second:
            x = x + seen["out"].to(x.dtype)
        out = call(self, x, state, step, stream)
        if self is first:
            seen["out"] = out
        return out

    monkeypatch.setattr(block.Branch, "__call__", called)


def exchanged_matrices(monkeypatch, decoder):
    first, last = (decoder.blocks[number].mixers[0] for number in (0, 2))
    absorbed = LatentAttention._absorbed

    def exchanged(self, *x):
        mine, theirs = self.kv_up, last.kv_up if self is first else first.kv_up
        self.kv_up = theirs
        try:
            return absorbed(self, *x)
        finally:
            self.kv_up = mine

    monkeypatch.setattr(LatentAttention, "_absorbed", exchanged)


def late_keys(monkeypatch, decoder):
    write, rope = Step.write, decoder.config.layers[0].parts[0].rope

    def late(self, x, slots):
        keys = x.shape[1] == 1 and x.shape[-1] == rope.dims
        write(self, x.roll(int(self.starts[0] > 0 and keys), -1), slots)

    monkeypatch.setattr(Step, "write", late)


def share_to_the_first_key(monkeypatch, decoder):
    """What the sink takes goes to the first key: rows sum to 1 again."""

    def shifted(self, scores, heads=slice(None)):
        sink = self.sinks_H[heads].to(scores.dtype).view(-1, 1, 1)
        share = (sink - scores.logsumexp(-1, keepdim=True)).sigmoid()
        found = scores.softmax(-1) * (1 - share)
        found[..., :1] += share
        return found

    def mixed(attend):
        def planted(q, k, v, *rest, sinks_H, **more):
            added = v[:, :, :1].repeat_interleave(q.shape[1] // v.shape[1], 1)
            z = attend(q, k, v, *rest, sinks_H=sinks_H, **more)
            every = attend(q, k, torch.ones_like(v), *rest, sinks_H=sinks_H, **more)
            return z + (1 - every[..., :1]) * added

        return planted

    monkeypatch.setattr(Attention, "weights", shifted)
    for module in (compiled, nn_attention):
        monkeypatch.setattr(module, "attend", mixed(module.attend))


def unscaled_tables(monkeypatch, decoder):
    for tables in decoder._ropes.values():
        monkeypatch.setattr(tables, "config", replace(tables.config, scaling=None))
        tables._tables = torch.empty(0), torch.empty(0)  # they are made anew


def mixers(*numbers):
    return lambda decoder: [decoder.blocks[number].mixers[0] for number in numbers]


# of each fault that some families alone can have, by the view that sees it: the model that it is
# planted in, and what plants it
OF_FAMILIES = {
    attention: {
        "norms multiply by w and not by 1 plus w": ("offset norms", wrap(
            norm, "rms_norm", lambda rms, *x, offset: rms(*x))),
        "scores not capped": ("caps", attends(lambda rest: rest | {"cap": None})),
        "scores capped before they are scaled": ("caps", attends(
            lambda rest: rest | {"cap": rest["cap"] / rest["scale"]})),
        "parts not multiplied": ("multipliers", wrap(block, "scale", lambda plain, x, factor: x)),
        "queries scaled by their size and not by the models own number": (
            "layers that differ", attends(lambda rest: rest | {
                "scale": 10**-0.5 if rest["scale"] == 0.4 else rest["scale"]})),
        "queries that do not grow": ("growing queries", wrap(
            Attention, "_grown", lambda plain, self, q, positions: q)),
        "queries that grow one position early": ("growing queries", wrap(
            Attention, "_grown", lambda grown, self, q, at: grown(self, q, at + 1))),
        "latents not normalized": ("latent attention", unnormalized(
            lambda decoder: decoder.blocks[0].mixers[0].kv_norm)),
        "latents of queries not normalized": ("latent attention", unnormalized(
            lambda decoder: decoder.blocks[0].mixers[0].q_norm)),
        "another eps of latents": ("latent attention", holding(
            "config", lambda one: replace(one.config, eps=1e-4),
            of=lambda decoder: [mixer.kv_norm for mixer in mixers(0, 2)(decoder)])),
        "latents scaled without mscale": ("latent attention", holding(
            "config", lambda one: replace(one.config, scale=one.config.scale / 1.1**2),
            of=mixers(0, 2))),
        "neighbours rotated and not halves": ("latent attention", wrap(
            latent, "rotate", lambda rotate, x, cos, sin: rotate(
                torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin))),
        "no sinks": ("sinks", attends(lambda rest: rest | {"sinks_H": None})),
        "sinks scaled as scores are": ("sinks", attends(
            lambda rest: rest | {"sinks_H": rest["sinks_H"] * rest["scale"]})),
        "sinks of the next heads": ("sinks", attends(
            lambda rest: rest | {"sinks_H": rest["sinks_H"].roll(1)})),
        "the sink in the numerator too": ("sinks", share_to_the_first_key),
        "values after the norm of keys": ("values that are normalized keys", wrap(
            Attention, "_values",
            lambda values, self, v, step: values(self, self.k_norm(v), step))),
        "values not normalized": ("values that are normalized keys", unnormalized(
            lambda decoder: decoder.blocks[1].mixers[0].v_norm)),
        "keys and values of the wrong layer": ("keys and values of another layer", holding(
            "keys_of", "blocks.1.attn", of=mixers(4))),
        "results not gated": ("gated attention", wrap(
            nn_attention, "gate", lambda plain, act, z: z.clone())),
        "gates through another function": ("gated attention", wrap(
            nn_attention, "activation", lambda plain, name: activation("silu"))),
        "gates of the next heads": ("gated attention", wrap(
            Attention, "_gates",
            lambda gates, self, *x: gates(self, *x).roll(self.config.value_dim, -1))),
        "all pairs rotated": ("some pairs of whole heads rotated", unscaled_tables),
    },
    attention_of_new_tokens: {
        "positions left out where latents are mixed": ("latent attention", wrap(
            LatentAttention, "_absorbed", lambda absorbed, self, q, kept, *rest: absorbed(
                self, q, kept * (torch.arange(kept.shape[-1]) < self.config.rank), *rest))),
        "latents mixed with the matrix of another layer": ("latent attention", exchanged_matrices),
        "keys for positions kept in another order": ("latent attention", late_keys),
    },
    lens: {
        "logits not capped": ("caps", wrap(nn_decoder, "soft_cap", lambda plain, x, cap: x)),
        "logits divided and not multiplied": ("scaled ends", wrap(
            nn_decoder, "scale", lambda scale, x, factor: scale(x, 1 / factor))),
        "a block that is not scaled": ("blocks scaled by a parameter", holding(
            "factor", None, of=lambda decoder: [decoder.blocks[1]])),
    },
    dump: {
        **{name: (config, plant) for name, (config, check, plant) in OF_EXPERTS.items()
           if check != "loads"},
        "embeddings not scaled": ("offset norms", holding(
            "_embed_scale", 1.0, of=lambda decoder: [decoder])),
        "no norm after the feed forward": ("norms before and after", unnormalized(
            lambda decoder: decoder.blocks[0].sublayers[1][1][0].post_norm)),
        "both parts read the first norm": ("parallel with two norms", second_norm_is_the_first),
        "the feed forward after the attention and not beside it": (
            "parallel with one norm", one_after_the_other),
        "no correction of the choice": ("experts by groups", holding(
            "correction", None,
            of=lambda d: [b.parts[f"blocks.{i}.moe"] for i, b in enumerate(d.blocks)])),
        "a softmax of all experts": ("experts after the choice", wrap(
            experts, "weigh",
            lambda plain, logits, chosen, *_: logits.softmax(-1).gather(-1, chosen))),
        # the experts' products in the order of the tokens and not of the pairs
        "pairs of other experts": ("experts", wrap(
            experts.ExpertAssignment, "of", lambda of, chosen, *, static: replace(
                of(chosen, static=static), expert_N=chosen.reshape(-1)))),
        "neurons without the 1 that is added": ("clamped gates", clamps(
            lambda clamp: replace(clamp, offset=0.0))),
        "neurons not clamped": ("clamped gates", clamps(lambda clamp: replace(clamp, limit=1e9))),
        "neurons clamped above only": ("clamped gates", wrap(
            mlp, "gate",
            lambda gate, x, y, clamp: gate(x, y.clamp(max=clamp.limit) + clamp.offset))),
        "gates clamped below and not above": ("clamped gates", activated(
            lambda x: quick_gelu(x.clamp(min=-0.7)))),
        "gates clamped after their function": ("clamped gates", activated(
            lambda x: quick_gelu(x).clamp(max=0.7))),
        # σ(g) where σ(1.702 g) belongs
        "gates through a silu": ("clamped gates", activated(activation("silu", 0.7))),
        "embeddings for each layer not scaled": ("embeddings for each layer", holding(
            "scale", 1.0, of=lambda decoder: [decoder.per_layer])),
        "the embedding for another layer": ("embeddings for each layer", holding(
            "layer", 0, of=lambda decoder: [decoder.blocks[1].parts["blocks.1.ple"]])),
        "a projection that is not normalized": ("embeddings for each layer", unnormalized(
            lambda decoder: decoder.per_layer.norm)),
    },
}  # fmt: skip


def of_family(config, dtype):
    return random_model(MODELS[config], dtype)


ALL = [(view, name) for view, faults in OF_FAMILIES.items() for name in faults]


# each of them is seen by the same view in both
@pytest.mark.parametrize(("view", "name", "dtype"), [
    (*fault, dtype) for fault, dtype in zip(ALL, cycle((torch.float32, torch.float64)))
])
def test_a_fault_of_some_families_turns_a_footer_red(view, name, dtype, monkeypatch):
    config, plant = OF_FAMILIES[view][name]
    assert not red_without_a_fault(view, of_family, config, dtype)
    of = of_family(config, dtype)
    plant(monkeypatch, of.decoder)
    assert red(view(of))
