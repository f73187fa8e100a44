"""Which experts tokens take: what is shown is what ran, and planted faults turn checks red."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from covers import in_turn
from decoder_faults import red, wrap
from small_models import ids, random_model
from unfused import emitted
from zoo import MODELS

from llmcli.commands.experts import measure
from llmcli.commands.experts.command import ExpertsOptions
from llmcli.config.experts import ExpertGroups
from llmcli.engine.session import Session
from llmcli.inspect.passes import Passes
from llmcli.parts import experts

MIXTURES = (
    "experts", "experts beside dense layers", "experts by groups", "experts after the choice",
    "weighted inputs of experts", "all experts",
)  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
PROMPT = tuple(ids(1, 11)[0].tolist())


def measured(of, prompt=PROMPT, *, generate=0):
    layers = ExpertsOptions().layers(of.config)
    return measure.measure_experts(Passes(of, prompt, generate), layers, span=range)


@pytest.mark.parametrize(("name", "dtype"), in_turn(MIXTURES, DTYPES))
def test_every_check_is_green(name, dtype):
    report = measured(random_model(MODELS[name], dtype), generate=3)
    assert [check.name for check in report.checks] == ["choice", "weights", "sum", "loads", "steps"]
    assert red(report.checks) == set()
    assert len(report.tokens) == len(report.positions) == 14
    assert report.from_prompt == 11


@pytest.mark.parametrize("name", MIXTURES)
def test_choices_weights_loads_and_shares_are_what_was_emitted(name):
    of = random_model(MODELS[name])
    seen = emitted(of, PROMPT)
    for layer in measured(of).layers:
        p = f"blocks.{layer.layer}"
        chosen = seen[f"{p}.moe.expert_idx"].numpy()
        np.testing.assert_array_equal(layer.chosen, chosen)
        np.testing.assert_allclose(layer.weights, seen[f"{p}.moe.expert_weight"].numpy())
        load = [int((chosen == expert).sum()) for expert in range(layer.experts)]
        assert list(layer.load) == load
        assert sum(load) == len(PROMPT) * layer.per_token
        assert layer.unused == tuple(e for e, count in enumerate(load) if not count)
        parts = [count / sum(load) for count in load if count]
        entropy = -math.fsum(part * math.log(part) for part in parts)
        assert layer.entropy == pytest.approx(entropy)
        assert layer.balance == pytest.approx(entropy / math.log(layer.experts))
        shared = seen.get(f"{p}.moe.shared_out")
        if shared is None:
            assert layer.shared_share is None
            continue
        weight, out = seen[f"{p}.moe.expert_weight"], seen[f"{p}.moe.expert_out"]
        weight = torch.ones_like(weight) if f"{p}.moe.expert_in" in seen else weight
        routed = torch.einsum("tk,ktd->td", weight, out).norm(dim=-1)
        share = shared.norm(dim=-1) / (shared.norm(dim=-1) + routed)
        np.testing.assert_allclose(layer.shared_shares, share.numpy(), rtol=1e-6)
        assert layer.shared_share == pytest.approx(float(share.mean()))


def margin_by_hand(routing, scores, correction):
    """With lists: the scores that choose, without the groups that are left out."""
    scores = [s + c for s, c in zip(scores, correction, strict=True)]
    size = len(scores) // routing.groups.count
    best = []
    for group in range(routing.groups.count):
        inside = sorted(scores[group * size : (group + 1) * size])[-2:]
        best.append((sum(inside), group))
    kept = {group for _, group in sorted(best)[-routing.groups.kept :]}
    order = sorted((s for e, s in enumerate(scores) if e // size in kept), reverse=True)
    return order[routing.chosen - 1] - order[routing.chosen]


@pytest.mark.parametrize("name", MIXTURES[:-1])
def test_margins_are_of_the_scores_that_choose(name):
    of = random_model(MODELS[name])
    seen = emitted(of, PROMPT)
    for layer in measured(of).layers:
        part = of.decoder.blocks[layer.layer].parts[f"blocks.{layer.layer}.moe"]
        leaf = "router_logits" if layer.scores == "logits" else "router_probs"
        rows = seen[f"blocks.{layer.layer}.moe.{leaf}"].tolist()
        correction = [0.0] * layer.experts if part.correction is None else part.correction.tolist()
        assert layer.corrected == (part.correction is not None)
        found = [margin_by_hand(part.config.routing, row, correction) for row in rows]
        np.testing.assert_allclose(layer.margins, found, rtol=1e-6)
        assert layer.smallest_margin == pytest.approx(min(found))
        assert layer.smallest_at == found.index(min(found))
        assert layer.mean_margin == pytest.approx(sum(found) / len(found))


def test_where_all_are_chosen_nothing_is_refused():
    for layer in measured(random_model(MODELS["all experts"])).layers:
        assert np.isnan(layer.margins).all()
        assert math.isnan(layer.smallest_margin)
        assert layer.smallest_at is None
        assert layer.balance == pytest.approx(1)


@pytest.mark.parametrize("name", ["experts by groups", "experts beside dense layers"])
def test_in_chunks_and_token_by_token_it_is_the_same(name, monkeypatch):
    of = random_model(MODELS[name])
    whole = measured(of)
    monkeypatch.setattr(Session, "chunk", 4)
    chunked = measured(of)
    assert red(chunked.checks) == set()
    assert "chunks" in {check.name for check in chunked.checks}
    for one, other in zip(whole.layers, chunked.layers, strict=True):
        np.testing.assert_array_equal(one.chosen, other.chosen)
        np.testing.assert_allclose(one.weights, other.weights)
        np.testing.assert_allclose(one.margins, other.margins, rtol=1e-5)


def routed(name, **changes):
    """Plants that function of the routing with another configuration."""
    return wrap(
        experts, name, lambda plain, *x: plain(*x[:2], dataclasses.replace(x[2], **changes))
    )


def corrected_scores_that_weigh(monkeypatch, decoder):
    weigh, part = experts.weigh, decoder.blocks[0].parts["blocks.0.moe"]
    monkeypatch.setattr(experts, "weigh", lambda s, *rest: weigh(s + part.correction, *rest))


def no_shared_expert(monkeypatch, decoder):
    part = decoder.blocks[1].parts["blocks.1.moe"]
    shared = part.shared
    monkeypatch.setattr(part, "shared", lambda *x: torch.zeros_like(shared(*x)))


# of each fault the model that it is planted in, the check that it has to turn red, what plants it
FAULTS = {
    "a choice that ignores the correction": ("experts by groups", "choice", wrap(
        experts, "choose", lambda choose, scores, c, routing: choose(scores, None, routing)
    )),
    "a choice of all groups": (
        "experts by groups", "choice", routed("choose", groups=ExpertGroups())
    ),
    "the expert behind the last one": ("experts", "choice", wrap(
        experts, "choose",
        lambda choose, s, c, r: choose(s, c, dataclasses.replace(r, chosen=3))[..., [0, 2]],
    )),
    "the same expert twice": ("experts", "choice", wrap(
        experts, "choose", lambda choose, *x: choose(*x)[..., [0, 0]])),
    "the smallest score first": ("experts", "choice", wrap(
        experts, "choose", lambda choose, *x: choose(*x).flip(-1))),
    "weights of another expert": ("experts", "weights", wrap(
        experts, "weigh", lambda weigh, *x: weigh(*x).flip(-1))),
    "corrected scores that weigh": ("experts by groups", "weights", corrected_scores_that_weigh),
    "weights that are not renormalized": ("experts", "weights", routed(
        "weigh", renormalized=False)),
    "weights that are not scaled": ("experts by groups", "weights", routed("weigh", scale=1.0)),
    "all of the shared expert": ("experts beside dense layers", "weights", wrap(
        experts, "share", lambda share, x, sigmoid: (
            torch.ones_like(x) if x.shape[-1] == 1 else share(x, sigmoid=sigmoid)))),
    "the shared expert left out": ("experts beside dense layers", "sum", no_shared_expert),
    "a load that counts the first choice alone": ("experts by groups", "loads", wrap(
        measure, "loads", lambda loads, chosen, count: loads(chosen[:, :1], count))),
    "a load without the last expert": ("experts", "loads", wrap(
        measure, "loads",
        lambda loads, chosen, count: loads(chosen, count) * (np.arange(count) < count - 1),
    )),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), in_turn(list(FAULTS), DTYPES))
def test_a_fault_turns_its_check_red(name, dtype, monkeypatch):
    """Of models that are green without it."""
    config, check, plant = FAULTS[name]
    of = random_model(MODELS[config], dtype)
    plant(monkeypatch, of.decoder)
    assert red(measured(of).checks) == {check}
