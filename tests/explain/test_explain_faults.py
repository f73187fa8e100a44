"""A decoder that computes something else than the formulas say is found out."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from blocks import ffn_of, norm_of
from decoder_parameters import Times, parameters_of
from explain_models import IDS, explained

import llmcli.nn.block
import llmcli.nn.decoder
import llmcli.ops.rope
import llmcli.parts.attention.forward
from llmcli.errors import NotFinite
from llmcli.kernels import native
from llmcli.nn.step import Step

HAS = pytest.mark.skipif(native.level() is None, reason="there are no kernels")


def attention(decoder, **changes):
    mixer = decoder.blocks[0].mixers[0]
    mixer.config = dataclasses.replace(mixer.config, **changes)


def wrong_scale(decoder, monkeypatch):
    attention(decoder, scale=decoder.blocks[0].mixers[0].config.scale * 1.01)


def no_scale(decoder, monkeypatch):
    attention(decoder, scale=1.0)


def no_mask(decoder, monkeypatch):
    see = llmcli.parts.attention.forward.attend
    monkeypatch.setattr(
        llmcli.parts.attention.forward, "attend",
        lambda q, k, v, *, scale, **_: see(q, k, v, scale=scale),
    )  # fmt: skip


def shifted_mask(decoder, monkeypatch):
    see = llmcli.parts.attention.forward.attend
    tokens = len(IDS)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril(-1)
    visible[0, 0] = True
    monkeypatch.setattr(
        llmcli.parts.attention.forward, "attend",
        lambda q, k, v, *, scale, **_: see(q, k, v, scale=scale, mask=visible),
    )  # fmt: skip


def wrong_window(decoder, monkeypatch):
    attention(decoder, window=2)


def no_output_bias(decoder, monkeypatch):
    decoder.blocks[0].mixers[0].out.bias = None


def no_query_bias(decoder, monkeypatch):
    decoder.blocks[0].mixers[0].qkv.bias = None


def no_neuron_bias(decoder, monkeypatch):
    ffn_of(decoder.blocks[0]).up.bias = None


def wrong_eps(decoder, monkeypatch):
    norm = norm_of(decoder.blocks[0], 1)
    norm.config = dataclasses.replace(norm.config, eps=norm.config.eps * 100)


def wrong_norm(decoder, monkeypatch):
    norm = decoder.ln_final
    kind = {"rms": "layer", "layer": "rms"}[norm.config.kind]
    norm.config = dataclasses.replace(norm.config, kind=kind)


def keys_turned_one_too_far(decoder, monkeypatch):
    turn = llmcli.parts.attention.forward.rotate

    def rotate(qk, cos, sin):
        heads = decoder.blocks[0].mixers[0].config.heads
        q, k = turn(qk, cos, sin)[..., :heads, :], turn(qk, cos.roll(1, 0), sin.roll(1, 0))
        return torch.cat((q, k[..., heads:, :]), -2)

    monkeypatch.setattr(llmcli.parts.attention.forward, "rotate", rotate)


def rope_of_neighbours(decoder, monkeypatch):
    turn = llmcli.parts.attention.forward.rotate

    def rotate(qk, cos, sin):
        size = qk.shape[-1]
        order = torch.arange(size).view(2, -1).t().reshape(-1)
        return turn(qk[..., order], cos, sin)[..., order.argsort()]

    monkeypatch.setattr(llmcli.parts.attention.forward, "rotate", rotate)


def other_gelu(decoder, monkeypatch):
    ffn_of(decoder.blocks[0]).act = F.gelu


def gate_on_the_other_side(decoder, monkeypatch):
    ffn_of(decoder.blocks[0]).act = torch.sigmoid


def positions_one_too_far(decoder, monkeypatch):
    positions = Step.positions.fget
    monkeypatch.setattr(Step, "positions", property(lambda self: positions(self) + 1))


def heads_mixed_up(decoder, monkeypatch):
    see = llmcli.parts.attention.forward.attend
    monkeypatch.setattr(
        llmcli.parts.attention.forward, "attend",
        lambda q, k, v, **rest: see(q, k, v, **rest).flip(1),
    )  # fmt: skip


def wrong_kv_head(decoder, monkeypatch):
    see = llmcli.parts.attention.forward.attend
    monkeypatch.setattr(
        llmcli.parts.attention.forward, "attend",
        lambda q, k, v, **rest: see(q, k.flip(1), v.flip(1), **rest),
    )  # fmt: skip


def another_weight(decoder, monkeypatch):
    """The fused matrix that is multiplied with is no longer what the weights by name say."""
    qkv = decoder.blocks[0].mixers[0].qkv
    qkv.weight = Times(qkv.weight, 1.001)


BOTH = (
    wrong_scale, no_mask, shifted_mask, wrong_window, wrong_eps, wrong_norm, heads_mixed_up,
    another_weight,
)  # fmt: skip
FAULTS = [
    *((model, fault) for fault in BOTH for model in ("gpt2", "llama-grouped")),
    *(
        ("gpt2", fault)
        for fault in (
            no_scale, no_output_bias, no_query_bias, no_neuron_bias, other_gelu,
            positions_one_too_far,
        )
    ),
    ("llama-grouped", keys_turned_one_too_far),
    ("llama-grouped", rope_of_neighbours),
    ("llama-grouped", gate_on_the_other_side),
    ("llama-grouped", wrong_kv_head),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", pytest.param("packed", marks=HAS)])
@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_faults_are_found(name, fault, dtype, model, monkeypatch):
    broken = model(name, dtype)
    where = (3, 11)
    assert explained(broken, "logits", where).ok
    fault(broken.decoder, monkeypatch)
    found = explained(broken, "logits", where)
    assert not found.ok
    if dtype == "float64":
        assert found.difference > 2 * found.tolerance, "the number itself, not only a step"


def test_rope_off_by_one_everywhere_changes_no_score_but_is_found(model, monkeypatch):
    """A rotation of queries and keys alike cancels in their product: only the steps show it."""
    turn = llmcli.parts.attention.forward.rotate

    def rotate(qk, cos, sin):
        tables = llmcli.ops.rope.tables
        rope = broken.config.layers[0].attention.rope
        omegas, factor = llmcli.ops.rope.frequencies(rope, len(IDS))
        cos, sin = tables(omegas, torch.arange(1, len(IDS) + 1), factor)
        return turn(qk, cos.unsqueeze(1), sin.unsqueeze(1))

    broken = model("llama-grouped")
    monkeypatch.setattr(llmcli.parts.attention.forward, "rotate", rotate)
    found = explained(broken, "blocks.0.attn.scores", (1, 5, 2))
    assert found.difference <= found.tolerance
    assert not found.ok
    assert {step.name for step in found.steps if not step.ok} == {
        "blocks.0.attn.q_rot", "blocks.0.attn.k_rot",
    }  # fmt: skip
    assert not explained(broken, "blocks.0.attn.q_rot", (1, 5, 2)).ok


def test_the_pattern_is_held_against_what_the_fused_kernel_made_of_it(model, monkeypatch):
    """Nothing but z tells which pattern the kernel used: the mixer's own rows would agree."""
    broken = model("gpt2")
    where = (1, 4, 2)
    good = explained(broken, "blocks.0.attn.pattern", where, 1)
    assert good.ok
    assert [check.ok for check in good.checks] == [True]
    no_mask(broken.decoder, monkeypatch)
    found = explained(broken, "blocks.0.attn.pattern", where, 1)
    assert all(step.ok for step in found.steps)
    assert [check.ok for check in found.checks] == [False]
    assert not found.ok
    assert "its output blocks.0.attn.z[1,4," in found.checks[0].words


def test_numbers_that_are_none(model):
    broken = model("gpt2")
    parameters_of(broken.decoder)["blocks.0.mlp.W_down"][3, 2] = torch.nan
    with pytest.raises(NotFinite, match=r"`blocks\.0\.mlp_out\[4,3\]` is nan"):
        explained(broken, "blocks.0.mlp_out", (4, 3))
    with pytest.raises(NotFinite, match=r"`blocks\.0\.mlp_out` is not finite"):
        explained(broken, "blocks.0.mlp_out", (4, 2))
    assert explained(broken, "blocks.0.mlp.post", (4, 2)).ok
