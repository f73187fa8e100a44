"""What the machine offers beyond the decoder, compared with the decoder's own step."""

import pytest
import torch
from ladder_models import random_weights

from llmcli.commands.ladder.measure import beyond as variants
from llmcli.commands.ladder.measure.beyond import Int8Linear, beyond
from llmcli.commands.ladder.measure.workload import plan_workload
from llmcli.formats.dense import Dense
from llmcli.nn.linear import Linear


def compared(monkeypatch, weights, *names, others=()):
    """Those of the variants, by name."""
    kept = tuple(maker for maker in variants._MAKERS if maker[0] in names)
    monkeypatch.setattr(variants, "_MAKERS", (*kept, *others))
    run = plan_workload(weights, [5, 9, 2, 7], more=1, sequences=1, rounds=1)
    return {variant.name: variant for variant in beyond(weights, run)}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_fewer_bits_are_near_and_said_to_be_off_and_the_decoder_is_as_it_was(kind, monkeypatch):
    weights, ids = random_weights(kind), torch.tensor([[5, 9, 2, 7]])
    before = weights.decoder(ids)
    rest = {maker[0] for maker in variants._MAKERS} - {"compiled"}
    found = compared(monkeypatch, weights, *rest)
    assert torch.equal(weights.decoder(ids), before)
    assert type(weights.decoder.blocks[0].mixers[0].qkv) is Linear
    assert found["decoder"].difference == found["decoder"].divergence == 0
    assert found["decoder"].speedup == 1
    for name in ("bfloat16", "int8"):
        assert found[name].missing is None
        assert 0 < found[name].difference < 1
        assert 0 <= found[name].divergence < 0.05
    assert found["bfloat16"].divergence < found["int8"].divergence or kind == "gpt2"
    if not torch.cuda.is_available():
        assert found["CUDA graph"].missing == "needs a CUDA device"
        assert found["CUDA graph"].token_s is None


@pytest.mark.machine  # it takes a C++ compiler, and a minute
def test_a_compiled_step_is_the_same_step(monkeypatch):
    found = compared(monkeypatch, random_weights("llama"), "decoder", "compiled")["compiled"]
    if found.missing is not None:
        pytest.skip(f"no compiler here: {found.missing}")
    assert found.difference < 1e-4
    assert found.same_token


def test_what_cannot_be_built_says_why(monkeypatch):
    def broken(decoder, run):
        raise RuntimeError("no such kernel\nand a long story")

    odd = ("odd", "nothing", broken)
    found = compared(monkeypatch, random_weights("gpt2"), "decoder", others=[odd])
    assert found["odd"].missing == "no such kernel"


def test_int8_rounds_to_half_a_step_of_each_row():
    linear = object.__new__(Linear)
    draw = torch.Generator().manual_seed(1)
    linear.weight = Dense(torch.randn(32, 64, generator=draw).bfloat16())
    linear.weight.tensor[3] = 0  # a row of zeros has no scale of its own
    linear.bias, linear.rows = None, [32]
    packed = Int8Linear(linear)
    wide = linear.weight.dense(torch.float32)
    step = wide.abs().amax(1, keepdim=True) / 127
    back = packed.packed.float() * step
    assert (back - wide).abs().le(step * 0.5 + 1e-7).all()
    assert packed.packed.abs().max() == 127
    x = torch.randn(2, 3, 64, generator=draw).bfloat16()
    y = packed(x)
    assert y.shape == (2, 3, 32)
    torch.testing.assert_close(y.float(), x.float() @ back.t(), rtol=0.03, atol=0.1)
    assert (y[..., 3] == 0).all()
