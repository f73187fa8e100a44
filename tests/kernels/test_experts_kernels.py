"""The kernels of mixtures of experts: as their twins compute it, at every level."""

from __future__ import annotations

import itertools
import math

import numpy as np
import packed_twin
import pytest
import torch
from kernel_sources import by_pytorch, scores_like
from needs import needs_kernels
from tensors import drawn, routes, same
from test_packed import file_rows, inputs

from llmcli.config.experts import ExpertGroups, RoutingConfig
from llmcli.ops import routing
from llmcli.ops.product import product_float32
from llmcli.weights.dense import Dense
from llmcli.weights.packed import Packed, fused

KINDS = ("usual", "equal", "ties", "special")

ROUTINGS = [
    RoutingConfig(chosen=1), RoutingConfig(chosen=12, renormalized=True),
    RoutingConfig(chosen=3, renormalized=True, scale=2.5, correction=True),
    RoutingConfig(chosen=4, scores="softmax of the chosen", renormalized=True),
    RoutingConfig(chosen=12, scores="softmax of the chosen"),
    *(RoutingConfig(chosen=3, groups=groups, correction=groups.best == 2) for groups in (
        ExpertGroups(count=2), ExpertGroups(count=4, best=1), ExpertGroups(count=4, kept=3),
        ExpertGroups(count=6, kept=2), ExpertGroups(count=12, kept=5, best=1),
    )),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing_", ROUTINGS, ids=str)
def test_the_choice_is_that_of_the_twin(levels, monkeypatch, routing_, kind):
    scores = scores_like(40, 12, kind).view(2, 20, 12)
    correction = torch.linspace(-1, 1, 12) if routing_.correction else None
    expected = by_pytorch(monkeypatch, routing.choose, scores, correction, routing_)
    for _ in levels():
        assert torch.equal(routing.choose(scores, correction, routing_), expected)


def test_one_expert_is_chosen(levels):
    for _ in levels():
        for value in (0.5, math.nan, -math.inf):
            scores = torch.full((1, 3, 1), value)
            assert routing.choose(scores, None, RoutingConfig(chosen=1)).tolist() == [[[0]] * 3]


@pytest.mark.parametrize("factors", [None, torch.linspace(-1, 2, 12)], ids=["plain", "factors"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing_", ROUTINGS, ids=str)
def test_weights_are_those_of_the_twin(every_level, monkeypatch, routing_, kind, factors):
    """The same bits at every level, and as float64 has them but for float32's roundings."""
    scores = scores_like(40, 12, kind).view(2, 20, 12)
    if routing_.scores == "softmax":  # no weights of both signs, whose sum may be anything
        scores = scores.abs()
    chosen = by_pytorch(monkeypatch, routing.choose, scores, None, routing_)
    wide = None if factors is None else factors.double()
    expected = by_pytorch(monkeypatch, routing.weigh, scores.double(), chosen, routing_, wide)
    found = every_level(lambda: routing.weigh(scores, chosen, routing_, factors))
    if kind == "special" and routing_.renormalized:  # sums that float32 has not got
        usual = scores.gather(-1, chosen).abs().amax(-1) < 1e30
        found, expected = found[usual], expected[usual]
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (4, 16, 32), (5, 33, 7), (9, 20, 100)])
def test_small_float32_matrices_have_the_bits_of_the_twin(every_level, shape):
    """Lane j of 16 sums columns j, j + 16 …; lanes are added in pairs; no fused multiply-add."""
    rows, outputs, columns = shape
    x, w = drawn(rows, columns + 2, seed=1)[:, 1:-1], drawn(outputs, columns, seed=2)
    b = torch.linspace(-1, 1, outputs)
    lanes = torch.zeros(rows, outputs, 16)
    for k in range(columns):
        lanes[..., k % 16] += x[:, None, k] * w[None, :, k]
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    found = every_level(lambda: (routing.logits(x, w, None), routing.logits(x, w, b)))
    same(found, (lanes[..., 0], lanes[..., 0] + b))


# experts, batch, chosen, tokens
MIXTURES = [(1, 1, 1, 1), (8, 1, 3, 1), (4, 1, 4, 1), (5, 3, 2, 1), (6, 2, 3, 4), (40, 1, 8, 3)]


@needs_kernels
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("shape", [(16, 256), (48, 512)], ids=str)
def test_packed_experts_have_the_bits_of_the_twin(levels, mixture, shape, biased):
    """Several formats in one call; each pair has the bits of a product by itself."""
    experts, *rest = mixture
    columns, formats = shape[1], ("Q4_K", "Q8_0")
    route, pairs = routes(experts, *rest)
    raws = [file_rows(f, experts * rows, columns, 20 + rows)
            for f, rows in zip(formats, (shape[0], 16), strict=True)]  # fmt: skip
    pieces = []
    for f, raw in zip(formats, raws, strict=True):
        piece = Packed(f, (experts, len(raw) // experts, columns), torch.device("cpu"))
        piece.write(torch.arange(len(raw)), torch.from_numpy(raw))
        pieces.append(piece)
    outputs = shape[0] + 16
    bias = drawn(experts, outputs + 3, seed=6)[:, 2:-1] if biased else None
    for by_pair in (False, True):
        x = inputs(len(pairs) if by_pair else rest[0] * rest[2], columns, 21)
        expected = np.empty((len(pairs), outputs), np.float32)
        for p, (row, expert) in enumerate(pairs):
            one = x[p if by_pair else row][None]
            parts = [packed_twin.product(f, raw.reshape(experts, -1, raw.shape[1])[expert], one)
                     for f, raw in zip(formats, raws, strict=True)]  # fmt: skip
            expected[p] = np.concatenate(parts, 1)
            if bias is not None:
                expected[p] += bias[expert].numpy()
        both = fused(pieces)
        for _ in levels():
            taken = route.by_pair if by_pair else route
            found = both.matmul_routed(torch.from_numpy(x), taken, bias)
            same(found, torch.from_numpy(expected))
            alone = pieces[1].matmul_routed(
                torch.from_numpy(x), taken, None if bias is None else bias[:, shape[0] :]
            )
            same(alone, torch.from_numpy(expected[:, shape[0] :]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (70, 576)], ids=str)
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
], ids=str)  # fmt: skip
def test_experts_of_16_bits_have_the_bits_of_dense_matrices(levels, mixture, shape, biased, dtypes):
    experts, *rest = mixture
    outputs, columns = shape
    route, pairs = routes(experts, *rest)
    w = drawn(experts * outputs, columns, seed=7).view(experts, outputs, columns).to(dtypes[1])
    gaps = torch.zeros(experts, outputs + 2, columns + 1, dtype=dtypes[1])[:, 1:-1, 1:]
    gaps[...] = w
    bias = drawn(experts, outputs + 1, seed=8)[:, 1:] if biased else None
    for _, by_pair in itertools.product(levels(), (False, True)):
        rows = len(pairs) if by_pair else rest[0] * rest[2]
        x = drawn(rows, columns, seed=9).to(dtypes[0])
        if rows > 1:  # which stays with its pairs
            x[1, 0] = math.nan if biased else math.inf
        taken = route.by_pair if by_pair else route
        expected = torch.cat([
            product_float32(
                x[p if by_pair else row][None].to(dtypes[0]), w[expert],
                None if bias is None else bias[expert],
            )
            for p, (row, expert) in enumerate(pairs)
        ])  # fmt: skip
        for weight in (w, gaps):
            same(Dense(weight, dtypes[0]).matmul_routed(x, taken, bias, wide=True), expected)
        narrow = Dense(w, dtypes[0]).matmul_routed(x, taken, bias)
        same(narrow, expected.to(dtypes[0]))
