"""A decoder that computes something else than the formulas say is found out."""

import pytest
import torch
import torch.nn.functional as F
from blocks import configure, ffn_of, norm_of
from decoder_parameters import Times, parameters_of
from explain_models import IDS, explained

import llmcli.ops.rope
from llmcli.errors import NotFinite
from llmcli.kernels import native
from llmcli.nn.step import Step
from llmcli.parts.attention import forward

HAS = pytest.mark.skipif(native.level() is None, reason="there are no kernels")

# What plants a fault: called with the decoder and the monkeypatch.


def configured(find, change):
    """What `find(decoder)` is has the configuration that is changed by `change(config)`."""

    def plant(decoder, monkeypatch):
        one = find(decoder)
        configure(one, **change(one.config))

    return plant


def attention(**change):
    return configured(lambda decoder: decoder.blocks[0].mixers[0], lambda config: change)


def without(find):
    """What `find(decoder)` is has no bias."""
    return lambda decoder, monkeypatch: setattr(find(decoder), "bias", None)


def activated(act):
    return lambda decoder, monkeypatch: setattr(ffn_of(decoder.blocks[0]), "act", act)


def attended(change):
    """`change(attend, q, k, v, rest)` instead of the kernel."""

    def plant(decoder, monkeypatch):
        see = forward.attend
        monkeypatch.setattr(forward, "attend", lambda *qkv, **rest: change(see, *qkv, rest))

    return plant


def shifted(see, q, k, v, rest):
    visible = torch.ones(len(IDS), len(IDS), dtype=torch.bool).tril(-1)
    visible[0, 0] = True
    return see(q, k, v, scale=rest["scale"], mask=visible)


def keys_turned_one_too_far(decoder, monkeypatch):
    turn = forward.rotate

    def rotate(qk, cos, sin):
        heads = decoder.blocks[0].mixers[0].config.heads
        q, k = turn(qk, cos, sin)[..., :heads, :], turn(qk, cos.roll(1, 0), sin.roll(1, 0))
        return torch.cat((q, k[..., heads:, :]), -2)

    monkeypatch.setattr(forward, "rotate", rotate)


def rope_of_neighbours(decoder, monkeypatch):
    turn = forward.rotate

    def rotate(qk, cos, sin):
        size = qk.shape[-1]
        order = torch.arange(size).view(2, -1).t().reshape(-1)
        return turn(qk[..., order], cos, sin)[..., order.argsort()]

    monkeypatch.setattr(forward, "rotate", rotate)


def positions_one_too_far(decoder, monkeypatch):
    positions = Step.positions.fget
    monkeypatch.setattr(Step, "positions", property(lambda self: positions(self) + 1))


def another_weight(decoder, monkeypatch):
    """The fused matrix that is multiplied with is no longer what the weights by name say."""
    qkv = decoder.blocks[0].mixers[0].qkv
    qkv.weight = Times(qkv.weight, 1.001)


no_mask = attended(lambda see, q, k, v, rest: see(q, k, v, scale=rest["scale"]))
BOTH = {
    "wrong scale": configured(
        lambda decoder: decoder.blocks[0].mixers[0], lambda config: {"scale": config.scale * 1.01}
    ),
    "no mask": no_mask,
    "shifted mask": attended(shifted),
    "wrong window": attention(window=2),
    "wrong eps": configured(
        lambda decoder: norm_of(decoder.blocks[0], 1), lambda config: {"eps": config.eps * 100}
    ),
    "wrong norm": configured(
        lambda decoder: decoder.ln_final,
        lambda config: {"kind": {"rms": "layer", "layer": "rms"}[config.kind]},
    ),
    "heads mixed up": attended(lambda see, q, k, v, rest: see(q, k, v, **rest).flip(1)),
    "another weight": another_weight,
}
OF_GPT2 = {
    "no scale": attention(scale=1.0),
    "no output bias": without(lambda decoder: decoder.blocks[0].mixers[0].out),
    "no query bias": without(lambda decoder: decoder.blocks[0].mixers[0].qkv),
    "no neuron bias": without(lambda decoder: ffn_of(decoder.blocks[0]).up),
    "another gelu": activated(F.gelu),
    "positions one too far": positions_one_too_far,
}
OF_LLAMA = {
    "keys turned one too far": keys_turned_one_too_far,
    "rope of neighbours": rope_of_neighbours,
    "gate on the other side": activated(torch.sigmoid),
    "wrong kv head": attended(lambda see, q, k, v, rest: see(q, k.flip(1), v.flip(1), **rest)),
}
FAULTS = [
    pytest.param(model, plant, id=f"{model}-{name}")
    for model, faults in (("gpt2", BOTH | OF_GPT2), ("llama-grouped", BOTH | OF_LLAMA))
    for name, plant in faults.items()
]


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
    turn = forward.rotate

    def rotate(qk, cos, sin):
        tables = llmcli.ops.rope.tables
        rope = broken.config.layers[0].attention.rope
        omegas, factor = llmcli.ops.rope.frequencies(rope, len(IDS))
        cos, sin = tables(omegas, torch.arange(1, len(IDS) + 1), factor)
        return turn(qk, cos.unsqueeze(1), sin.unsqueeze(1))

    broken = model("llama-grouped")
    monkeypatch.setattr(forward, "rotate", rotate)
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
