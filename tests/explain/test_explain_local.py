"""Every formula alone, on the kernel's own inputs: what roundings on a long way would hide."""

import math

import pytest
import torch
from blocks import configure, ffn_of
from decoder_parameters import parameters_of
from explain_models import NAMES, TOKENS, deep_model, emitted, explained, make

from llmcli.commands.explain.measure import Values
from llmcli.inspect import formulas
from llmcli.inspect.kernel import rules
from llmcli.loading.load import load
from llmcli.weights.dense import Dense


def values_of(model):
    return Values(model, rules(model.config), TOKENS, target="logits", depth=None)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_needs_less_than_half_of_what_it_is_allowed(name):
    found = explained(make(name, "float32"), "logits", (5, 9)).local
    assert found.ok
    assert found.tensors > 10
    assert 0 < found.difference <= found.tolerance / 2


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
    broken = make("llama-grouped", "float32")
    where = ("blocks.1.mlp_out", (5, 2), 1)
    good = explained(broken, *where).local
    assert (good.formulas, good.tensors, good.ok) == (1, 0, True)
    down = ffn_of(broken.decoder.blocks[1]).down
    down.weight = Dense(down.weight.dense() * 1.0001)
    found = explained(broken, *where).local
    assert not found.ok
    assert (found.name, found.index) == ("blocks.1.mlp_out", (5, 2))


@pytest.mark.parametrize("name", ["gpt2", "mistral-window"])
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
    own = values_of(make("llama-biases-relu")).own()
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
    model = make("llama-grouped", dtype)
    parameters_of(model.decoder)["embed.W"][5, 3] = 5000.0
    assert explained(model, "logits", (0, 7), tokens=model.tokens(ids)).ok


@pytest.mark.parametrize("ids", [(5,), (5, 9)])
def test_a_norm_that_is_off_is_seen_in_one_row_and_in_more(ids):
    model = make("llama-grouped", "float32")
    configure(model.decoder.ln_final, eps=0.1)
    found = explained(model, "logits", (0, 7), tokens=model.tokens(ids))
    assert not found.ok
    assert found.local.name.startswith("ln_final")


def test_an_output_head_of_its_own_is_turned():
    loaded = make("odd")
    slot = parameters_of(loaded.decoder)["head.W"]
    assert explained(loaded, "head.W", (2, 37)).value == slot[37, 2].item() != slot[2, 7].item()


def test_what_a_mixture_may_be_off():
    """The check of a pattern through z allows what a formula after q, k and v allows."""
    broken = make("gpt2")
    good = explained(broken, "blocks.0.attn.pattern", (1, 4, 2), 1).checks[0]
    assert good.ok
    v = emitted(broken)["blocks.0.attn.v"][1, :5].abs().max().item()
    assert good.tolerance < 250 * torch.finfo(torch.float64).eps * v
