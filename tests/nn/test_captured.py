"""The step that a card captures, run eagerly on a processor."""

import pytest
import torch
from covers import covered
from small_models import random_decoder
from zoo import IN_BLOCKS, MODELS

from llmcli.engine.captured import compare_captured
from llmcli.engine.session import Session
from llmcli.kernels import native
from llmcli.nn.captured import bucket

PROMPTS = [[3, 9, 1], [7]]
# PyTorch computes it: products with a mask round as those of live keys alone need not
ROUNDED = {"latents of another size"}


def test_buckets_are_doubled_up_to_the_capacity():
    assert [bucket(n, 1000) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1000]
    assert bucket(3, 64) == 64
    assert [bucket(n, 11, 4) for n in (4, 5, 9)] == [4, 8, 11]


def of_small_buckets(decoder):
    decoder.first_bucket = 4
    return decoder


@pytest.mark.parametrize("name", covered(MODELS))
def test_it_computes_what_the_ordinary_step_does(name):
    """To rounding: PyTorch's products with a mask round as those of live keys alone need not."""
    decoder = of_small_buckets(random_decoder(MODELS[name], torch.float32))
    found = compare_captured(decoder, PROMPTS, 7)
    assert found.difference <= 3e-5
    assert found.graphs == 0
    assert found.buckets == (() if decoder.by_length else (8, 10))
    assert found.reason == "only a CUDA device captures its launches"
    assert not decoder.fixed_shapes


@pytest.mark.skipif(native.level() is None, reason="there are no kernels")
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_it_has_the_bits_of_the_ordinary_step_where_the_kernels_are_the_same(name):
    """Our kernels read live keys alone: neither a mask nor a bucket changes anything."""
    config, formats = IN_BLOCKS[name]
    decoder = of_small_buckets(random_decoder(config, formats=formats))
    found = compare_captured(decoder, PROMPTS, 7)
    assert found.difference <= (3e-5 if name in ROUNDED else 0)
    assert found.buckets == (8, 10)


def test_what_it_reads_may_be_a_larger_bucket_but_not_a_smaller_one(monkeypatch):
    decoder = of_small_buckets(random_decoder(MODELS["llama"]))
    assert compare_captured(decoder, PROMPTS, 7).difference < 1e-12
    monkeypatch.setattr(decoder, "_slots", lambda state, tokens: 4)
    assert compare_captured(decoder, PROMPTS, 7).difference > 1e-3


def test_a_state_that_grows_or_is_selected_is_captured_again():
    decoder = of_small_buckets(random_decoder(MODELS["llama"]))
    decoder.fixed_shapes = True
    session = Session(decoder, 1, 8)
    session.prefill([[1, 2]])
    for _ in range(3):
        session.extend(torch.tensor([[3]]))
    first = session.state.captured
    assert first.buckets == {4, 8}
    session.rewind(3)
    session.extend(torch.tensor([[3]]))
    assert session.state.captured is first
    session.grow(16)
    assert session.state.captured is None
    session.extend(torch.tensor([[3]]))
    assert session.state.captured is not None
    session.select([0, 0])
    assert session.state.captured is None
