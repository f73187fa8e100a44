"""Attribution: terms that add up to a number of the model, and gradients without kernels' help.

Over every small model in float64; planted faults turn the check red.
"""

import numpy as np
import pytest
import torch
from covers import covered, in_turn
from decoder_faults import red, wrap
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import random_model
from zoo import IN_BLOCKS, MODELS

from llmcli.commands.attribute.measure import PATCHED, measure_direct, measure_gradient
from llmcli.commands.attribute.view import maps, term_words
from llmcli.decoder.decoder import Decoder
from llmcli.errors import UsageError
from llmcli.graph.graph import graph
from llmcli.inspect.contributions import explained
from llmcli.inspect.gradients import Gradients
from llmcli.inspect.passes import Passes
from llmcli.nn.step import Edit, Step
from llmcli.parts.norm import Norm
from llmcli.shell.answer import Answer
from llmcli.weights.packed import Packed

IDS, OTHER = (5, 17, 3, 17, 42, 8, 30), (5, 17, 9, 17, 42, 8, 30)
ANSWER = Answer(answer=3, versus=7)


def direct(model, wanted=ANSWER, ids=IDS):
    return measure_direct(Passes(model, ids), wanted)


def metric(logits_V):
    return logits_V[3] - logits_V[7]


def apart(report):
    """Of the terms' sum and the number; the check says the same."""
    (check,) = report.checks
    assert check.ok, check
    assert check.value == abs(report.sum - report.value)
    return check.value


@pytest.mark.parametrize("name", covered(MODELS))
def test_terms_add_up_to_the_logit(name):
    """Of every kind of part, and every one of them is a term."""
    model = random_model(MODELS[name])
    report = direct(model)
    raw_V = model.decoder(torch.tensor([IDS]))[0, -1].double()
    if (cap := model.config.head.cap) is not None:
        raw_V = cap * (raw_V / cap).atanh()
    assert report.value == pytest.approx(float(metric(raw_V)), abs=1e-9)
    assert apart(report) <= 1e-9
    assert apart(direct(model, Answer(), ids=IDS[:1])) <= 1e-9
    found = {(term.name, term.index) for term in report.terms}
    assert len(found) == len(report.terms)
    for layer, config in enumerate(model.config.layers):
        for part in config.parts:
            whole = graph(model.config)
            heads = {i for n, i in found if n.startswith(f"blocks.{layer}.") and i is not None}
            if "heads" in vars(part):
                assert heads >= set(range(part.heads))
                assert whole.sizes(layer)["H"] == part.heads
    (drawn,) = maps(report)
    assert drawn.values[-1][-1] == pytest.approx(report.value, abs=1e-9), "nothing is left out"
    assert len({term_words(report, term) for term in report.terms}) == len(report.terms)
    for term in report.terms:
        if term.kind == "head":
            assert drawn.values[term.index, term.layer + 1] == term.value


@pytest.mark.parametrize("name", covered(MODELS))
def test_any_number_that_is_linear_in_the_stream_is_the_sum_of_its_terms(name):
    model = random_model(MODELS[name])
    whole = graph(model.config)
    names = [one for one in whole.nodes if explained(model, one)]
    assert {"blocks.0.resid_post", "logits_raw"} <= set(names)
    for one in names:
        axes = whole[one].axes
        index = tuple(len(IDS) - 1 if axis == "T" else 0 for axis in axes)
        assert apart(direct(model, (one, index))) <= 1e-9, one
    refused = [node.name for node in whole.nodes.values() if node.name.endswith((".post", ".z"))]
    for one in refused:
        with pytest.raises(UsageError, match="not linear in the residual stream"):
            direct(model, (one, (0, len(IDS) - 1, 0)))


def test_shares_of_experts_are_those_of_the_chosen():
    model, seen = random_model(MODELS["post-norm, narrow embeddings"]), {}
    model.decoder(torch.tensor([IDS]), tap=lambda name, x: seen.update({name: x[0]}))
    of = "blocks.1.moe."
    numbers_K = seen[f"{of}expert_weight"][-1] * seen[f"{of}expert_out"][:, -1, 0]
    expected = dict(zip(seen[f"{of}expert_idx"][-1].tolist(), numbers_K.tolist(), strict=True))
    terms = direct(model, (f"{of}out", (len(IDS) - 1, 0))).terms
    assert {term.index: term.value for term in terms} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(list(MODELS), ["float32", "bfloat16", "float16"])
)
def test_terms_add_up_in_any_arithmetic(name, dtype):
    apart(direct(random_model(MODELS[name], dtype)))


@needs_kernels
@pytest.mark.parametrize("name", covered(IN_BLOCKS))
def test_what_packed_products_round_is_a_term(name):
    report = direct(model := packed_model(name))
    apart(report)
    head = model.decoder.weight("head.W")  # a dense one rounds no input
    assert ("rounding" in {term.kind for term in report.terms}) == isinstance(head, Packed)


def heads_in_another_order(emit, step, name, x):
    """The product reads other heads than the view sees."""
    seen = emit(step, name, x)
    return seen.flip(-3) if name.endswith("attn.z") else seen


def another_divisor(norm, self, x):
    """As of another row."""
    return norm(self, x) * (1.5 if self.name == "ln_final" else 1.0)


def without_bias(raw, self, x):
    return raw(self, x) - self.head_bias


FAULTS = {
    "heads in another order": ("llama", wrap(Step, "emit", heads_in_another_order)),
    "scale of another row": ("gpt2", wrap(Norm, "__call__", another_divisor)),
    "no bias": ("head with a bias", wrap(Decoder, "_raw_logits", without_bias)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_fault_turns_the_sum_red(monkeypatch, fault, dtype):
    name, plant = FAULTS[fault]
    model = random_model(MODELS[name], dtype)
    assert red(direct(model).checks) == set()
    plant(monkeypatch, model)
    assert red(direct(model).checks) == {"sum"}


# gradients


def written(model):
    """What can be edited, with numbers that have gradients."""
    whole = graph(model.config)
    return [
        node.name
        for node in whole.nodes.values()
        if whole.written(node.name)
        and not (node.tap_only or node.integer or node.name.startswith("logits"))
    ]


@pytest.mark.parametrize("name", covered(MODELS))
def test_gradients_are_finite_differences(name):
    """Small random vectors added to every activation at once, by edits of the decoder."""
    model, generator = random_model(MODELS[name]), torch.Generator().manual_seed(1)
    found = Gradients(model, IDS, metric, written(model))
    assert set(found.at) == set(written(model))
    assert max(found.apart.values()) <= found.tolerance <= 1e-13
    along = {n: torch.randn(g.shape, generator=generator).double() for n, g in found.at.items()}

    def moved(by):
        edits = [Edit(name=name, fn=lambda x, *_, v=v: x + by * v) for name, v in along.items()]
        return float(metric(model.decoder(torch.tensor([IDS]), edits=edits)[0, -1]))

    def slope(by):
        return (moved(by) - moved(-by)) / (2 * by)

    expected = sum(float((g * along[name]).sum()) for name, g in found.at.items())
    differences = (4 * slope(1e-5) - slope(2e-5)) / 3  # but for the fourth power of the step
    assert differences == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_gradients_between_two_prompts():
    """Nothing comes from positions before they differ, and nothing at all from the same prompt."""
    model = random_model(MODELS["mamba-2"])
    report = measure_gradient(Passes(model, IDS), OTHER, ANSWER)
    assert report.ok
    raw = model.decoder(torch.tensor([IDS, OTHER]))[:, -1]
    found = (report.value, report.corrupted_value)
    assert found == pytest.approx([float(metric(row)) for row in raw], abs=1e-9)
    assert {term.position for term in report.terms if term.value} <= set(range(2, len(IDS)))
    kinds = {term.kind for term in report.terms}
    assert kinds == {"resid_pre", "attn_out", "mlp_out", "head"}
    exact = Gradients(model, OTHER, metric, ["blocks.1.attn_out"])
    clean = {}
    model.decoder(torch.tensor([IDS]), tap=lambda name, x: clean.update({name: x[0]}))
    moved_T = ((clean["blocks.1.attn_out"] - exact.emitted["blocks.1.attn_out"])
               * exact.at["blocks.1.attn_out"]).sum(-1)  # fmt: skip
    ours = [term.value for term in report.terms if term.name == "blocks.1.attn_out"]
    assert ours == pytest.approx(moved_T.tolist(), abs=1e-12)
    assert len(maps(report)) == 4
    patched = [term for term in report.terms if term.patched is not None]
    for kind in kinds:
        moved = [abs(term.value) for term in report.terms if term.kind == kind and term.value]
        ours = [term for term in patched if term.kind == kind]
        assert sorted(abs(term.value) for term in ours) == sorted(moved)[-PATCHED:]
        for term in ours[::3]:
            at = (..., *([] if term.index is None else [term.index]), term.position, slice(None))

            def fn(x, positions, at=at, name=term.name):
                x[(0, *at[1:])] = clean[name][at]
                return x

            edited = model.decoder(torch.tensor([OTHER]), edits=[Edit(name=term.name, fn=fn)])
            change = float(metric(edited[0, -1])) - report.corrupted_value
            assert term.patched == pytest.approx(change, abs=1e-9)
    pairs = np.array([(term.value, term.patched) for term in patched]).T
    assert report.correlation == pytest.approx(np.corrcoef(pairs)[0, 1])
    same = measure_gradient(Passes(model, IDS), IDS, ANSWER)
    assert {term.value for term in same.terms} == {0.0}
    assert same.correlation is None
    with pytest.raises(UsageError, match="has 7 tokens and `--corrupted` 6"):
        measure_gradient(Passes(model, IDS), IDS[1:], ANSWER)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_block_that_computes_something_else_turns_gradients_red(monkeypatch, dtype):
    model = random_model(MODELS["llama"], dtype)
    assert red(measure_gradient(Passes(model, IDS), OTHER, ANSWER).checks) == set()
    wrap(Norm, "__call__", another_divisor)(monkeypatch, model)
    assert red(measure_gradient(Passes(model, IDS), OTHER, ANSWER).checks) == {"evaluated"}
