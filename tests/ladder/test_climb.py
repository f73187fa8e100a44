"""The climb: every rung agrees with the one below, slow ones are estimated, faults are found."""

import itertools

import pytest
import torch
from ladder_models import random_weights

from llmcli.ladder import climb as climbing
from llmcli.ladder.climb import climb
from llmcli.ladder.course import plan_course
from llmcli.ladder.heads import HeadsAsDimension
from llmcli.ladder.loops import Loops, multiply_adds

IDS = [5, 9, 2, 7]


def course(weights, **options):
    defaults = {"more": 2, "sequences": 3, "rounds": 1}
    return plan_course(weights, IDS, **(defaults | options))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("float64", 1e-9)])
def test_all_rungs_agree(kind, dtype, allowed):
    weights = random_weights(kind, dtype)
    rungs = climb(weights, course(weights))
    assert [rung.number for rung in rungs] == list(range(1, 9))
    assert rungs[0].difference is None
    for rung in rungs[1:]:
        assert rung.compared == "logits"
        assert rung.difference <= rung.allowed == allowed
        assert rung.ok
    assert all(rung.estimated is None for rung in rungs)
    assert [rung.sequences for rung in rungs] == [1] * 6 + [3, 3]


def test_speed_ups_are_ratios_of_medians():
    weights = random_weights("gpt2")
    rungs = climb(weights, course(weights, rounds=3))
    for below, rung in itertools.pairwise(rungs):
        assert rung.prompt_speedup == below.prompt_s.median / rung.prompt_s.median
        assert rung.token_speedup == below.token_s.median / rung.token_s.median
        assert rung.prompt_s.lowest <= rung.prompt_s.median <= rung.prompt_s.highest
    assert {rung.prompt_s.runs for rung in rungs} == {3}
    assert {rung.token_s.runs for rung in rungs} == {6}


def test_rows_and_heads_are_counted():
    weights = random_weights("gpt2")
    work = {rung.number: rung.token_work for rung in climb(weights, course(weights, rounds=0))}
    layers = len(weights.layers)
    assert work[1].gemv == work[1].gemm == 0
    assert work[2].gemm == 0
    assert work[3].gemv == 0
    # q, k, v, scores, contexts, out, up, down of every layer, and the head
    assert work[4].gemm == 8 * layers + 1
    assert work[5].gemm == 6 * layers + 1
    assert (work[6].gemv, work[6].gemm) == (6 * layers + 1, 0)
    assert work[7].gemv * 3 + work[7].gemm * 3 == pytest.approx(6 * layers + 1)
    assert work[6].flops < work[5].flops < work[1].flops


def test_the_course_is_what_the_model_says_next():
    weights = random_weights("llama")
    run = course(weights, more=3)
    assert run.prompts.tolist() == [[5, 9, 2, 7], [9, 2, 7, 5], [2, 7, 5, 9]]
    ids = list(IDS)
    for chosen in run.more.tolist():
        assert weights.decoder(torch.tensor([ids]))[0, -1].argmax() == chosen
        ids.append(chosen)


def test_a_rung_over_budget_is_estimated_from_layer_0_and_still_compared(monkeypatch):
    weights = random_weights("llama")
    rungs = climb(weights, course(weights, budget=0))
    assert {rung.estimated for rung in rungs} == {
        "layer 0 of 1 of 4 tokens", "layer 0 of 4 tokens"
    }  # fmt: skip
    assert rungs[1].compared == "layer 0, 1 of 4 tokens"
    assert rungs[2].compared == "layer 0, 4 of 4 tokens"
    assert all(rung.ok for rung in rungs)
    monkeypatch.setattr(HeadsAsDimension, "_merge", lambda self, c: c.flatten(0, -3).flip(0)
                        .transpose(-3, -2).flatten(-2))
    assert not climb(weights, course(weights, budget=0))[3].ok


def test_the_estimate_scales_by_what_the_loops_do():
    weights = random_weights("llama")
    config = weights.config
    run = course(weights, budget=0)
    (rung,) = climb(weights, run, numbers=[1])
    ratio = rung.token_s.median / rung.prompt_s.median
    assert ratio == pytest.approx(multiply_adds(config, 5) / multiply_adds(config, 4))
    assert climbing._ratio(Loops(weights), 4, 1) == pytest.approx(
        multiply_adds(config, 4) / multiply_adds(config, 1, 0)
    )


def test_only_the_rungs_that_are_asked_for():
    weights = random_weights("gpt2")
    rungs = climb(weights, course(weights, rounds=0), numbers=[6, 3, 8])
    assert [rung.number for rung in rungs] == [3, 6, 8]
    assert rungs[1].ok


def test_nan_is_no_agreement(monkeypatch):
    weights = random_weights("gpt2")
    nothing = HeadsAsDimension.forward

    def broken(self, ids, until=None):
        return nothing(self, ids, until) * torch.nan

    monkeypatch.setattr(HeadsAsDimension, "forward", broken)
    rungs = climb(weights, course(weights, rounds=0), numbers=[3, 4])
    assert not rungs[1].ok


def test_steps_of_the_first_layer_are_kept():
    weights = random_weights("llama")
    rungs = climb(weights, course(weights, rounds=0))
    for rung in rungs:
        assert rung.steps, rung.number
    moved = {step.formula: step.moved for step in rungs[3].steps if step.source is not None}
    assert moved["Kᵀ"] is False
    assert moved["C as n × d, heads merged"] is True
