"""Every number that a model has is derived, and is what the decoder computed."""

import math
import random
import re
import sys

import pytest
from decoder_parameters import parameters_of
from explain_models import FIRST, IDS, NAMES, TEXTS, deep_model, emitted, explained, make
from zoo import MODELS

from llmcli.commands.explain.measure import needed_bytes
from llmcli.errors import OutOfMemory, UsageError
from llmcli.graph.indexed import NumberRef, parse
from llmcli.inspect.kernel import rules
from llmcli.inspect.numbers import find, names, place


def activations(model):
    """The axes of each."""
    every = names(model.config, len(IDS))
    return {name: axes for name, axes in every.items() if axes.kind == "activation"}


def drawn(model, tensors, seed):
    """These activations with the place of one of their numbers."""
    for name, axes in activations(model).items():
        draw = random.Random(f"{name} {seed}")
        if name in tensors:
            yield name, tuple(draw.randrange(size) for size in axes.shape)


@pytest.mark.parametrize("depth", [1, 3, None])
@pytest.mark.parametrize(("name", "tensors"), FIRST, ids=NAMES)
def test_every_name_in_float64(name, tensors, depth):
    model = make(name)
    seen = emitted(model)
    assert set(rules(model.config)) == set(seen)
    assert {one: at.shape for one, at in activations(model).items()} == {
        one: tuple(tensor.shape) for one, tensor in seen.items()
    }
    for tensor, index in drawn(model, {*tensors, "logits"}, depth):
        found, theirs = explained(model, tensor, index, depth), seen[tensor]
        assert found.ok, (tensor, index, found)
        if math.isinf(found.value):
            assert found.value == theirs[index] == -math.inf
            continue
        finite = theirs[theirs.isfinite()].abs().max().item()
        assert abs(found.value - theirs[index].item()) <= 1e-12 * max(finite, 1), tensor


@pytest.mark.parametrize(("name", "tensors"), FIRST, ids=NAMES)
def test_every_name_in_float32_within_the_printed_tolerance(name, tensors):
    model = make(name, "float32")
    seen = emitted(model)
    for tensor, index in drawn(model, {*tensors, "logits"}, "32"):
        found = explained(model, tensor, index)
        assert found.ok, (tensor, index, found)
        if found.difference:
            row = seen[tensor][index[:-1]]
            assert 0 < found.tolerance < 1e-3 * row[row.isfinite()].abs().max().clamp_min(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_leads_to_the_numbers_that_it_was_made_of_down_to_the_embedding_rows(name):
    """A child's number is one of those that stand in its parent's arithmetic."""
    model = make(name)
    report = explained(model, "logits", (len(IDS) - 1, model.config.vocab // 2))
    steps = report.steps
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        numbers = {part for fact in (*step.before, *step.after) for part in fact.parts}
        numbers |= {part for term in step.terms for part in term.parts}
        numbers |= {fact.value for fact in step.after}
        for child in (steps[number - 1] for number in step.children):
            near = min(abs(child.value - number) for number in numbers)
            assert near < 1e-13 * max(1, abs(child.value)), (step.name, child.name)
    assert {step.name for step in steps if not step.children} <= {"embed", "pos_embed"}
    assert {step.source for step in steps} == {"derived"}
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
    for of, name, at in ((loaded, "blocks.0.attn.W_k", (2, 5)), (make("odd"), "head.W", (2, 37))):
        weight = explained(of, name, at).value
        assert weight == parameters_of(of.decoder)[name][at[::-1]].item()
    for key, hidden in ((5, True), (4, False), (1, False), (0, True)):  # of a window of 4
        score = explained(make("window"), "blocks.0.attn.scores", (0, 4, key), 1)
        assert score.ok
        assert (score.value == score.kernel == -math.inf) is hidden


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


def test_why_a_key_is_hidden():
    masked = "mask M[3,2] = −∞: token 3 may not attend to token 2: it sees only"
    for model, layer, seen in (
        ("window of one", 1, "itself"),
        ("chunks", 0, "its chunk of 3 tokens, which begins with token 3"),
    ):
        rule = rules(MODELS[model])[f"blocks.{layer}.attn.scores"]
        assert (rule.hides(3, 3), rule.hides(3, 2)) == ("", f"{masked} {seen}")


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


# what is typed, and what it means


@pytest.mark.parametrize(
    ("text", "name", "items"),
    [
        ("logits", "logits", None),
        ("logits[7,3]", "logits", (7, 3)),
        (" logits [ 7 , -3 ] ", "logits", (7, -3)),
        ("logits[7,' Paris']", "logits", (7, " Paris")),
        ('logits[-1," a, b]"]', "logits", (-1, " a, b]")),
        (r"logits['it\'s\n\t\\','x']", "logits", ("it's\n\t\\", "x")),
        ("a.scale[3]", "a.scale", (3,)),
        ("logits[]", "logits", ()),
        ("logits['']", "logits", ("",)),
        (r"logits['\x41\u4e2d\U0001F600\"']", "logits", ('A\u4e2d\U0001f600"',)),
    ],
)
def test_what_can_be_read(text, name, items):
    assert parse(text) == NumberRef(name, items)


# what cannot be read is in transcripts/explain-index.txt
@pytest.mark.parametrize(
    ("digits", "message"),
    [("9" * 400, "`9{40}…` is outside the axis"), ("-" + "9" * 5000, "is outside the axis")],
)
def test_no_number_is_too_long(digits, message):
    with pytest.raises(UsageError, match=message):
        parse(f"logits[{digits}]")


class Letters:
    """A tokenizer of letters: one id for each, 97 and more from `a`."""

    def encode(self, text, *, add_bos):
        assert add_bos is False
        return [ord(letter) - 97 for letter in text]


NARROW = "post-norm, narrow embeddings"


def placed(typed, model_name="gpt2", tokenizer=None):
    """The index that is meant in a prompt of `TEXTS`."""
    wanted, config = parse(typed), make(model_name).config
    spec = find(wanted, names(config, len(TEXTS)), config)
    return place(wanted, spec, TEXTS, tokenizer)


@pytest.mark.parametrize(
    ("typed", "index"),
    [
        ("blocks.0.attn.pattern[1,5,2]", (1, 5, 2)),
        ("blocks.0.attn.pattern[-1,-1,-7]", (2, 6, 0)),
        ("blocks.0.attn.pattern[0,'t8','t3']", (0, 5, 2)),
        ("logits[-1,42]", (6, 42)),
        ("logits['t42','c']", (4, 2)),
        ("blocks.0.ln1.scale[3]", (3, 0)),
        ("blocks.0.ln1.scale[3,0]", (3, 0)),
        ("embed.W['d',1]", (3, 1)),
    ],
)
def test_places(typed, index):
    assert placed(typed, tokenizer=Letters()) == index


# more of them, and what is unknown, are in transcripts/explain-names.txt; what a tokenizer has not
# is in explain-index.txt and explain-views.txt
@pytest.mark.parametrize(
    ("model_name", "typed", "reason", "hint"),
    [
        ("odd", "blocks.1.attn.k_rot", "this model has no .*: no rotation", "`"),
        ("odd", "cache.1.k", "needs no cache", "`blocks.1.attn.k_norm`"),
        ("short convolutions", "cache.0.conv[0,1]", "needs no cache", "`blocks.0.conv.in`"),
        ("gpt2", "blocks.1.attn.q", "its only block is `blocks.0`", "`"),
        ("llama", "W_head[2,3]", r"`head.W\[dimension,vocabulary\]`", "`head.W[2,3]`"),
        (NARROW, "W_ED[2,3]", r"`embed_proj.W\[dimension,dimension\]`", "`embed_proj.W[2,3]`"),
        ("llama", "head_proj", "its embeddings are as wide as its residual stream", "`"),
    ],
)
def test_what_the_model_has_not_got_says_why(model_name, typed, reason, hint):
    with pytest.raises(UsageError, match=reason) as caught:
        placed(typed, model_name)
    assert hint in caught.value.hint
