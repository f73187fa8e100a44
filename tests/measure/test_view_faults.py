"""Every view proves itself: faults planted in the decoder turn the footer of one of them red.

Each view is asked alone, with nothing but its own checks. Between them they have to see all.
"""

from functools import cache

import pytest
import torch
from blocks import ffn_of, norm_of
from covers import in_turn
from decoder_faults import FAULTS, model
from decoder_parameters import Times
from needs import needs_kernels
from small_models import as_model, ids

from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.commands.dump.measure import measure_dump, plan_dump
from llmcli.commands.lens.measure import measure_lens
from llmcli.graph.names import Names
from llmcli.inspect.passes import Passes
from llmcli.parts import attention as nn_attention
from llmcli.weights.packed import Packed

ARITHMETIC = [
    torch.float32, torch.float16, torch.bfloat16, pytest.param("packed", marks=needs_kernels)
]  # fmt: skip
PROMPT = tuple(ids(1, 9)[0].tolist())
# what only a view of the whole model can see: `attention` shows the way from a layer's norm to
# what it adds to the stream, `lens` the stream and what is made of it, `dump` what it is asked for
OUTSIDE_ATTENTION = {
    "no bias in the feed forward", "another gelu", "learned positions from one",
    "feed forward of t3 and not of t4", "gate and up exchanged", "tied head in another order",
    "no residual around attention", "stream rounded to 16 bits", "stream kept in 16 bits",
}  # fmt: skip

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


def dump(of, generate=0):
    plan = plan_dump(of, Names(of.config).select("*"), len(PROMPT) + generate)
    return measure_dump(Passes(of, PROMPT, generate), plan).checks


def dump_of_new_tokens(of):
    return dump(of, generate=3)


VIEWS = (attention, attention_of_new_tokens, lens, dump, dump_of_new_tokens)


def red(view, of):
    return not all(check.ok for check in view(of))


def first_red(of):
    """The first view whose footer is red, None where none is."""
    return next((view for view in VIEWS if red(view, of)), None)


@cache
def red_without_a_fault(view, make, config, dtype):
    """Asked once of a view and a model, for all faults."""
    return red(view, make(config, dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(FAULTS), [torch.float64, *ARITHMETIC])
)
def test_a_fault_turns_a_footer_red(name, dtype, monkeypatch):
    config, plant = FAULTS[name]
    of = model(config, dtype)
    with monkeypatch.context() as patch:
        plant(patch, of)
        first = first_red(as_model(of.decoder))
    assert (first is None) == (name in BELOW_16_BITS.get(dtype, ()))
    assert first in (None, attention, attention_of_new_tokens) or name in OUTSIDE_ATTENTION
    assert first is None or not red_without_a_fault(first, whole, config, dtype)


def scaled(monkeypatch, of, by):
    attend = nn_attention.attend
    monkeypatch.setattr(
        nn_attention, "attend", lambda *qkv, scale, **mask: attend(*qkv, scale=scale * by, **mask)
    )


def one_head(monkeypatch, of, by):
    attend = nn_attention.attend

    def larger(*qkv, **rest):
        z = attend(*qkv, **rest)
        return torch.cat((z[:, :1], z[:, 1:2] * by, z[:, 2:]), 1)

    monkeypatch.setattr(nn_attention, "attend", larger)


def first_norm(monkeypatch, of, by):
    norm = norm_of(of.decoder.blocks[-1], 1)
    monkeypatch.setattr(norm, "w", norm.w * by)


def product(part):
    """Plants a factor of a weight of the last block, `part(block)`."""

    def plant(monkeypatch, of, by):
        linear = part(of.decoder.blocks[-1])
        monkeypatch.setattr(linear, "weight", Times(linear.weight, by))

    return plant


projection = product(lambda block: block.mixers[0].qkv)
output = product(lambda block: block.mixers[0].out)
feed_forward = product(lambda block: ffn_of(block).down)
# how far a factor may be off before it is seen: what is next to 1 in bfloat16 is 1.0078
SMALL = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 0.01, "packed": 1e-3}


SMALL_FAULTS = [
    pytest.param(plant, config)
    for plant in (scaled, one_head, projection, output, first_norm, feed_forward)
    for config in ("gpt2", "llama", "keys of their own", "qk norm", "window")
]


@pytest.mark.parametrize(
    ("plant", "config", "dtype", "sign"), in_turn(SMALL_FAULTS, list(ARITHMETIC), [1, -1])
)
def test_a_small_fault_turns_a_footer_red(plant, config, dtype, sign, monkeypatch):
    of = whole(config, dtype)
    plant(monkeypatch, of, 1 + sign * SMALL[dtype])
    view = dump if plant is feed_forward else attention
    assert red(view, of)


# what a product may make of the low digits of its activations: of the results of `quantized_input`,
# rounded to 8 bits and to 16
LOW_DIGITS = {
    "left out": lambda high, both: high,
    "negated": lambda high, both: 2 * high - both,
    "doubled": lambda high, both: 2 * both - high,
    "of the column beside": lambda high, both: high + (both - high).roll(1, -1),
}


@needs_kernels
@pytest.mark.parametrize("fault", LOW_DIGITS)
@pytest.mark.parametrize("config", ["gpt2", "llama", "qk norm"])
def test_a_fault_in_the_low_digits_turns_a_footer_red(fault, config, monkeypatch):
    of, seen = whole(config, "packed"), Packed.quantized_input

    def other(weight, x):
        monkeypatch.setattr(weight, "digits", 1)
        high = seen(weight, x)
        monkeypatch.setattr(weight, "digits", 2)
        return LOW_DIGITS[fault](high, seen(weight, x))

    monkeypatch.setattr(Packed, "quantized_input", other)
    assert all(red(view, of) for view in (attention, lens, dump))
