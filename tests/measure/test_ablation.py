"""Ablation: every effect is what a pass with that one edit gives, over every small model.

Planted faults turn the view's own checks red.
"""

from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from covers import KINDS, covered, in_turn
from decoder_faults import red
from decoder_parameters import packed_model
from needs import needs_kernels
from small_models import random_model
from zoo import IN_BLOCKS, MODELS

from llmcli.commands.ablate import measure
from llmcli.commands.ablate.measure import Place, measure_ablation, places
from llmcli.commands.ablate.view import effect_words, effects_map
from llmcli.commands.score.measure import measure_score
from llmcli.errors import UsageError
from llmcli.graph.block import block_names
from llmcli.graph.graph import graph
from llmcli.inspect.sweep import Sweep
from llmcli.nn.step import Edit
from llmcli.shell.answer import Answer

IDS, OTHER = (5, 17, 3, 17, 42, 8, 30), (5, 17, 9, 4, 1)
ANSWER = Answer(answer=3, versus=7)


def loss(model, edits=(), ids=IDS):
    logits_TV = model.decoder(torch.tensor([ids]), edits=edits)[0]
    return float(F.cross_entropy(logits_TV[:-1].double(), torch.tensor(ids[1:])))


def emitted(model, ids):
    seen = {}
    model.decoder(torch.tensor([ids]), tap=lambda name, x: seen.update({name: x[0].clone()}))
    return seen


def replaced(part_TN, by, other_TN):
    """What stands for the rows of a head, an expert or another activation."""
    if by == "mean":
        return part_TN.mean(-2, keepdim=True).expand_as(part_TN)
    if by == "zero" or not len(other_TN):
        return torch.zeros_like(part_TN)
    return torch.stack([other_TN[at % len(other_TN)] for at in range(len(part_TN))])


def alone(model, one, by):
    """The loss of a pass with the edits that an effect is of."""
    seen, other = emitted(model, IDS), emitted(model, OTHER)
    names, edits = [one.name], []
    if one.kind == "layer":
        parts = block_names(model.config.layers[one.layer], one.name)
        names = [name for part in parts for name in part.residual_updates]
    for name in names:
        x, y = seen[name].clone(), other[name]
        if one.kind == "expert":
            chosen = name.replace("expert_out", "expert_idx")
            hit, there = ((one.index == of[chosen]).T for of in (seen, other))
            x[hit] = replaced(x[hit], by, y[there])
        elif one.index is not None:
            x[one.index] = replaced(x[one.index], by, y[one.index])
        else:
            x = replaced(x, by, y)
        edits.append(Edit(name=name, fn=lambda _, at, x=x: x.unsqueeze(0).contiguous()))
    return loss(model, edits)


@pytest.mark.parametrize(("kind", "by"), in_turn(list(MODELS), ["zero", "mean", "resample"]))
def test_effects_are_those_of_single_edits(kind, by):
    model = random_model(MODELS[kind])
    other = OTHER if by == "resample" else None
    report = measure_ablation(model, [IDS], by=by, other=other)
    assert red(report.checks) == set()
    plain, of = loss(model), effects_map(report)
    assert report.value == pytest.approx(plain, abs=1e-12)
    texts = [""] * len(IDS)
    score = measure_score(model, IDS, texts, [(0, 0)] * len(IDS), window=99, stride=9)
    assert -report.value == pytest.approx(score.mean_logprob, abs=1e-12)
    for one in report.effects:
        assert one.value == pytest.approx(alone(model, one, by) - plain, abs=1e-9), one
        if one.kind == "head" and [*graph(model.config).mixers].count(one.layer):
            rows = [e for e in report.effects if (e.layer, e.kind) == (one.layer, "head")]
            row = of.names.index(f"head {rows.index(one)}")
            assert of.values[row, of.columns.index(str(one.layer))] == one.value
    assert len({effect_words(report, one) for one in report.effects}) == len(report.effects)
    for layer, config in enumerate(model.config.layers):
        own = [one for one in report.effects if one.layer == layer]
        heads = sum(part.heads for part in config.parts if "heads" in vars(part))
        assert sum(one.kind == "head" for one in own) == heads
        assert sum(one.kind == "layer" for one in own) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_one_token_changes_no_bit(kind):
    model, ids = random_model(MODELS[kind]), IDS[:1]
    every = places(model.config, None)
    own, mean = measure._rows(model, ids, every), measure._means(model, [ids], every)
    plain = model.decoder(torch.tensor([ids]))
    for place in every:
        if all(place.key(name) in own for name in place.names):
            edits = place.edits(own, mean)
            assert torch.equal(model.decoder(torch.tensor([ids]), edits=edits), plain), place
    report = measure_ablation(model, [ids], ANSWER)
    assert max(abs(one.value) for one in report.effects) <= 1e-12
    assert red(report.checks) == set()


@pytest.mark.parametrize(
    ("kind", "dtype"), in_turn(list(MODELS), ["float32", "bfloat16", "float16"])
)
def test_checks_hold_in_any_arithmetic(kind, dtype):
    report = measure_ablation(random_model(MODELS[kind], dtype), [IDS], what=["blocks.0.attn_out"])
    assert red(report.checks) == set()


@needs_kernels
@pytest.mark.parametrize("name", covered(IN_BLOCKS))
def test_checks_hold_with_packed_weights(name):
    assert red(measure_ablation(packed_model(name), [IDS], ANSWER).checks) == set()


def test_many_prompts_have_their_mean_and_its_interval():
    """A mean over all of their tokens; an expert that a prompt does not choose changes nothing."""
    model, prompts = random_model(MODELS["experts"]), [IDS, OTHER, OTHER[::-1]]
    report = measure_ablation(model, prompts, by="zero")
    each = [measure_ablation(model, [ids], by="zero") for ids in prompts]
    assert report.value == pytest.approx(fmean(one.value for one in each))
    for effect in report.effects:
        found = [[e.value for e in one.effects if (e.name, e.kind, e.index)
                  == (effect.name, effect.kind, effect.index)] for one in each]  # fmt: skip
        values = torch.tensor([sum(value) for value in found])
        error = 4.302653 * float(values.std()) / 3**0.5  # Student's, of two degrees of freedom
        assert effect.value == pytest.approx(float(values.mean()), abs=1e-6)
        assert effect.high - effect.value == pytest.approx(error, rel=1e-4, abs=1e-6)
        assert effect.value - effect.low == pytest.approx(error, rel=1e-4, abs=1e-6)
    what = ["blocks.0.attn.z"]
    pair = measure_ablation(model, prompts[:2], by="resample", what=what)
    turns = [measure_ablation(model, [ids], by="resample", other=other, what=what)
             for ids, other in ((IDS, OTHER), (OTHER, IDS))]  # fmt: skip
    both = zip(*([one.value for one in turn.effects] for turn in turns), strict=True)
    assert [one.value for one in pair.effects] == pytest.approx(list(map(fmean, both)))
    means = measure._means(model, prompts, places(model.config, what))
    rows = torch.cat([emitted(model, ids)["blocks.0.attn.z"] for ids in prompts], -2)
    torch.testing.assert_close(means["blocks.0.attn.z", None][:, 0], rows.mean(-2))


def test_what_is_counted_and_what_is_ablated():
    model = random_model(MODELS["llama"])
    whole = -model.decoder(torch.tensor([IDS]))[0].log_softmax(-1)
    report = measure_ablation(model, [IDS], span="3:5", what=["blocks.1.attn.q", "embed"])
    assert report.value == pytest.approx(float(whole[2, IDS[3]] + whole[3, IDS[4]]) / 2)
    heads = range(model.config.layers[1].parts[0].heads)
    found = [(one.kind, one.index) for one in report.effects]
    assert found == [*(("attn.q", head) for head in heads), ("embed", None)]
    assert effects_map(report).columns[:2] == ["–", "0"]
    top = measure_ablation(model, [IDS], Answer(answer=None, versus=7), by="zero")
    assert top.metric == "difference"
    assert top.answer.id == int(whole[-1].argmin())
    edit = Edit(name="blocks.0.mlp_out", fn=lambda x, at: x.zero_())
    moved_V = model.decoder(torch.tensor([IDS]), edits=[edit])[0, -1] + whole[-1]
    (mlp,) = (one for one in top.effects if one.name == edit.name)
    assert mlp.value == pytest.approx(float(moved_V[top.answer.id] - moved_V[7]), abs=1e-9)
    for wrong in ({"prompts": [IDS[:1]]}, {"prompts": [IDS], "span": "0"}):
        with pytest.raises(UsageError, match="nothing comes before the first token"):
            measure_ablation(model, **wrong)
    pattern = measure_ablation(model, [IDS], what=["blocks.0.attn.pattern"], by="zero")
    without = measure_ablation(model, [IDS], what=["blocks.0.attn.z"], by="zero")
    assert red(pattern.checks) == set()
    scores = measure_ablation(model, [IDS], what=["blocks.0.attn.scores"], by="zero")
    assert red(scores.checks) == set(), "no token sees a later one"
    assert [one.value for one in pattern.effects] == pytest.approx(
        [one.value for one in without.effects], abs=1e-9
    )
    with pytest.raises(UsageError, match="`--by mean` fits no activation with"):
        measure_ablation(model, [IDS], what=["blocks.0.attn.pattern"])


def mirrored(place, rows, which, x, at):
    """The last head for the first: the head map transposed."""
    index = place.index if place.index is None else x.shape[1] - 1 - place.index
    return put(Place(**{**vars(place), "index": index}), rows, which, x, at)


def late(place, rows, which, x, at):
    """Each token gets what is of the next one."""
    return put(place, rows, which, x, at + 1)


def another_layer(sweep, *rest):
    """Runs begin with the stream before the layer above."""
    sweep._stream = {layer: sweep._stream.get(layer + 1, x) for layer, x in sweep._stream.items()}
    return call(sweep, *rest)


put, call = Place._put, Sweep._call
FAULTS = {
    "another head": (Place, "_put", mirrored, {"alone"}),
    "one position off": (Place, "_put", late, {"same"}),
    "another layer's stream": (Sweep, "_call", another_layer, {"same", "alone"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_a_check_red(monkeypatch, fault):
    owner, name, planted, checks = FAULTS[fault]
    model = random_model(MODELS["llama"])
    given = {"by": "resample", "other": OTHER, "what": ["blocks.0.attn.z", "blocks.1.attn.z"]}
    assert red(measure_ablation(model, [IDS], **given).checks) == set()
    monkeypatch.setattr(owner, name, planted)
    assert red(measure_ablation(model, [IDS], **given).checks) >= checks
