"""Faults in what only some families have: offsets, caps, factors, norms after, parts side by side.

Planted in the decoder of a small model, each turns the footer of a view red, of a whole prompt or
of the tokens after it.
"""

import dataclasses
from functools import cache

import pytest
import torch
from blocks import ffn_of
from covers import in_turn
from small_models import random_model
from test_view_faults import red, reds
from zoo import MODELS

from llmcli.nn import block
from llmcli.nn import decoder as nn_decoder
from llmcli.nn.step import Step
from llmcli.ops import compiled
from llmcli.ops.activations import activation, quick_gelu
from llmcli.parts.attention import forward as attention
from llmcli.parts.experts import forward as experts
from llmcli.parts.latent import forward as latent
from llmcli.parts.mlp import forward as mlp
from llmcli.parts.norm import forward as norm

FAULTS = {}


def fault(config):
    """Registers what plants a fault in the decoder of the model `config`."""

    def register(plant):
        FAULTS[plant.__name__.replace("_", " ")] = (config, plant)
        return plant

    return register


def attends(monkeypatch, change):
    """Both ways to attend get other options."""
    one, many = compiled.attend, attention.attend
    monkeypatch.setattr(compiled, "attend", lambda *x, **rest: one(*x, **change(rest)))
    monkeypatch.setattr(attention, "attend", lambda *x, **rest: many(*x, **change(rest)))


@fault("offset norms")
def norms_multiply_by_w_and_not_by_1_plus_w(monkeypatch, decoder):
    rms = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda *x, offset: rms(*x))


@fault("offset norms")
def embeddings_not_scaled(monkeypatch, decoder):
    monkeypatch.setattr(decoder, "_embed_scale", 1.0)


@fault("caps")
def scores_not_capped(monkeypatch, decoder):
    attends(monkeypatch, lambda rest: rest | {"cap": None})


@fault("caps")
def scores_capped_before_they_are_scaled(monkeypatch, decoder):
    attends(monkeypatch, lambda rest: rest | {"cap": rest["cap"] / rest["scale"]})


@fault("caps")
def logits_not_capped(monkeypatch, decoder):
    monkeypatch.setattr(nn_decoder, "soft_cap", lambda x, cap: x)


@fault("scaled ends")
def logits_divided_and_not_multiplied(monkeypatch, decoder):
    scale = nn_decoder.scale
    monkeypatch.setattr(nn_decoder, "scale", lambda x, factor: scale(x, 1 / factor))


@fault("multipliers")
def parts_not_multiplied(monkeypatch, decoder):
    monkeypatch.setattr(block, "scale", lambda x, factor: x)


@fault("norms before and after")
def no_norm_after_the_feed_forward(monkeypatch, decoder):
    after = decoder.blocks[0].sublayers[1][1][0].post_norm
    call = type(after).__call__
    monkeypatch.setattr(
        type(after), "__call__", lambda self, x: x if self is after else call(self, x)
    )


@fault("parallel with two norms")
def both_parts_read_the_first_norm(monkeypatch, decoder):
    first, second = decoder.blocks[1].sublayers[0][1]
    monkeypatch.setattr(second.pre_norm, "w", first.pre_norm.w)


@fault("parallel with one norm")
def the_feed_forward_after_the_attention_and_not_beside_it(monkeypatch, decoder):
    first, second = decoder.blocks[0].sublayers[0][1]
    call, seen = block.Branch.__call__, {}

    def one_after_the_other(self, x, state, step, stream):
        if self is second:
            x = x + seen["out"].to(x.dtype)
        out = call(self, x, state, step, stream)
        if self is first:
            seen["out"] = out
        return out

    monkeypatch.setattr(block.Branch, "__call__", one_after_the_other)


@fault("layers that differ")
def queries_scaled_by_their_size_and_not_by_the_models_own_number(monkeypatch, decoder):
    attends(
        monkeypatch,
        lambda rest: rest | {"scale": 10**-0.5 if rest["scale"] == 0.4 else rest["scale"]},
    )


@fault("growing queries")
def queries_that_do_not_grow(monkeypatch, decoder):
    monkeypatch.setattr(attention.Attention, "_grown", lambda self, q, positions: q)


@fault("growing queries")
def queries_that_grow_one_position_early(monkeypatch, decoder):
    grown = attention.Attention._grown
    monkeypatch.setattr(attention.Attention, "_grown", lambda self, q, at: grown(self, q, at + 1))


@fault("experts")
def weights_of_experts_not_renormalized(monkeypatch, decoder):
    weigh = experts.weigh
    monkeypatch.setattr(
        experts, "weigh", lambda *x: weigh(*x[:2], dataclasses.replace(x[2], renormalized=False))
    )


@fault("experts")
def one_expert_more_than_is_chosen(monkeypatch, decoder):
    """The second choice of each token is the one behind it."""
    choose = experts.choose

    def other(scores, correction, routing):
        chosen = choose(scores, correction, dataclasses.replace(routing, chosen=3))
        return chosen[..., [0, 2]]

    monkeypatch.setattr(experts, "choose", other)


@fault("experts by groups")
def corrected_scores_weigh(monkeypatch, decoder):
    weigh, part = experts.weigh, decoder.blocks[0].parts["blocks.0.moe"]
    monkeypatch.setattr(
        experts, "weigh", lambda scores, *rest: weigh(scores + part.correction, *rest)
    )


@fault("experts by groups")
def no_correction_of_the_choice(monkeypatch, decoder):
    for i, block_ in enumerate(decoder.blocks):
        part = block_.parts[f"blocks.{i}.moe"]
        monkeypatch.setattr(part, "correction", None)


@fault("experts by groups")
def chosen_of_all_groups(monkeypatch, decoder):
    choose = experts.choose
    monkeypatch.setattr(
        experts, "choose", lambda *x: choose(*x[:2], dataclasses.replace(x[2], groups=1))
    )


@fault("experts by groups")
def weights_not_scaled(monkeypatch, decoder):
    weigh = experts.weigh
    monkeypatch.setattr(
        experts, "weigh", lambda *x: weigh(*x[:2], dataclasses.replace(x[2], scale=1.0))
    )


@fault("experts beside dense layers")
def all_of_the_shared_expert(monkeypatch, decoder):
    share = experts.share
    monkeypatch.setattr(
        experts, "share",
        lambda x, sigmoid: torch.ones_like(x) if x.shape[-1] == 1 else share(x, sigmoid=sigmoid),
    )


@fault("experts beside dense layers")
def no_shared_expert(monkeypatch, decoder):
    part = decoder.blocks[1].parts["blocks.1.moe"]
    call = part.shared
    monkeypatch.setattr(part, "shared", lambda *x: torch.zeros_like(call(*x)))


@fault("experts after the choice")
def a_softmax_of_all_experts(monkeypatch, decoder):
    monkeypatch.setattr(
        experts, "weigh", lambda logits, chosen, *_: logits.softmax(-1).gather(-1, chosen)
    )


@fault("experts")
def pairs_of_other_experts(monkeypatch, decoder):
    """The experts' products in the order of the tokens and not of the pairs."""
    of = experts.Routes.of

    def other(chosen, *, static):
        routes = of(chosen, static=static)
        return dataclasses.replace(routes, expert_N=chosen.reshape(-1))

    monkeypatch.setattr(experts.Routes, "of", other)


@fault("latent attention")
def latents_not_normalized(monkeypatch, decoder):
    norm_ = decoder.blocks[0].mixers[0].kv_norm
    monkeypatch.setattr(type(norm_), "__call__", unless(norm_, lambda x: x))


@fault("latent attention")
def latents_of_queries_not_normalized(monkeypatch, decoder):
    norm_ = decoder.blocks[0].mixers[0].q_norm
    monkeypatch.setattr(type(norm_), "__call__", unless(norm_, lambda x: x))


@fault("latent attention")
def another_eps_of_latents(monkeypatch, decoder):
    for number in (0, 2):
        norm_ = decoder.blocks[number].mixers[0].kv_norm
        monkeypatch.setattr(norm_, "config", dataclasses.replace(norm_.config, eps=1e-4))


@fault("latent attention")
def latents_scaled_without_mscale(monkeypatch, decoder):
    for number in (0, 2):
        mixer = decoder.blocks[number].mixers[0]
        other = dataclasses.replace(mixer.config, scale=mixer.config.scale / 1.1**2)
        monkeypatch.setattr(mixer, "config", other)


@fault("latent attention")
def neighbours_rotated_and_not_halves(monkeypatch, decoder):
    rotate = latent.rotate
    monkeypatch.setattr(
        latent, "rotate",
        lambda x, cos, sin: rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin),
    )


@fault("latent attention")
def positions_left_out_where_latents_are_mixed(monkeypatch, decoder):
    absorbed = latent.LatentAttention._absorbed
    monkeypatch.setattr(
        latent.LatentAttention, "_absorbed",
        lambda self, q, kept, *rest: absorbed(
            self, q, kept * (torch.arange(kept.shape[-1]) < self.config.rank), *rest
        ),
    )


@fault("latent attention")
def latents_mixed_with_the_matrix_of_another_layer(monkeypatch, decoder):
    first, last = (decoder.blocks[number].mixers[0] for number in (0, 2))
    absorbed = latent.LatentAttention._absorbed

    def exchanged(self, *x):
        mine, theirs = self.kv_up, last.kv_up if self is first else first.kv_up
        self.kv_up = theirs
        try:
            return absorbed(self, *x)
        finally:
            self.kv_up = mine

    monkeypatch.setattr(latent.LatentAttention, "_absorbed", exchanged)


@fault("latent attention")
def keys_for_positions_kept_in_another_order(monkeypatch, decoder):
    write, rope = Step.write, decoder.config.layers[0].parts[0].rope

    def late(self, x, slots):
        keys = x.shape[1] == 1 and x.shape[-1] == rope.dims
        write(self, x.roll(int(self.starts[0] > 0 and keys), -1), slots)

    monkeypatch.setattr(Step, "write", late)


def unless(one, instead):
    """Calls of all but `one`, which is replaced."""
    call = type(one).__call__
    return lambda self, x: instead(x) if self is one else call(self, x)


@fault("sinks")
def no_sinks(monkeypatch, decoder):
    attends(monkeypatch, lambda rest: rest | {"sinks_H": None})


@fault("sinks")
def sinks_scaled_as_scores_are(monkeypatch, decoder):
    attends(monkeypatch, lambda rest: rest | {"sinks_H": rest["sinks_H"] * rest["scale"]})


@fault("sinks")
def sinks_of_the_next_heads(monkeypatch, decoder):
    attends(monkeypatch, lambda rest: rest | {"sinks_H": rest["sinks_H"].roll(1)})


@fault("sinks")
def the_sink_in_the_numerator_too(monkeypatch, decoder):
    """What it takes goes to the first key: rows sum to 1 again."""
    monkeypatch.setattr(attention.Attention, "weights", _shifted)
    one, many = compiled.attend, attention.attend

    def mixed(attend):
        def planted(q, k, v, *rest, sinks_H, **more):
            added = v[:, :, :1].repeat_interleave(q.shape[1] // v.shape[1], 1)
            z = attend(q, k, v, *rest, sinks_H=sinks_H, **more)
            every = attend(q, k, torch.ones_like(v), *rest, sinks_H=sinks_H, **more)
            return z + (1 - every[..., :1]) * added

        return planted

    monkeypatch.setattr(compiled, "attend", mixed(one))
    monkeypatch.setattr(attention, "attend", mixed(many))


def _shifted(self, scores, heads=slice(None)):
    """Weights with the sink's share given to the first key."""
    sink = self.sinks_H[heads].to(scores.dtype).view(-1, 1, 1)
    share = (sink - scores.logsumexp(-1, keepdim=True)).sigmoid()
    found = scores.softmax(-1) * (1 - share)
    found[..., :1] += share
    return found


def clamps(monkeypatch, change):
    """Neurons are multiplied by gates under other bounds, those of `change(clamp)`."""
    gate = mlp.gate
    monkeypatch.setattr(mlp, "gate", lambda x, y, clamp: gate(x, y, change(clamp)))


@fault("clamped gates")
def neurons_without_the_1_that_is_added(monkeypatch, decoder):
    clamps(monkeypatch, lambda clamp: dataclasses.replace(clamp, offset=0.0))


@fault("clamped gates")
def neurons_not_clamped(monkeypatch, decoder):
    clamps(monkeypatch, lambda clamp: dataclasses.replace(clamp, limit=1e9))


@fault("clamped gates")
def neurons_clamped_above_only(monkeypatch, decoder):
    gate = mlp.gate
    monkeypatch.setattr(
        mlp, "gate", lambda x, y, clamp: gate(x, y.clamp(max=clamp.limit) + clamp.offset)
    )


@fault("clamped gates")
def gates_clamped_below_and_not_above(monkeypatch, decoder):
    for of in decoder.blocks:
        monkeypatch.setattr(ffn_of(of), "act", lambda x: quick_gelu(x.clamp(min=-0.7)))


@fault("clamped gates")
def gates_clamped_after_their_function(monkeypatch, decoder):
    for of in decoder.blocks:
        monkeypatch.setattr(ffn_of(of), "act", lambda x: quick_gelu(x).clamp(max=0.7))


@fault("clamped gates")
def gates_through_a_silu(monkeypatch, decoder):
    """σ(g) where σ(1.702 g) belongs."""
    for of in decoder.blocks:
        monkeypatch.setattr(ffn_of(of), "act", activation("silu", 0.7))


def unnormalized(monkeypatch, norm):
    call = type(norm).__call__
    monkeypatch.setattr(
        type(norm), "__call__", lambda self, x: x if self is norm else call(self, x)
    )


@fault("values that are normalized keys")
def values_after_the_norm_of_keys(monkeypatch, decoder):
    values = attention.Attention._values
    monkeypatch.setattr(
        attention.Attention, "_values", lambda self, v, step: values(self, self.k_norm(v), step)
    )


@fault("values that are normalized keys")
def values_not_normalized(monkeypatch, decoder):
    unnormalized(monkeypatch, decoder.blocks[1].mixers[0].v_norm)


@fault("keys and values of another layer")
def keys_and_values_of_the_wrong_layer(monkeypatch, decoder):
    monkeypatch.setattr(decoder.blocks[4].mixers[0], "keys_of", "blocks.1.attn")


@fault("gated attention")
def results_not_gated(monkeypatch, decoder):
    monkeypatch.setattr(attention, "gate", lambda act, z: z.clone())


@fault("gated attention")
def gates_through_another_function(monkeypatch, decoder):
    monkeypatch.setattr(attention, "activation", lambda name: activation("silu"))


@fault("gated attention")
def gates_of_the_next_heads(monkeypatch, decoder):
    gates = attention.Attention._gates

    def rolled(self, raw, step):
        found = gates(self, raw, step)
        return found.roll(self.config.value_dim, -1)

    monkeypatch.setattr(attention.Attention, "_gates", rolled)


@fault("some pairs of whole heads rotated")
def all_pairs_rotated(monkeypatch, decoder):
    for tables in decoder._ropes.values():
        monkeypatch.setattr(tables, "config", dataclasses.replace(tables.config, scaling=None))
        tables._tables = torch.empty(0), torch.empty(0)  # they are made anew


@fault("embeddings for each layer")
def embeddings_for_each_layer_not_scaled(monkeypatch, decoder):
    monkeypatch.setattr(decoder.per_layer, "scale", 1.0)


@fault("embeddings for each layer")
def the_embedding_for_another_layer(monkeypatch, decoder):
    monkeypatch.setattr(decoder.blocks[1].parts["blocks.1.ple"], "layer", 0)


@fault("embeddings for each layer")
def a_projection_that_is_not_normalized(monkeypatch, decoder):
    unnormalized(monkeypatch, decoder.per_layer.norm)


@fault("blocks scaled by a parameter")
def a_block_that_is_not_scaled(monkeypatch, decoder):
    monkeypatch.setattr(decoder.blocks[1], "factor", None)


@cache
def red_in_a_sound_model(config, dtype):
    """What is red before anything is planted: asked once of each model, for all of its faults."""
    return red(random_model(MODELS[config], dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(FAULTS), [torch.float32, torch.float64])
)
def test_a_fault_turns_a_footer_red(name, dtype, monkeypatch):
    config, plant = FAULTS[name]
    assert red_in_a_sound_model(config, dtype) == set()
    of = random_model(MODELS[config], dtype)
    plant(monkeypatch, of.decoder)
    assert any(reds(of))


def test_there_are_ten_faults():
    assert len(FAULTS) >= 10
