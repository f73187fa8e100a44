"""A decoder that computes something else than the formulas say is found out."""

from functools import cache

import decoder_faults
import pytest
import torch
from blocks import configure
from covers import in_turn
from decoder_parameters import Times, parameters_of
from explain_models import IDS, explained, make
from needs import needs_kernels
from small_models import as_model

import llmcli.ops.rope
from llmcli.errors import NotFinite
from llmcli.parts import attention as forward

# what only tokens after the prompt show, which an explanation reads in one call
LATER = {
    "rotated one position late", "cached one slot late", "keys cached before the rotation",
}  # fmt: skip


def another_weight(monkeypatch, of):
    """The fused matrix that is multiplied with is no longer what the weights by name say."""
    qkv = of.decoder.blocks[0].mixers[0].qkv
    qkv.weight = Times(qkv.weight, 1.001)


def wrong_norm(monkeypatch, of):
    norm = of.decoder.ln_final
    configure(norm, kind={"rms": "layer", "layer": "rms"}[norm.config.kind])


FAULTS = {name: fault for name, fault in decoder_faults.FAULTS.items() if name not in LATER} | {
    f"{plant.__name__}, {config}": (config, plant)
    for plant in (another_weight, wrong_norm) for config in ("gpt2", "llama")
}  # fmt: skip


def logits(whole):
    """Why one of them is what it is, down to the embeddings."""
    return explained(whole, "logits", (6, 11))


@cache
def sound(config, dtype):
    """Whether nothing is found where nothing is planted."""
    return logits(as_model(decoder_faults.model(config, dtype).decoder)).ok


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_turn(
        list(FAULTS),
        [torch.float64, torch.float32, pytest.param("packed", marks=needs_kernels)],
    ),
)
def test_faults_are_found(name, dtype, monkeypatch):
    config, plant = FAULTS[name]
    assert sound(config, dtype)
    of = decoder_faults.model(config, dtype)
    whole = as_model(of.decoder)
    plant(monkeypatch, of)
    found = logits(whole)
    assert not found.ok
    if dtype is torch.float64:
        assert found.difference > 2 * found.tolerance, "the number itself, not only a step"


def test_rope_off_by_one_everywhere_changes_no_score_but_is_found(monkeypatch):
    """A rotation of queries and keys alike cancels in their product: only the steps show it."""
    turn = forward.rotate

    def rotate(qk, cos, sin):
        tables = llmcli.ops.rope.tables
        rope = broken.config.layers[0].attention.rope
        omegas, factor = llmcli.ops.rope.frequencies(rope, len(IDS))
        cos, sin = tables(omegas, torch.arange(1, len(IDS) + 1), factor)
        return turn(qk, cos.unsqueeze(1), sin.unsqueeze(1))

    broken = make("llama-grouped")
    monkeypatch.setattr(forward, "rotate", rotate)
    found = explained(broken, "blocks.0.attn.scores", (1, 5, 2))
    assert found.difference <= found.tolerance
    assert not found.ok
    assert {step.name for step in found.steps if not step.ok} == {
        "blocks.0.attn.q_rot", "blocks.0.attn.k_rot",
    }  # fmt: skip
    assert not explained(broken, "blocks.0.attn.q_rot", (1, 5, 2)).ok


def test_the_pattern_is_held_against_what_the_fused_kernel_made_of_it(monkeypatch):
    """Nothing but z tells which pattern the kernel used: the mixer's own rows would agree."""
    broken = make("gpt2")
    where = (1, 4, 2)
    good = explained(broken, "blocks.0.attn.pattern", where, 1)
    assert good.ok
    assert [check.ok for check in good.checks] == [True]
    _, no_mask = FAULTS["no mask"]
    no_mask(monkeypatch, broken)
    found = explained(broken, "blocks.0.attn.pattern", where, 1)
    assert all(step.ok for step in found.steps)
    assert [check.ok for check in found.checks] == [False]
    assert not found.ok
    assert "its output blocks.0.attn.z[1,4," in found.checks[0].words


def test_numbers_that_are_none():
    broken = make("gpt2")
    parameters_of(broken.decoder)["blocks.0.mlp.W_down"][3, 2] = torch.nan
    with pytest.raises(NotFinite, match=r"`blocks\.0\.mlp_out\[4,3\]` is nan"):
        explained(broken, "blocks.0.mlp_out", (4, 3))
    with pytest.raises(NotFinite, match=r"`blocks\.0\.mlp_out` is not finite"):
        explained(broken, "blocks.0.mlp_out", (4, 2))
    assert explained(broken, "blocks.0.mlp.post", (4, 2)).ok
