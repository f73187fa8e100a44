"""A decoder that computes something else than the formulas say is found out."""

import math
from functools import cache

import decoder_faults
import pytest
import torch
from blocks import configure, ffn_of
from covers import in_turn
from decoder_parameters import Times, parameters_of
from explain_models import IDS, TOKENS, deep_model, emitted, explained, make
from needs import needs_kernels
from small_models import as_model

import llmcli.ops.rope
from llmcli.commands.explain.measure import Values
from llmcli.errors import NotFinite
from llmcli.inspect import formulas
from llmcli.inspect.kernel import rules
from llmcli.loading.load import load
from llmcli.parts import attention as forward
from llmcli.weights.dense import Dense

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

    broken = make("llama")
    monkeypatch.setattr(forward, "rotate", rotate)
    found = explained(broken, "blocks.0.attn.scores", (1, 5, 2))
    assert found.difference <= found.tolerance
    assert not found.ok
    assert {step.name for step in found.steps if not step.ok} == {
        "blocks.0.attn.q_rot", "blocks.0.attn.k_rot",
    }  # fmt: skip
    assert not explained(broken, "blocks.0.attn.q_rot", (1, 5, 2)).ok


def test_the_pattern_is_held_against_what_the_fused_kernel_made_of_it(monkeypatch):
    """Nothing but z tells which pattern the kernel used: the mixer's own rows would agree.

    The check through z allows what a formula after q, k and v allows.
    """
    broken = make("gpt2")
    where = (1, 4, 2)
    good = explained(broken, "blocks.0.attn.pattern", where, 1)
    assert good.ok
    assert [check.ok for check in good.checks] == [True]
    v = emitted(broken)["blocks.0.attn.v"][1, :5].abs().max().item()
    assert good.checks[0].tolerance < 250 * torch.finfo(torch.float64).eps * v
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


# every formula alone, on the kernel's own inputs: what roundings on a long way would hide


def values_of(model):
    return Values(model, rules(model.config), TOKENS, target="logits", depth=None)


@pytest.mark.parametrize("at", [(8, 5), (8, 100), (3, 17)])
def test_a_scale_that_is_wrong_by_half_a_thousandth_in_a_middle_block(at):
    """Too little for what a whole way may be off, too much for its own formula."""
    tiny = load("tiny", dtype="float32")
    text = "And God said, Let there be light: and there"
    tokens = tiny.tokens(tiny.tokenizer.encode(text))
    where = ("blocks.3.resid_post", at)
    assert explained(tiny, *where, tokens=tokens).ok
    mixer = tiny.decoder.blocks[1].mixers[0]
    configure(mixer, scale=mixer.config.scores.scale * 1.0005)
    found = explained(tiny, *where, tokens=tokens)
    assert not found.ok
    assert not found.local.ok
    # the scores are recomputed by the same faulty mixer, and come first in execution order
    assert found.local.name == "blocks.1.attn.scores"


def test_it_is_found_in_a_deep_model_though_the_number_itself_agrees():
    deep = deep_model(20)
    mixer = deep.decoder.blocks[9].mixers[0]
    mixer.out.weight = Dense(mixer.out.weight.dense().clone())
    mixer.out.weight.tensor[3, 2] += 2e-13
    found = explained(deep, "blocks.19.resid_post", (6, 3))
    assert found.difference <= found.tolerance, "the way allows more"
    assert all(step.ok for step in found.steps)
    assert not found.ok
    assert (found.local.name, found.local.index[1]) == ("blocks.9.attn_out", 3)
    assert found.local.tolerance < 1e-13


def test_at_every_depth_the_formulas_shown_are_checked():
    broken = make("llama", "float32")
    where = ("blocks.1.mlp_out", (5, 2), 1)
    good = explained(broken, *where).local
    assert (good.formulas, good.tensors, good.ok) == (1, 0, True)
    down = ffn_of(broken.decoder.blocks[1]).down
    down.weight = Dense(down.weight.dense() * 1.0001)
    found = explained(broken, *where).local
    assert not found.ok
    assert (found.name, found.index) == ("blocks.1.mlp_out", (5, 2))


@pytest.mark.parametrize("name", ["gpt2", "window"])
def test_what_is_masked_is_exactly_nothing(name, monkeypatch):
    leaking = make(name)
    cell = (1, 2, 4)
    good = explained(leaking, "blocks.0.attn.pattern", cell, 1)
    assert good.ok
    assert good.tolerance == good.steps[0].tolerance == 0
    rows = leaking.decoder.blocks[0].mixers[0].attention_rows
    monkeypatch.setattr(
        leaking.decoder.blocks[0].mixers[0], "attention_rows", lambda *args: rows(*args) + 1e-5
    )
    found = explained(leaking, "blocks.0.attn.pattern", cell, 1)
    assert not found.ok
    assert not found.steps[0].ok
    seen = explained(leaking, "blocks.0.attn.pattern", (1, 4, 4), 1)
    assert not seen.local.ok, "what is not masked is wrong, too"


def test_what_is_no_arithmetic_is_a_copy():
    """A row of a table, what is not rotated, and ReLU."""
    for name in ("embed", "pos_embed"):
        report = explained(make("gpt2", "float32"), name, (3, 5), 1)
        assert report.ok
        assert report.tolerance == report.difference == 0
    own = values_of(make("odd")).own()
    turned = rules(own.model.config)["blocks.0.attn.q_rot"].magnitudes(own)
    assert turned[..., 4:].eq(0).all()
    assert turned[..., :4].gt(0).all()
    own = values_of(make("biases and relu")).own()
    assert rules(own.model.config)["blocks.0.mlp.act"].magnitudes(own).eq(0).all()


def test_what_is_allowed_is_roundings_of_the_terms():
    own = values_of(make("gpt2", "float32")).own()
    size = torch.tensor([0.0, 2.0], dtype=torch.float64)
    allowed = formulas._allowed(size, size, own, "logits")
    assert allowed[0] == 0
    assert math.isclose(float(allowed[1]), formulas.ROUNDINGS * 2 * 2**-23, rel_tol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ids", [(5,), (5, 9)])
def test_a_row_with_one_huge_number_is_normed_to_rounding(ids, dtype):
    """The kernel norms a single row in another way, and small numbers lose digits there."""
    model = make("llama", dtype)
    parameters_of(model.decoder)["embed.W"][5, 3] = 5000.0
    assert explained(model, "logits", (0, 7), tokens=model.tokens(ids)).ok


@pytest.mark.parametrize("ids", [(5,), (5, 9)])
def test_a_norm_that_is_off_is_seen_in_one_row_and_in_more(ids):
    model = make("llama", "float32")
    configure(model.decoder.ln_final, eps=0.1)
    found = explained(model, "logits", (0, 7), tokens=model.tokens(ids))
    assert not found.ok
    assert found.local.name.startswith("ln_final")
