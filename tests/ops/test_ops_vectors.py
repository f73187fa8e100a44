"""Products, elements, reductions and filters of logits: the twin equals what the model runs."""

import math
import struct

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmcli.generation.sampling import Sampling, choose, filtered
from llmcli.ops import twins
from llmcli.ops.linear import linear

F64 = torch.float64
numbers = st.floats(-50, 50)
vectors = st.lists(numbers, min_size=1, max_size=9)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def tensor(values):
    return torch.tensor(values, dtype=F64)


def near(values):
    return pytest.approx(values, rel=1e-10, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9), vectors)
def test_products_and_elements(pairs, c):
    a, b = (list(v) for v in zip(*pairs, strict=True))
    assert twins.dot(a, b) == near(torch.dot(tensor(a), tensor(b)).item())
    assert twins.add(a, b) == (tensor(a) + tensor(b)).tolist()
    assert twins.mul(a, b) == (tensor(a) * tensor(b)).tolist()
    matrix = twins.outer(c, a)
    assert matrix == torch.outer(tensor(c), tensor(a)).tolist()
    assert twins.gemv(matrix, b) == near(linear(tensor([b]), tensor(matrix), None)[0].tolist())


def test_lengths_must_agree():
    for twin in (twins.dot, twins.add, twins.mul):
        with pytest.raises(ValueError, match="shorter"):
            twin([1.0, 2.0], [1.0])


@settings(deadline=None)
@given(vectors)
def test_reductions_from_left_to_right_and_as_a_tree(x):
    assert twins.total(x) == near(tensor(x).sum().item())
    assert twins.mean(x) == near(tensor(x).mean().item())
    assert twins.largest(x) == tensor(x).amax().item()
    sums = twins.tree(x, lambda a, b: a + b)
    assert sums[0] == x
    assert sums[-1] == [near(math.fsum(x))]
    assert len(sums) - 1 == math.ceil(math.log2(len(x)))
    for level in sums:  # nothing is lost on the way
        assert math.fsum(level) == near(math.fsum(x))
    assert twins.tree(x, max)[-1] == [twins.largest(x)]


def test_the_levels_of_a_tree():
    assert twins.tree([1, 2, 3, 4, 5], lambda a, b: a + b) == [
        [1, 2, 3, 4, 5], [5, 7, 3], [8, 7], [15]
    ]  # fmt: skip


def test_a_tree_rounds_less_than_a_loop():
    def single(x):
        return struct.unpack("f", struct.pack("f", x))[0]

    x = [single(0.1)] * 4096
    exact, loop = math.fsum(x), 0.0
    for number in x:
        loop = single(loop + number)
    tree = twins.tree(x, lambda a, b: single(a + b))[-1][0]
    assert abs(tree - exact) < abs(loop - exact) / 100


@settings(deadline=None)
@given(vectors)
def test_softmax(x):
    expected = tensor(x).softmax(-1).tolist()
    assert twins.softmax(x) == pytest.approx(expected, rel=1e-12, abs=1e-300)
    twins.softmax_in_place(x)
    assert x == pytest.approx(expected, rel=1e-12, abs=1e-300)


coarse = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=12)  # many ties


@settings(deadline=None)
@given(coarse, st.integers(1, 13))
def test_argmax_and_top_k(logits, k):
    best = choose(tensor([logits]), Sampling(temperature=0), None)[0].item()
    assert twins.argmax(logits) == best == logits.index(max(logits))
    fast = filtered(tensor([logits]), Sampling(**{**OFF, "top_k": k}))[0].tolist()
    assert fast == near(twins.softmax(twins.top_k(logits, k)))
    assert sum(p > 0 for p in fast) == min(k, len(logits))


@settings(deadline=None)
@given(coarse, st.sampled_from([0.05, 0.31, 0.7, 0.9, 0.999]), st.sampled_from([0.3, 1.0, 2.5]))
def test_top_p_after_temperature(logits, p, t):
    scaled = twins.temperature(logits, t)
    ranked = sorted(twins.softmax(scaled), reverse=True)
    sums = [math.fsum(ranked[: i + 1]) for i in range(len(ranked))]
    assume(min(abs(s - p) for s in sums) > 1e-9)  # a line met within rounding may fall either way
    kept = twins.top_p(scaled, p)
    fast = filtered(tensor([logits]), Sampling(**{**OFF, "temperature": t, "top_p": p}))
    assert fast[0].tolist() == near(twins.softmax(kept))
    # the fewest: without the last that stayed, p is not reached
    stayed = sum(x > -math.inf for x in kept)
    assert math.fsum(ranked[:stayed]) >= p > math.fsum(ranked[: stayed - 1])
