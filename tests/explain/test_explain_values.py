"""Every number that a model has is derived, and is what the decoder computed."""

import dataclasses
import math
import random
import re
import sys

import explain_models
import pytest
import torch
from covers import few, in_turn
from decoder_parameters import parameters_of
from explain_models import IDS, NAMES, explained
from small_models import random_model
from zoo import BLOCKS

from llmcli.commands.explain.measure.index import names
from llmcli.commands.explain.measure.values import needed_bytes
from llmcli.errors import OutOfMemory
from llmcli.observe.rules import rules


def emitted(model):
    """What one pass shows to a tap, and what the fused attention never writes, by its own means."""
    seen = {}
    ids = torch.tensor([IDS])
    model.decoder(ids, tap=lambda name, tensor: seen.__setitem__(name, tensor[0].double()))
    for i, block in enumerate(model.decoder.blocks):
        at, a = f"blocks.{i}.attn", model.config.layers[i].attention
        q, k = (
            seen.get(f"{at}.{part}_rot", seen.get(f"{at}.{part}_norm", seen[f"{at}.{part}"]))
            for part in "qk"
        )
        k = k.repeat_interleave(a.heads // a.kv_heads, 0)
        row = torch.arange(len(IDS))
        hidden = row[None] > row[:, None]
        if a.window is not None:
            hidden |= row[None] <= row[:, None] - a.window
        scores = (q @ k.mT * a.scale).masked_fill(hidden, -torch.inf)
        seen[f"{at}.scores"], seen[f"{at}.pattern"] = scores, scores.softmax(-1)
        w_HeD = block.mixers[0].out.weight.dense(torch.float64).t().unflatten(0, (a.heads, -1))
        seen[f"{at}.result"] = seen[f"{at}.z"] @ w_HeD
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_rule_for_everything_that_is_emitted(name, model):
    model = model(name)
    seen = emitted(model)
    assert set(rules(model.config)) == set(seen)
    known = {n: a for n, a in names(model.config, len(IDS)).items() if a.kind == "activation"}
    assert {n: a.sizes for n, a in known.items()} == {n: tuple(t.shape) for n, t in seen.items()}


def places(axes, seed, count):
    draw = random.Random(f"{axes.name} {seed}")
    return [tuple(draw.randrange(size) for size in axes.sizes) for _ in range(count)]


@pytest.mark.parametrize(("name", "depth"), in_turn(NAMES, [1, 3, None]))
def test_every_name_in_float64(name, depth, model):
    model = model(name)
    seen = emitted(model)
    for axes in names(model.config, len(IDS)).values():
        for index in places(axes, depth, 2) if axes.kind == "activation" else ():
            found = explained(model, axes.name, index, depth)
            theirs = seen[axes.name]
            assert found.ok, (axes.name, index, found)
            if math.isinf(found.value):
                assert found.value == theirs[index] == -math.inf
                continue
            finite = theirs[theirs.isfinite()].abs().max().item()
            assert abs(found.value - theirs[index].item()) <= 1e-12 * max(finite, 1), axes.name


@pytest.mark.parametrize("name", few(NAMES[::-1], 4))
def test_every_name_in_float32_within_the_printed_tolerance(name, model):
    model = model(name, "float32")
    seen = emitted(model)
    for axes in names(model.config, len(IDS)).values():
        for index in places(axes, "32", 1) if axes.kind == "activation" else ():
            found = explained(model, axes.name, index)
            assert found.ok, (axes.name, index, found)
            if found.difference:
                row = seen[axes.name][index[:-1]]
                assert 0 < found.tolerance < 1e-3 * row[row.isfinite()].abs().max().clamp_min(1)


def shown_arithmetic(fact):
    """What is printed after the last `=`, with the exact numbers in it, as Python."""
    numbers = fact.formula.rpartition("=")[2]
    for part in fact.parts:
        numbers = numbers.replace("{}", f"({part!r})", 1)
    for theirs, ours in (("·", "*"), ("−", "-"), ("√", "math.sqrt"), ("tanh u", "u")):
        numbers = numbers.replace(theirs, ours)
    return numbers


@pytest.mark.parametrize("name", few(NAMES[::-1], 4))
def test_the_arithmetic_that_is_shown_gives_the_number(name, model):
    model = model(name)
    checked = set()
    for axes in names(model.config, len(IDS)).values():
        for index in places(axes, "shown", 1) if axes.kind == "activation" else ():
            for step in explained(model, axes.name, index).steps:
                for fact in (*step.before, *step.after):
                    if fact.parts:
                        value = eval(shown_arithmetic(fact), {"math": math, "max": max})
                        assert math.isclose(value, fact.value, rel_tol=1e-12, abs_tol=1e-15)
                        checked.add(re.sub(r"[\d\[\],]+", "", fact.formula))
                if step.sum is not None:
                    terms = math.fsum(term.value for term in step.terms)
                    assert math.isclose(terms, step.sum.value, rel_tol=1e-12, abs_tol=1e-15)
                    if step.sum.columns[-1] == "product":
                        assert all(math.prod(t.parts) == t.value for t in step.terms)
                if step.source == "derived" and step.after:
                    assert step.after[-1].value == step.value
    assert len(checked) > 5


@pytest.mark.parametrize("name", NAMES)
def test_a_step_leads_to_the_numbers_that_it_was_made_of(name, model):
    """A child's number is one of those that stand in its parent's arithmetic."""
    model = model(name)
    last = names(model.config, len(IDS))["logits"].sizes
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
def test_all_ends_at_the_embedding_rows(name, model):
    model = model(name)
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


def test_depth_takes_what_is_further_away_from_the_kernel(model):
    model = model("llama-grouped")
    one = explained(model, "blocks.1.attn.pattern", (1, 5, 2), 1).steps
    assert [step.source for step in one] == ["derived", "kernel"]
    assert one[1].name == "blocks.1.attn.scores"
    four = explained(model, "blocks.1.attn.pattern", (1, 5, 2), 4).steps
    assert [step.name.rpartition(".")[2] for step in four] == [
        "pattern", "scores", "q_rot", "q", "out", "k_rot", "k", "out",
    ]  # fmt: skip
    assert [step.children for step in four] == [(2,), (3, 6), (4,), (5,), (), (7,), (8,), ()]
    assert [step.number for step in four if step.source == "kernel"] == [5, 8]


def test_a_depth_that_reaches_the_embedding_is_all(model):
    model = model("gpt2")
    assert explained(model, "blocks.0.ln1.out", (3, 1), 2).depth == 2
    assert explained(model, "blocks.0.ln1.out", (3, 1), 3).depth is None


def test_more_formulas_in_a_row_than_python_nests_calls():
    model = explain_models.deep_model(110)
    limit = sys.getrecursionlimit()  # a compiler that ran before may have raised it
    sys.setrecursionlimit(1000)
    try:
        report = explained(model, "blocks.109.resid_post", (6, 3))
    finally:
        sys.setrecursionlimit(limit)
    assert report.ok
    assert report.tensors > 1500


def test_masked_cells(model):
    model = model("mistral-window")
    after = explained(model, "blocks.0.attn.scores", (0, 2, 5), 1)
    assert after.value == after.kernel == -math.inf
    assert after.ok
    assert after.difference == 0
    assert after.steps[0].note == (
        "mask M[2,5] = −∞: token 2 may not look at token 5, which comes after it"
    )
    far = explained(model, "blocks.0.attn.pattern", (0, 6, 1), 1)
    assert far.value == far.kernel == 0
    assert "it sees the last 3 tokens, itself included" in far.steps[0].note
    assert [term.at for term in far.steps[0].terms] == [4, 5, 6]
    edge = explained(model, "blocks.0.attn.pattern", (0, 6, 4), 1)
    assert edge.value > 0
    assert edge.steps[0].note == ""


def test_a_window_of_one(model):
    small = model("odd")
    rule = rules(small.config)["blocks.0.attn.scores"]
    node = dataclasses.replace(rule.node, op=dataclasses.replace(rule.op, window=1))
    alone = type(rule)(node, rule.letter_of, rule.rules)
    assert alone.hides(3, 3) == ""
    assert alone.hides(3, 2) == (
        "mask M[3,2] = −∞: token 3 may not look at token 2: it sees only itself"
    )


def test_a_column_says_which_head_it_belongs_to(model):
    small = model("llama-grouped")
    query = explained(small, "blocks.0.attn.q", (3, 4, 5), 1).steps[0]
    assert query.note == "W_q: column 29 = 3 · 8 + 5 (head 3, number 5)"
    assert query.sum.columns == ("T¹[4,i]", "W_q[i,29]", "product")
    key = explained(small, "blocks.0.attn.k", (1, 4, 5), 1).steps[0]
    assert key.note == "W_k: column 13 = 1 · 8 + 5 (kv head 1, number 5)"
    out, z = explained(small, "blocks.0.attn_out", (4, 5), 1).steps
    assert out.sum.columns[0] == "C[4,i]"
    at = z.index[0] * 8 + z.index[2]
    assert out.note == (
        "C with its heads side by side: i = head · 8 + number, "
        f"as {at} = {z.index[0]} · 8 + {z.index[2]}"
    )
    assert out.terms[at].parts[0] == z.value


def test_what_the_kernel_never_writes_says_what_it_was_recomputed_from(model):
    small = model("llama-grouped")
    found = {
        part: explained(small, f"blocks.0.attn.{part}", (1, 4, 2), 1).steps[0].recomputed
        for part in ("scores", "pattern", "result", "z", "q")
    }
    assert found == {
        "scores": "the kernel's q and k", "pattern": "the kernel's q and k",
        "result": "the kernel's z", "z": "", "q": "",
    }  # fmt: skip


def test_softmax_terms_are_the_row(model):
    report = explained(model("gpt2"), "blocks.0.attn.pattern", (1, 4, 2), 1)
    assert [term.at for term in report.steps[0].terms] == [0, 1, 2, 3, 4]
    assert [term.label for term in report.steps[0].terms] == ["t5", "t17", "t3", "t17", "t42"]
    assert math.isclose(math.fsum(term.parts[2] for term in report.steps[0].terms), 1)
    assert report.steps[0].terms[2].parts[2] == report.value


def test_grouped_heads_share_their_keys(model):
    report = explained(model("llama-grouped"), "blocks.0.attn.scores", (3, 4, 2), 1)
    assert report.steps[0].note == "heads 2 to 3 share the keys and values of kv head 1"
    assert {child.name: child.index[0] for child in report.steps[1:]} == {
        "blocks.0.attn.q_rot": 3,
        "blocks.0.attn.k_rot": 1,
    }


def test_the_residual_stream_is_split_by_where_it_comes_from(model):
    report = explained(model("llama-grouped"), "blocks.1.resid_post", (3, 7), 1)
    origins = report.steps[0].origins
    assert [term.label for term in origins] == [
        "embed", "blocks.0.attn_out", "blocks.0.mlp_out", "blocks.1.attn_out", "blocks.1.mlp_out",
    ]  # fmt: skip
    assert math.isclose(math.fsum(term.value for term in origins), report.value, rel_tol=1e-12)


def test_parameters_are_leaves_that_say_where_they_are_from(model):
    loaded = model("gpt2")
    report = explained(loaded, "blocks.0.attn.W_k", (2, 5))
    assert report.value == parameters_of(loaded.decoder)["blocks.0.attn.W_k"][5, 2].item()
    assert "`h.0.attn.c_attn.weight`, stored as F32" in report.steps[0].note
    assert report.steps[0].source == "weights"
    assert report.steps[0].children == ()
    drawn = explained(model("odd"), "head.b", (3,))
    assert drawn.steps[0].note == "drawn at random with the seed 3"


def test_the_letters_of_the_documents_with_numbers(model):
    found = explained(model("llama-grouped"), "logits", (0, 0), 1).letters
    assert {letter.letter: letter.value for letter in found} == {
        "n": 7, "d": 32, "h": 4, "h_kv": 2, "d/h": 8, "F": 48, "v": 97,
    }  # fmt: skip
    odd = explained(model("odd"), "blocks.1.attn.z", (0, 0, 0), 1)
    assert {letter.letter: letter.value for letter in odd.letters}["d_v"] == 6
    assert odd.steps[0].shape == "h × n × d_v = 4 × 7 × 6"
    assert {letter.letter: letter.value for letter in odd.letters}["d_k"] == 8
    assert "d/h" not in {letter.letter for letter in odd.letters}


def test_a_head_that_is_not_a_part_of_the_width_is_not_called_d_h(model):
    config = model("llama-grouped").config
    wide = rules(dataclasses.replace(config, width=48))
    assert wide["blocks.0.attn.scores"].formula == "S = Q_rot K_rotᵀ / √d_k + M"
    assert "d/h" not in "".join(rule.formula for rule in wide.values())


def test_the_formulas_are_those_of_the_documents(model):
    """Most of them are in transcripts/shapes-names.txt, which has the same (test_anatomy)."""
    found = rules(model("gpt2").config)
    pattern = "A = softmax(S) = softmax(Q Kᵀ / √(d/h) + M)"
    assert found["blocks.0.attn.pattern"].formula == pattern
    assert found["ln_final.out"].formula.endswith(" / s · w + b, H of the last block")
    assert found["logits"].formula == "logits = H′ W_head, W_head = W_Eᵀ (tied)"
    odd = rules(model("odd").config)
    assert odd["blocks.0.attn.scores"].formula == "S = Q_rot K_rotᵀ · 0.3 + M"
    assert odd["blocks.1.attn.scores"].formula == "S = Q_norm K_normᵀ · 0.3 + M"
    gated = rules(model("llama-grouped").config)
    assert gated["blocks.0.attn.result"].formula == "R = C W_o, head by head (T² is their sum)"
    parts = ("gate", "up", "act", "post")
    assert {part: gated[f"blocks.0.mlp.{part}"].formula for part in parts} == {
        "gate": "G = T⁴ W_gate", "up": "U = T⁴ W_up", "act": "Activation(G) = SiLU(G)",
        "post": "L = Activation(G) ∘ U",
    }  # fmt: skip
    assert odd["blocks.1.resid_pre"].formula == "X = H of block 0 = T⁵ + T³"
    assert odd["logits"].formula == "logits = H′ W_head + b"


def test_what_does_not_fit_in_memory_is_said_before(model, monkeypatch):
    small = model("gpt2")
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


def test_the_squares_of_long_prompts_are_counted(model):
    config = model("gpt2").config

    def derived(name, tokens, depth):
        sizes = {n: axes.sizes for n, axes in names(config, tokens).items()}
        return needed_bytes(config, sizes, name, depth, 4)[1]

    heads = config.layers[0].attention.heads
    for name in ("scores", "pattern", "z"):
        assert derived(f"blocks.0.attn.{name}", 1000, 1) >= 4 * 8 * heads * 1000**2
    assert derived("blocks.0.mlp.pre", 1000, 1) == 0
    assert derived("blocks.0.mlp.pre", 1000, None) >= 4 * 8 * heads * 1000**2


@pytest.mark.parametrize("scaled", ["W_", "."], ids=["matrices", "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama-grouped"])
def test_numbers_that_a_kernel_takes_for_0_are_not_wrong(name, scaled, tmp_path):
    """Weights of 1e-39 in float32: products of them are below everything that it has."""
    model = explain_models.make(name, tmp_path, "float32")
    for slot_name, slot in parameters_of(model.decoder).items():
        if re.search(scaled, slot_name):
            slot.mul_(1e-39)
    for target in ("logits", "blocks.0.attn.q", "blocks.1.attn.z", "blocks.1.resid_post"):
        sizes = names(model.config, len(IDS)).get(target)
        if sizes is None:
            continue
        index = tuple(size // 2 for size in sizes.sizes)
        found = explained(model, target, index)
        wrong = [(step.name, step.value, step.kernel) for step in found.steps if not step.ok]
        assert not wrong
        assert found.ok
        copies = [step for step in found.steps if step.name in ("embed", "pos_embed")]
        assert all(step.tolerance == 0.0 for step in copies), "a copy is exact, however small"


@pytest.mark.parametrize("token", range(4))
def test_the_letters_of_a_convolution_give_its_sum(token):
    """Also at the first tokens, which see less than the filter is long."""
    model = random_model(BLOCKS["short convolutions"])
    layer = next(i for i, one in enumerate(model.config.layers) if one.attention is None)
    step = explained(model, f"blocks.{layer}.conv.conv", (token, 3), depth=1).steps[0]
    assert step.sum is not None
    at_w, at_y = re.fullmatch(r"w\[3,(.*)\] · Y\[(.*),3\]", step.sum.formula).groups()
    seen = {}
    model.decoder(torch.tensor([IDS]), tap=seen.__setitem__)
    w_DL = model.decoder.weight(f"blocks.{layer}.conv.w").dense()
    y_TD = seen[f"blocks.{layer}.conv.in"][0]

    def place(text, j):
        return sum(j if part == "j" else int(part) for part in text.split("+"))

    products = [
        w_DL[3, place(at_w, term.at)] * y_TD[place(at_y, term.at), 3] for term in step.terms
    ]
    assert sum(products).item() == pytest.approx(step.sum.value, rel=1e-12)
