"""Routing against loops over the tokens, as the papers describe it."""

import math
from functools import partial

import pytest
import torch
from tensors import drawn, routes

from llmcli.config.experts import ExpertGroups, RoutingConfig
from llmcli.ops.routing import choose, weigh
from llmcli.weights.dense import Dense
from llmcli.weights.weight import Weight

random = partial(drawn, dtype=torch.float64)


def test_the_largest_scores_choose_and_of_equal_ones_the_first():
    scores = torch.tensor([[[1.0, 5.0, 3.0, 5.0], [0.0, 0.0, 0.0, 0.0]]])
    chosen = choose(scores, None, RoutingConfig(chosen=3))
    assert chosen.tolist() == [[[1, 3, 2], [0, 1, 2]]]


def test_a_correction_chooses_and_does_not_weigh():
    scores, correction = torch.tensor([[[0.1, 0.2, 0.7]]]), torch.tensor([1.0, 0.0, 0.0])
    routing = RoutingConfig(chosen=2, correction=True, renormalized=True, scale=3.0)
    chosen = choose(scores, correction, routing)
    assert chosen.tolist() == [[[0, 2]]]
    right = torch.tensor([0.1 / 0.8 * 3, 0.7 / 0.8 * 3])
    torch.testing.assert_close(weigh(scores, chosen, routing)[0, 0], right)


def by_groups(scores, groups, kept, count, best_of):
    """Of one token, by sorting lists."""
    size = len(scores) // groups
    best = sorted(
        range(groups), key=lambda g: -sum(sorted(scores[g * size : (g + 1) * size])[-best_of:])
    )
    open_ = [e for e in range(len(scores)) if e // size in best[:kept]]
    return sorted(open_, key=lambda e: -scores[e])[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by the kernel, by PyTorch
@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_groups(kept, best, dtype):
    scores = random(2, 50, 12, dtype=dtype)
    routing = RoutingConfig(chosen=3, groups=ExpertGroups(count=4, kept=kept, best=best))
    chosen = choose(scores, None, routing)
    for row, found in zip(scores.flatten(0, 1), chosen.flatten(0, 1), strict=True):
        assert found.tolist() == by_groups(row.tolist(), 4, kept, 3, best)


@pytest.mark.parametrize(
    ("routing", "right"),
    [
        (RoutingConfig(chosen=2), [0.5, 0.2]),
        (RoutingConfig(chosen=2, renormalized=True), [5 / 7, 2 / 7]),
        (RoutingConfig(chosen=2, scale=2.0), [1.0, 0.4]),
        (RoutingConfig(chosen=2, scores="softmax of the chosen"),
         [1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(0.3))]),
    ],
)  # fmt: skip
def test_weights(routing, right):
    scores = torch.tensor([[[0.2, 0.1, 0.5]]], dtype=torch.float64)
    chosen = choose(scores, None, routing)
    assert chosen.tolist() == [[[2, 0]]]
    assert weigh(scores, chosen, routing)[0, 0].tolist() == pytest.approx(right)


def test_weights_of_scores_that_are_all_0_are_0():
    routing = RoutingConfig(chosen=2, scores="sigmoid", renormalized=True)
    scores = torch.zeros(1, 1, 4)
    assert weigh(scores, choose(scores, None, routing), routing).tolist() == [[[0.0, 0.0]]]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_pair_has_the_product_of_its_expert(static, by_pair, wide, biased, dtype):
    batch, tokens, count, experts = 2, 7, 3, 5
    assignment, pairs = routes(experts, batch, count, tokens, static=static)
    w_ENK = random(experts, 6, 32, seed=1, dtype=dtype)
    x = random(batch * (count if by_pair else 1) * tokens, 32, seed=2, dtype=dtype)
    taken = assignment.by_pair if by_pair else assignment
    bias = random(experts, 6, seed=3, dtype=dtype) if biased else None
    out = Dense(w_ENK).matmul_routed(x, taken, bias, wide=wide)
    for p, (row, expert) in enumerate(pairs):
        right = w_ENK[expert].double() @ x[p if by_pair else row].double()
        if bias is not None:
            right += bias[expert].double()
        assert (out[p].double() - right).abs().max() < TOLERANCE[dtype]
    assert out.dtype == (torch.float32 if wide and dtype == torch.bfloat16 else dtype)


def test_a_matrix_has_no_experts():
    assignment, _ = routes(1, 1, 1, 1, static=False)
    with pytest.raises(TypeError, match="no experts"):
        Dense(random(3, 4)).matmul_routed(random(1, 4), assignment)
    with pytest.raises(TypeError, match="no experts"):
        Weight.matmul_routed(Dense(random(3, 4)), random(1, 4), assignment)
