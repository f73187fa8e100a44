"""Faults in what only some families have: offsets, caps, factors, norms after, parts side by side.

Planted in the decoder of a small model, each turns the footer of a view red, of a whole prompt or
of the tokens after it.
"""

from dataclasses import replace

import pytest
import torch
from small_models import random_model
from test_view_faults import red
from zoo import MODELS

from llmcli.nn import block
from llmcli.nn import decoder as nn_decoder
from llmcli.ops import compiled
from llmcli.parts.attention import forward as attention
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

    def one_after_the_other(self, x, state, step):
        if self is second:
            x = x + seen["out"].to(x.dtype)
        out = call(self, x, state, step)
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


@fault("some pairs of whole heads rotated")
def all_pairs_rotated(monkeypatch, decoder):
    for tables in decoder._ropes.values():
        monkeypatch.setattr(tables, "config", replace(tables.config, scaling=None))
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_a_footer_red(name, dtype, monkeypatch):
    config, plant = FAULTS[name]
    of = random_model(MODELS[config], dtype)
    assert red(of) == set(), "a sound model is green in every view"
    plant(monkeypatch, of.decoder)
    assert red(of)


def test_there_are_ten_faults():
    assert len(FAULTS) >= 10
