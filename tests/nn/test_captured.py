"""The step that a card captures, run eagerly on a processor; on a stand-in for a card it is in
`gpu/test_gate`, on a card in `test_gpu`.
"""

import pytest
import torch
from covers import KINDS
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import random_decoder
from zoo import IN_BLOCKS, MODELS

from llmcli.commands.selftest.measure.arithmetic import compare_captured
from llmcli.decoder.decoder import Decoder
from llmcli.decoder.steps import bucket
from llmcli.engine.session import Session
from llmcli.graph.precision import Precision
from llmcli.kernels import native

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


@pytest.mark.parametrize(("name", "packed"), [
    *((name, False) for name in KINDS),
    *(pytest.param(name, True, marks=needs_kernels) for name in IN_BLOCKS),
])  # fmt: skip
def test_it_computes_what_the_ordinary_step_does(name, packed):
    """Bit for bit where the kernels are the same: ours read live keys alone, so neither a mask nor
    a bucket changes anything.
    """
    plain = packed_model(name).decoder if packed else random_decoder(MODELS[name], torch.float32)
    decoder = of_small_buckets(plain)
    difference, graphs = compare_captured(decoder, PROMPTS, 7)
    allowed = 0.0 if packed and name not in ROUNDED else 3e-5
    if packed and native.level() == "portable":  # there PyTorch attends to prompts, for any heads
        allowed = 1e-3
    assert difference <= allowed
    assert graphs == ()  # it is not recorded either
    assert not decoder.fixed_shapes


def test_what_it_reads_may_be_a_larger_bucket_but_not_a_smaller_one(monkeypatch):
    decoder = of_small_buckets(random_decoder(MODELS["llama"]))
    assert compare_captured(decoder, PROMPTS, 7)[0] < 1e-12
    monkeypatch.setattr(decoder, "_slots", lambda state, tokens: 4)
    assert compare_captured(decoder, PROMPTS, 7)[0] > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_the_lengths_on_the_device_follow_those_of_the_host(name, monkeypatch):
    decoder = random_decoder(MODELS[name])
    with monkeypatch.context() as as_on_a_card:
        as_on_a_card.setattr(decoder, "fixed_shapes", True)
        session = Session(decoder, 2, 20)
    kept = session.state.lengths_B

    def same():
        return session.state.lengths_B.tolist() == session.lengths

    session.prefill([[1, 2, 3], [4]])
    assert same()
    saved = session.snapshot()
    for step in (
        lambda: session.extend([[5], [6]]),
        lambda: session.extend([[5, 7], [6]]),
        lambda: session.rewind(1 if session.state.rewinds else 0),
        lambda: session.restore(saved),
    ):
        step()
        assert same()
        assert session.state.lengths_B is kept  # a captured step reads this memory
    session.select([1, 0, 1])
    assert session.lengths == [1, 3, 1]
    assert same()
    session.extend([[9], [8], [7]])
    alone = Session(decoder, 1, 20)
    alone.extend([session.ids[2]])
    torch.testing.assert_close(session.logits_BV[2], alone.logits_BV[0], rtol=0, atol=1e-9)


def test_without_a_card_it_is_off():
    assert not Decoder(MODELS["llama"], Precision.of("float32"), device="meta").fixed_shapes
