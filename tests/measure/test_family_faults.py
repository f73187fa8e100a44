"""Faults in what only some families have: offsets, caps, factors, norms after, parts side by side.

Planted in the decoder of a small model, each turns the footer of a view red, of a whole prompt or
of the tokens after it.
"""

from dataclasses import replace

import pytest
import torch
from blocks import ffn_of
from covers import in_turn
from small_models import random_model
from test_experts import FAULTS as OF_EXPERTS
from test_experts import instead
from test_view_faults import first_red, red_without_a_fault
from zoo import MODELS

from llmcli.decoder import block
from llmcli.decoder import decoder as nn_decoder
from llmcli.nn.step import Step
from llmcli.ops import compiled
from llmcli.ops.activations import activation, quick_gelu
from llmcli.parts import attention, experts, latent, mlp, norm
from llmcli.parts.attention import Attention
from llmcli.parts.latent import LatentAttention

# What plants a fault: called with the monkeypatch and the decoder.


def attends(change):
    """Both ways to attend get other options."""

    def plant(monkeypatch, decoder):
        for module in (compiled, attention):
            plain = module.attend
            monkeypatch.setattr(
                module, "attend", lambda *x, plain=plain, **rest: plain(*x, **change(rest))
            )

    return plant


def holding(name, value, *, of):
    """The objects `of(decoder)` have another value."""

    def plant(monkeypatch, decoder):
        for one in of(decoder):
            monkeypatch.setattr(one, name, value(one) if callable(value) else value)

    return plant


def configured(change, *, of):
    """The objects `of(decoder)` have the configuration `change(config)`."""
    return holding("config", lambda one: change(one.config), of=of)


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
    return instead(mlp, "gate", lambda gate: lambda x, y, clamp: gate(x, y, change(clamp)))


def activated(act):
    """Gates through another function."""

    def plant(monkeypatch, decoder):
        for of in decoder.blocks:
            monkeypatch.setattr(ffn_of(of), "act", act)

    return plant


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
    for module in (compiled, attention):
        monkeypatch.setattr(module, "attend", mixed(module.attend))


def unscaled_tables(monkeypatch, decoder):
    for tables in decoder._ropes.values():
        monkeypatch.setattr(tables, "config", replace(tables.config, scaling=None))
        tables._tables = torch.empty(0), torch.empty(0)  # they are made anew


def mixers(*numbers):
    return lambda decoder: [decoder.blocks[number].mixers[0] for number in numbers]


# of each fault the model that it is planted in, and what plants it
FAULTS = {name: (config, plant) for name, (config, check, plant) in OF_EXPERTS.items()
          if check != "loads"}  # fmt: skip
FAULTS |= {
    "norms multiply by w and not by 1 plus w": ("offset norms", instead(
        norm, "rms_norm", lambda rms: lambda *x, offset: rms(*x))),
    "embeddings not scaled": ("offset norms", holding(
        "_embed_scale", 1.0, of=lambda decoder: [decoder])),
    "scores not capped": ("caps", attends(lambda rest: rest | {"cap": None})),
    "scores capped before they are scaled": ("caps", attends(
        lambda rest: rest | {"cap": rest["cap"] / rest["scale"]})),
    "logits not capped": ("caps", instead(
        nn_decoder, "soft_cap", lambda plain: lambda x, cap: x)),
    "logits divided and not multiplied": ("scaled ends", instead(
        nn_decoder, "scale", lambda scale: lambda x, factor: scale(x, 1 / factor))),
    "parts not multiplied": ("multipliers", instead(
        block, "scale", lambda plain: lambda x, factor: x)),
    "no norm after the feed forward": ("norms before and after", unnormalized(
        lambda decoder: decoder.blocks[0].sublayers[1][1][0].post_norm)),
    "both parts read the first norm": ("parallel with two norms", second_norm_is_the_first),
    "the feed forward after the attention and not beside it": (
        "parallel with one norm", one_after_the_other),
    "queries scaled by their size and not by the models own number": (
        "layers that differ", attends(lambda rest: rest | {
            "scale": 10**-0.5 if rest["scale"] == 0.4 else rest["scale"]})),
    "queries that do not grow": ("growing queries", instead(
        Attention, "_grown", lambda plain: lambda self, q, positions: q)),
    "queries that grow one position early": ("growing queries", instead(
        Attention, "_grown", lambda grown: lambda self, q, at: grown(self, q, at + 1))),
    "no correction of the choice": ("experts by groups", holding(
        "correction", None,
        of=lambda d: [b.parts[f"blocks.{i}.moe"] for i, b in enumerate(d.blocks)])),
    "a softmax of all experts": ("experts after the choice", instead(
        experts, "weigh",
        lambda plain: lambda logits, chosen, *_: logits.softmax(-1).gather(-1, chosen))),
    # the experts' products in the order of the tokens and not of the pairs
    "pairs of other experts": ("experts", instead(
        experts.ExpertAssignment, "of", lambda of: lambda chosen, *, static: replace(
            of(chosen, static=static), expert_N=chosen.reshape(-1)))),
    "latents not normalized": ("latent attention", unnormalized(
        lambda decoder: decoder.blocks[0].mixers[0].kv_norm)),
    "latents of queries not normalized": ("latent attention", unnormalized(
        lambda decoder: decoder.blocks[0].mixers[0].q_norm)),
    "another eps of latents": ("latent attention", configured(
        lambda config: replace(config, eps=1e-4),
        of=lambda decoder: [mixer.kv_norm for mixer in mixers(0, 2)(decoder)])),
    "latents scaled without mscale": ("latent attention", configured(
        lambda config: replace(config, scale=config.scale / 1.1**2), of=mixers(0, 2))),
    "neighbours rotated and not halves": ("latent attention", instead(
        latent, "rotate", lambda rotate: lambda x, cos, sin: rotate(
            torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin))),
    "positions left out where latents are mixed": ("latent attention", instead(
        LatentAttention, "_absorbed", lambda absorbed: lambda self, q, kept, *rest: absorbed(
            self, q, kept * (torch.arange(kept.shape[-1]) < self.config.rank), *rest))),
    "latents mixed with the matrix of another layer": ("latent attention", exchanged_matrices),
    "keys for positions kept in another order": ("latent attention", late_keys),
    "no sinks": ("sinks", attends(lambda rest: rest | {"sinks_H": None})),
    "sinks scaled as scores are": ("sinks", attends(
        lambda rest: rest | {"sinks_H": rest["sinks_H"] * rest["scale"]})),
    "sinks of the next heads": ("sinks", attends(
        lambda rest: rest | {"sinks_H": rest["sinks_H"].roll(1)})),
    "the sink in the numerator too": ("sinks", share_to_the_first_key),
    "neurons without the 1 that is added": ("clamped gates", clamps(
        lambda clamp: replace(clamp, offset=0.0))),
    "neurons not clamped": ("clamped gates", clamps(lambda clamp: replace(clamp, limit=1e9))),
    "neurons clamped above only": ("clamped gates", instead(
        mlp, "gate",
        lambda gate: lambda x, y, clamp: gate(x, y.clamp(max=clamp.limit) + clamp.offset))),
    "gates clamped below and not above": ("clamped gates", activated(
        lambda x: quick_gelu(x.clamp(min=-0.7)))),
    "gates clamped after their function": ("clamped gates", activated(
        lambda x: quick_gelu(x).clamp(max=0.7))),
    # σ(g) where σ(1.702 g) belongs
    "gates through a silu": ("clamped gates", activated(activation("silu", 0.7))),
    "values after the norm of keys": ("values that are normalized keys", instead(
        Attention, "_values",
        lambda values: lambda self, v, step: values(self, self.k_norm(v), step))),
    "values not normalized": ("values that are normalized keys", unnormalized(
        lambda decoder: decoder.blocks[1].mixers[0].v_norm)),
    "keys and values of the wrong layer": ("keys and values of another layer", holding(
        "keys_of", "blocks.1.attn", of=mixers(4))),
    "results not gated": ("gated attention", instead(
        attention, "gate", lambda plain: lambda act, z: z.clone())),
    "gates through another function": ("gated attention", instead(
        attention, "activation", lambda plain: lambda name: activation("silu"))),
    "gates of the next heads": ("gated attention", instead(
        Attention, "_gates",
        lambda gates: lambda self, *x: gates(self, *x).roll(self.config.value_dim, -1))),
    "all pairs rotated": ("some pairs of whole heads rotated", unscaled_tables),
    "embeddings for each layer not scaled": ("embeddings for each layer", holding(
        "scale", 1.0, of=lambda decoder: [decoder.per_layer])),
    "the embedding for another layer": ("embeddings for each layer", holding(
        "layer", 0, of=lambda decoder: [decoder.blocks[1].parts["blocks.1.ple"]])),
    "a projection that is not normalized": ("embeddings for each layer", unnormalized(
        lambda decoder: decoder.per_layer.norm)),
    "a block that is not scaled": ("blocks scaled by a parameter", holding(
        "factor", None, of=lambda decoder: [decoder.blocks[1]])),
}  # fmt: skip


def whole(config, dtype):
    return random_model(MODELS[config], dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(FAULTS), [torch.float32, torch.float64])
)
def test_a_fault_turns_a_footer_red(name, dtype, monkeypatch):
    config, plant = FAULTS[name]
    of = whole(config, dtype)
    with monkeypatch.context() as patch:
        plant(patch, of.decoder)
        first = first_red(of)
    assert first is not None
    assert not red_without_a_fault(first, whole, config, dtype)
