"""Products, elements, reductions and filters of logits equal their evaluation or their loop."""

import math
import struct

import loops
import pytest
import torch
from evaluated import derive, evaluate, project, softmax
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmcli.engine.sampling import Sampling, choose, filtered
from llmcli.graph import ops
from llmcli.graph.evaluation.rule import products
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
    rows = {"a": tensor([a]), "b": tensor([b])}
    for slow in (evaluate, derive):
        added = slow(ops.Add(parts=("a", "b"), before=()), rows)
        assert torch.equal(added[0], tensor(a) + tensor(b))
        assert torch.equal(slow(ops.Gate(act="a", up="b"), rows)[0], tensor(a) * tensor(b))
        dot = slow(*project(rows["a"], rows["b"]))
        assert dot.item() == near(torch.dot(tensor(a), tensor(b)).item())
        matrix = loops.outer(c, a)
        assert matrix == torch.outer(tensor(c), tensor(a)).tolist()
        gemv = slow(*project(rows["b"], tensor(matrix)))[0].tolist()
        assert gemv == near(linear(rows["b"], tensor(matrix), None)[0].tolist())


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="shorter"):
        products([1.0, 2.0], [1.0])


@settings(deadline=None)
@given(vectors)
def test_reductions_from_left_to_right_and_as_a_tree(x):
    assert loops.total(x) == near(tensor(x).sum().item())
    assert loops.total(x) / len(x) == near(tensor(x).mean().item())
    assert max(x) == tensor(x).amax().item()
    sums = loops.tree(x, lambda a, b: a + b)
    assert sums[0] == x
    assert sums[-1] == [near(math.fsum(x))]
    assert len(sums) - 1 == math.ceil(math.log2(len(x)))
    for level in sums:  # nothing is lost on the way
        assert math.fsum(level) == near(math.fsum(x))
    assert loops.tree(x, max)[-1] == [max(x)]


def test_the_levels_of_a_tree():
    assert loops.tree([1, 2, 3, 4, 5], lambda a, b: a + b) == [
        [1, 2, 3, 4, 5], [5, 7, 3], [8, 7], [15]
    ]  # fmt: skip


def test_a_tree_rounds_less_than_a_loop():
    def single(x):
        return struct.unpack("f", struct.pack("f", x))[0]

    x = [single(0.1)] * 4096
    exact, loop = math.fsum(x), 0.0
    for number in x:
        loop = single(loop + number)
    tree = loops.tree(x, lambda a, b: single(a + b))[-1][0]
    assert abs(tree - exact) < abs(loop - exact) / 100


@settings(deadline=None)
@given(vectors)
def test_softmax(x):
    expected = tensor(x).softmax(-1).tolist()
    assert softmax(x) == pytest.approx(expected, rel=1e-12, abs=1e-300)
    loops.softmax_in_place(x)
    assert x == pytest.approx(expected, rel=1e-12, abs=1e-300)


coarse = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=12)  # many ties


@settings(deadline=None)
@given(coarse, st.integers(1, 13))
def test_argmax_and_top_k(logits, k):
    best = choose(tensor([logits]), Sampling(temperature=0), None)[0].item()
    assert loops.argmax(logits) == best == logits.index(max(logits))
    fast = filtered(tensor([logits]), Sampling(**{**OFF, "top_k": k}))[0].tolist()
    assert fast == near(softmax(loops.top_k(logits, k)))
    assert sum(p > 0 for p in fast) == min(k, len(logits))


@settings(deadline=None)
@given(coarse, st.sampled_from([0.05, 0.31, 0.7, 0.9, 0.999]), st.sampled_from([0.3, 1.0, 2.5]))
def test_top_p_after_temperature(logits, p, t):
    scaled = loops.temperature(logits, t)
    ranked = sorted(softmax(scaled), reverse=True)
    sums = [math.fsum(ranked[: i + 1]) for i in range(len(ranked))]
    assume(min(abs(s - p) for s in sums) > 1e-9)  # a line met within rounding may fall either way
    kept = loops.top_p(scaled, p)
    fast = filtered(tensor([logits]), Sampling(**{**OFF, "temperature": t, "top_p": p}))
    assert fast[0].tolist() == near(softmax(kept))
    # the fewest: without the last that stayed, p is not reached
    stayed = sum(x > -math.inf for x in kept)
    assert math.fsum(ranked[:stayed]) >= p > math.fsum(ranked[: stayed - 1])
