"""Latent attention: both ways from latents to results agree, and what is kept is small."""

import dataclasses

import pytest
import torch
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import random_decoder, random_model
from zoo import IN_BLOCKS, VOCAB, latent, llama

from llmcli.config.latent import LatentConfig
from llmcli.engine.session import Session
from llmcli.errors import UsageError
from llmcli.graph.graph import graph
from llmcli.graph.precision import matrices, resolve_precision
from llmcli.graph.spec import Call
from llmcli.nn.step import Edit
from llmcli.ops import compiled, heads

MODEL = llama(latent(), latent(query_rank=None, bias=True))
IDS = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def part(**changes):
    return dataclasses.replace(latent().parts[0], **changes)


def read(decoder, calls):
    """Log-probabilities of calls of so many tokens, through a cache."""
    state, found = decoder.new_state(2, 20), []
    for ids in IDS.split(calls, 1):
        found.append(decoder(ids, state).log_softmax(-1))
    return torch.cat(found, 1)


@pytest.mark.parametrize("calls", [[12], [5, 7], [1] * 12, [9, 1, 2]])
def test_both_ways_agree(calls, monkeypatch):
    decoder = random_decoder(MODEL)
    right = decoder(IDS).log_softmax(-1)
    for absorbs in (True, False):
        monkeypatch.setattr(LatentConfig, "absorbs", lambda self, tokens, keys, way=absorbs: way)
        torch.testing.assert_close(read(decoder, calls), right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("absorbs", [True, False])
def test_both_ways_take_rows_of_other_lengths(absorbs, monkeypatch):
    decoder = random_decoder(MODEL)
    alone = [decoder(IDS[row : row + 1]) for row in range(2)]
    monkeypatch.setattr(LatentConfig, "absorbs", lambda self, tokens, keys: absorbs)
    session = Session(decoder, 2, 16)
    rows = IDS.tolist()
    session.extend([rows[0][:9], rows[1][:4]])
    session.extend([rows[0][9:], rows[1][4:6]])
    for row, last in ((0, 11), (1, 5)):
        torch.testing.assert_close(
            session.logits_BV[row], alone[row][0, last], rtol=1e-10, atol=1e-10
        )


def test_whichever_multiplies_less():
    """Of a prompt keys and values are shared by its queries; a step has one query."""
    large = part(heads=16, content=128, value_dim=128, rank=512)
    assert not large.absorbs(512, 512)
    assert not large.absorbs(512, 4096)
    assert large.absorbs(1, 1)
    assert large.absorbs(1, 4096)
    assert large.absorbs(8, 4096)
    for tokens, keys in ((3, 3), (7, 900), (200, 1000), (700, 1000)):
        way = large.absorbs(tokens, keys)
        pair = 2 * 512 + 4 if way else 128 + 4 + 128
        turned = 512 * (128 + 128) * (tokens if way else keys)
        other = 512 * 256 * (keys if way else tokens) + tokens * keys * (
            128 + 4 + 128 if way else 2 * 512 + 4
        )
        flops, each = large.flops(tokens, keys)
        assert flops == 2 * 16 * (turned + tokens * keys * pair)
        assert each == 2 * 16 * pair
        assert flops <= 2 * 16 * other


def test_flops_are_counted_where_they_are_computed():
    """None of what a tap alone asks for, and what the mask hides once."""
    model, a = graph(MODEL), part()
    for tokens, past in ((1, 11), (6, 0), (5, 7)):
        call = Call(batch=2, tokens=tokens, past=past, phase="prefill")
        op = model["blocks.0.attn.z"].op
        full, hidden = op.flops(call, tokens, model.sizes(0))
        flops, pair = a.flops(tokens, past + tokens)
        assert (full, hidden) == (2 * flops, 2 * pair * tokens * (tokens - 1) // 2)


def test_what_is_kept_of_a_token():
    state = random_decoder(MODEL).new_state(2, 20)
    assert {name: tuple(one.shape) for name, one in state.tensors().items()} == {
        "cache.0.latent": (2, 20, 7), "cache.0.k_pe": (2, 20, 4),
        "cache.1.latent": (2, 20, 7), "cache.1.k_pe": (2, 20, 4),
    }  # fmt: skip
    assert state.nbytes == 2 * 2 * 20 * (7 + 4) * 8
    state.grow(24)
    assert state.tensors()["cache.1.latent"].shape == (2, 24, 7)


@pytest.mark.parametrize(("leaf", "instead"), [("k", "kv_latent_norm"), ("v", "kv_latent_norm"),
                                               ("k_rot", "k_pe_rot")])  # fmt: skip
def test_what_a_tap_alone_is_shown_cannot_be_edited(leaf, instead):
    model = random_model(MODEL)
    edit = Edit(name=f"blocks.0.attn.{leaf}", fn=lambda x, at: x.clone())
    with pytest.raises(UsageError, match="only shown") as caught:
        model.decoder(IDS, edits=[edit])
    assert caught.value.hint == f"edit `blocks.0.attn.{instead}`, which it is computed from"


@needs_kernels
def test_a_step_by_our_kernels_is_that_of_pytorch(monkeypatch):
    """Of a cache in bfloat16; where both round a latent otherwise it is by its last bit."""
    decoder = packed_model("latent attention, its own matrices in 16 bits").decoder
    found = read(decoder, [4, 1, 1, 6])
    for module, name in ((heads, "has_kernel"), (compiled, "attends")):
        monkeypatch.setattr(module, name, lambda *args, **rest: False)
    torch.testing.assert_close(found, read(decoder, [4, 1, 1, 6]), rtol=0, atol=0.03)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "Q4_0"])
@pytest.mark.parametrize(("quantize", "kernels"), [("auto", "avx2"), ("int8", "avx512bf16")])
def test_what_is_multiplied_along_both_axes_is_in_16_bits_or_dense(stored, quantize, kernels):
    config, _ = IN_BLOCKS["latent attention"]
    precision = resolve_precision(
        config, dtype="auto", quantize=quantize, device="cpu", stored=set(), bfloat16=False,
        kernels=kernels, packable=dict.fromkeys(matrices(config), stored),
    )  # fmt: skip
    assert precision.bf16_dot is (kernels == "avx512bf16")
    expected = None if stored == "Q4_0" else stored
    blocks = {"Q8_0"} if quantize == "int8" and stored != "Q4_0" else {stored}
    for leaf in "kv":
        assert precision.formats.get(f"blocks.0.attn.W_{leaf}") == expected
    assert {precision.formats[f"blocks.0.attn.W_{leaf}"] for leaf in ("q", "q_pe", "o")} == blocks
