"""Every number that a model has is derived, and is what the decoder computed."""

import dataclasses
import math
import random
import re
import sys

import pytest
from covers import few, in_turn
from decoder_parameters import parameters_of
from explain_models import IDS, NAMES, deep_model, emitted, explained, make

from llmcli.commands.explain.measure import needed_bytes
from llmcli.commands.explain.options import names
from llmcli.errors import OutOfMemory
from llmcli.inspect.kernel import rules


def activations(model):
    """The axes of each."""
    every = names(model.config, len(IDS))
    return {name: axes for name, axes in every.items() if axes.kind == "activation"}


def drawn(model, seed):
    """Every activation with the place of one of its numbers."""
    for name, axes in activations(model).items():
        draw = random.Random(f"{name} {seed}")
        yield name, tuple(draw.randrange(size) for size in axes.shape)


@pytest.mark.parametrize(("name", "depth"), in_turn(NAMES, [1, 3, None]))
def test_every_name_in_float64(name, depth):
    model = make(name)
    seen, every = emitted(model), drawn(model, depth)
    assert set(rules(model.config)) == set(seen)
    assert {one: at.shape for one, at in activations(model).items()} == {
        one: tuple(tensor.shape) for one, tensor in seen.items()
    }
    for tensor, index in every:
        found, theirs = explained(model, tensor, index, depth), seen[tensor]
        assert found.ok, (tensor, index, found)
        if math.isinf(found.value):
            assert found.value == theirs[index] == -math.inf
            continue
        finite = theirs[theirs.isfinite()].abs().max().item()
        assert abs(found.value - theirs[index].item()) <= 1e-12 * max(finite, 1), tensor


@pytest.mark.parametrize("name", few(NAMES[::-1], 2))
def test_every_name_in_float32_within_the_printed_tolerance(name):
    model = make(name, "float32")
    seen = emitted(model)
    for tensor, index in drawn(model, "32"):
        found = explained(model, tensor, index)
        assert found.ok, (tensor, index, found)
        if found.difference:
            row = seen[tensor][index[:-1]]
            assert 0 < found.tolerance < 1e-3 * row[row.isfinite()].abs().max().clamp_min(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_leads_to_the_numbers_that_it_was_made_of(name):
    """A child's number is one of those that stand in its parent's arithmetic."""
    model = make(name)
    last = names(model.config, len(IDS))["logits"].shape
    steps = explained(model, "logits", (len(IDS) - 1, last[1] // 2)).steps
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        numbers = {part for fact in (*step.before, *step.after) for part in fact.parts}
        numbers |= {part for term in step.terms for part in term.parts}
        numbers |= {fact.value for fact in step.after}
        for child in (steps[number - 1] for number in step.children):
            near = min(abs(child.value - number) for number in numbers)
            assert near < 1e-13 * max(1, abs(child.value)), (step.name, child.name)


@pytest.mark.parametrize("name", NAMES)
def test_all_ends_at_the_embedding_rows(name):
    model = make(name)
    report = explained(model, "logits", (4, 11))
    leaves = [step for step in report.steps if not step.children]
    assert {step.name for step in leaves} <= {"embed", "pos_embed"}
    assert {step.source for step in report.steps} == {"derived"}
    assert report.depth is None
    # the norms divide by what they compute themselves, heads are put together without `result`,
    # and a block's output is the input of the next one
    by_the_way = {"scale", "result", "resid_post", "logits_raw"}
    needed = {n for n in rules(model.config) if n.rpartition(".")[2] not in by_the_way}
    assert report.tensors == len(needed) + 1, "and the last resid_post"


def test_parts_of_numbers_add_up():
    """Origins to the number, a softmax's terms to 1; a parameter is the weight itself."""
    stream = explained(make("llama"), "blocks.1.resid_post", (3, 7), 1)
    origins = math.fsum(term.value for term in stream.steps[0].origins)
    assert math.isclose(origins, stream.value, rel_tol=1e-12)
    loaded = make("gpt2")
    pattern = explained(loaded, "blocks.0.attn.pattern", (1, 4, 2), 1)
    assert math.isclose(math.fsum(term.parts[2] for term in pattern.steps[0].terms), 1)
    assert pattern.steps[0].terms[2].parts[2] == pattern.value
    weight = explained(loaded, "blocks.0.attn.W_k", (2, 5)).value
    assert weight == parameters_of(loaded.decoder)["blocks.0.attn.W_k"][5, 2].item()
    masked = explained(make("window"), "blocks.0.attn.scores", (0, 2, 5), 1)
    assert (masked.value, masked.kernel, masked.difference) == (-math.inf, -math.inf, 0)
    assert masked.ok


def test_a_depth_that_reaches_the_embedding_is_all():
    model = make("gpt2")
    assert explained(model, "blocks.0.ln1.out", (3, 1), 2).depth == 2
    assert explained(model, "blocks.0.ln1.out", (3, 1), 3).depth is None


def test_more_formulas_in_a_row_than_python_nests_calls():
    model = deep_model(45)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        report = explained(model, "blocks.44.resid_post", (6, 3))
    finally:
        sys.setrecursionlimit(limit)
    assert report.ok
    assert report.tensors > 600


def test_a_window_of_one():
    small = make("odd")
    rule = rules(small.config)["blocks.0.attn.scores"]
    alone = dataclasses.replace(rule.op.config, window=1)
    node = dataclasses.replace(rule.node, op=dataclasses.replace(rule.op, config=alone))
    alone = type(rule)(node, rule.letter_of, rule.rules)
    assert alone.hides(3, 3) == ""
    assert alone.hides(3, 2) == (
        "mask M[3,2] = −∞: token 3 may not attend to token 2: it sees only itself"
    )


def test_what_does_not_fit_in_memory_is_said_before(monkeypatch):
    small = make("gpt2")
    where = ("blocks.0.attn.pattern", (0, 1, 2))
    free = 30_000
    monkeypatch.setattr("llmcli.devices.available_bytes", lambda device: free)
    assert explained(small, *where, 1).ok
    run = []
    monkeypatch.setattr(type(small.decoder), "__call__", lambda *args, **rest: run.append(args))
    for depth, free in ((1, 5000), (None, 16_000)):  # noqa: B007 (the lambda uses it)
        with pytest.raises(OutOfMemory, match="the tensors of the derivation need"):
            explained(small, *where, depth)
    assert not run, "said before the model is run"


def test_the_squares_of_long_prompts_are_counted():
    config = make("gpt2").config

    def derived(name, tokens, depth):
        return needed_bytes(config, names(config, tokens), name, depth, 4)[1]

    heads = config.layers[0].attention.heads
    for name in ("scores", "pattern", "z"):
        assert derived(f"blocks.0.attn.{name}", 1000, 1) >= 4 * 8 * heads * 1000**2
    assert derived("blocks.0.mlp.pre", 1000, 1) == 0
    assert derived("blocks.0.mlp.pre", 1000, None) >= 4 * 8 * heads * 1000**2


@pytest.mark.parametrize("scaled", ["W_", "."], ids=["matrices", "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_numbers_that_a_kernel_takes_for_0_are_not_wrong(name, scaled):
    """Weights of 1e-39 in float32: products of them are below everything that it has."""
    model = make(name, "float32")
    for slot_name, slot in parameters_of(model.decoder).items():
        if re.search(scaled, slot_name):
            slot.mul_(1e-39)
    for target in ("logits", "blocks.0.attn.q", "blocks.1.attn.z", "blocks.1.resid_post"):
        sizes = names(model.config, len(IDS)).get(target)
        if sizes is None:
            continue
        index = tuple(size // 2 for size in sizes.shape)
        found = explained(model, target, index)
        wrong = [(step.name, step.value, step.kernel) for step in found.steps if not step.ok]
        assert not wrong
        assert found.ok
        copies = [step for step in found.steps if step.name in ("embed", "pos_embed")]
        assert all(step.tolerance == 0.0 for step in copies), "a copy is exact, however small"
