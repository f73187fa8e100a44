"""Every fast operation equals its evaluation, or its formula, in float64 to rounding."""

import math
import sys

import pytest
import torch
from evaluated import activated, attention, derive, evaluate, project, softplus
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.config.attention import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from llmcli.config.mlp import GateClamp
from llmcli.config.norm import NormConfig
from llmcli.evaluate.rule import products
from llmcli.graph import ops
from llmcli.ops import activations, elements, norm, rope
from llmcli.ops.attention import attend, scores, visible_keys
from llmcli.ops.linear import linear

F64 = torch.float64
numbers = st.floats(-50, 50)
vectors = st.lists(numbers, min_size=1, max_size=9)


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
        matrix = torch.outer(tensor(c), tensor(a))
        gemv = slow(*project(rows["b"], matrix))[0].tolist()
        assert gemv == near(linear(rows["b"], matrix, None)[0].tolist())


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="shorter"):
        products([1.0, 2.0], [1.0])


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=2, max_size=9))
def test_norms(rows):
    x, w, b = zip(*rows, strict=True)
    tx, tw, tb = (torch.tensor(v, dtype=F64) for v in (x, w, b))
    two = torch.stack((tx, tb))  # one row takes another way than several
    given = {"x": two}, {"w": tw, "b": tb}
    rms = ops.Normalize(source="x", norm=NormConfig(kind="rms", eps=1e-5), weight="w")
    layer = ops.Normalize(source="x", norm=NormConfig(kind="layer", eps=1e-5), weight="w", bias="b")
    for slow in (evaluate, derive):
        expected = slow(rms, *given)
        torch.testing.assert_close(norm.rms_norm(tx, tw, 1e-5), expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(norm.rms_norm(two, tw, 1e-5), expected, rtol=1e-9, atol=1e-9)
        expected = slow(layer, *given)
        for x, out in ((tx, expected[0]), (two, expected)):
            fast = norm.layer_norm(x, tw, tb, 1e-5)
            torch.testing.assert_close(fast, out, rtol=1e-6, atol=1e-6)
    # the scale is what the row is divided by
    torch.testing.assert_close(
        tx / norm.rms_scale(tx, 1e-5) * tw, norm.rms_norm(tx, tw, 1e-5), rtol=1e-9, atol=1e-9
    )


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=9), st.sampled_from([1e-6, 0.5]))
def test_l2_norm(x, eps):
    tx = torch.tensor(x, dtype=F64)
    fast = norm.l2_norm(tx, eps)
    slow = tx / math.sqrt(math.fsum(a * a for a in x) + eps)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    length = tx.norm()
    assert fast.norm() <= 1 + 1e-12
    assert math.isclose(fast.norm(), length / (length**2 + eps).sqrt(), abs_tol=1e-12)


def test_norm_statistics_in_float32_for_bfloat16():
    x = (torch.arange(1, 4097) / 64).bfloat16()
    w = torch.ones(4096).bfloat16()
    exact = norm.rms_norm(x.double(), w.double(), 1e-6)
    error = (norm.rms_norm(x, w, 1e-6).double() - exact).abs() / exact
    assert error.max() < 2**-8  # one rounding of the result, no error of the statistic
    assert norm.rms_scale(x, 1e-6).dtype == torch.float32
    exact = norm.l2_norm(x.double(), 1e-6)
    narrow = norm.l2_norm(x, 1e-6)
    assert narrow.dtype == torch.bfloat16
    assert ((narrow.double() - exact).abs() / exact).max() < 2**-8


@settings(deadline=None)
@given(st.floats(-30, 30))
def test_activations(x):
    for name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "sigmoid"):
        number = torch.tensor(x, dtype=F64)
        fast = activations.activation(name)(number).item()
        slow = activated(name, number).item()
        assert math.isclose(fast, slow, rel_tol=1e-9, abs_tol=1e-12)
    assert activations.activation("relu")(torch.tensor(x)).item() >= 0


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_clamped_gates(dtype):
    """The kernels' (float32), PyTorch's and the formulas', beyond both bounds and at them."""
    x, y = (torch.cat((torch.linspace(-9, 9, 41), torch.tensor([7.0, -7.0]))) for _ in range(2))
    x, y = (part.flatten().to(dtype) for part in torch.meshgrid(x, y, indexing="ij"))
    # of 1.702 · 9 one rounding is 15 of its exponential
    near = (2 if dtype == torch.bfloat16 else 20) * torch.finfo(dtype).eps
    for name in ("quick_gelu", "silu", "relu", "relu2"):
        found = activations.activation(name, 7.0)(x)
        op = ops.Activate(source="x", function=name, limit=7.0)
        exact = evaluate(op, {"x": x.double()[None]})[0]
        torch.testing.assert_close(found.double(), exact, rtol=near, atol=1e-30)
        assert torch.equal(found, activations.activation(name)(x.clamp(max=7.0)))
    clamp = GateClamp(limit=7.0, offset=1.0)
    op = ops.Gate(act="x", up="y", clamp=clamp)
    exact = evaluate(op, {"x": x.double()[None], "y": y.double()[None]})[0]
    assert torch.equal(exact, x.double() * (y.double().clamp(-7, 7) + 1))
    found = elements.gate(x, y, clamp)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=0)
    assert elements.gate(x[:1] * torch.nan, y[:1], clamp).isnan().all()
    assert activations.activation("quick_gelu", 7.0)(x[:1] * torch.nan).isnan().all()


@settings(deadline=None)
@given(st.floats(-800, 800), st.sampled_from([0.5, 30.0, 50.0]))
def test_gates_and_caps(x, cap):
    tx, slow = torch.tensor(x, dtype=F64), cap * math.tanh(x / cap)
    assert math.isclose(activations.soft_cap(tx, cap).item(), slow, rel_tol=1e-12, abs_tol=1e-13)
    # x / cap, tanh and the product round once each; numbers near 0 lie 5e-324 apart
    rounded = abs(x) * (1 + 3 * sys.float_info.epsilon) + 2 * cap * 5e-324
    assert abs(slow) <= min(cap, rounded)
    fast, slow = activations.softplus(tx).item(), softplus(x)
    assert math.isclose(fast, slow, rel_tol=1e-12, abs_tol=2.1e-9 if x > 20 else 0)
    assert fast >= max(x, 0)


def test_caps_and_softplus_of_narrow_and_of_no_numbers():
    x = torch.linspace(-90, 90, 4001).bfloat16()
    for op in (activations.softplus, lambda x: activations.soft_cap(x, 30.0)):
        exact, out = op(x.double()), op(x)
        assert out.dtype == torch.bfloat16
        assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-30).all()
        assert op(x.to("meta")).dtype == torch.bfloat16
    assert x[0] == -90  # the input is left alone
    wide = x.float()
    activations.soft_cap(wide, 30.0)
    assert torch.equal(wide, x.float())


SCALINGS = {
    "none": None,
    "linear": LinearScaling(factor=4.0),
    "dynamic": DynamicScaling(factor=2.0, original=64),
    "llama3": Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=128),
    "yarn": YarnScaling(factor=4.0, original=64, attention_factor=1.1386),
    "longrope": LongRopeScaling(
        short=(1.0,) * 8, long=(1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0), original=64,
        attention_factor=1.2,
    ),
    "factors": FrequencyFactors(source="t", factors=tuple(float(i + 1) for i in range(8))),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("length", [10, 200])
def test_rotate_equals_its_twin(kind, length):
    config = RopeConfig(theta=10000.0, dims=16, scaling=SCALINGS[kind])
    frequencies, factor = rope.frequencies(config, length)
    assert frequencies.shape == (8,)
    assert frequencies.dtype == F64
    x = torch.randn(2, 3, 5, 20, dtype=F64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length - 5, length)
    cos, sin = rope.tables(frequencies, positions, factor)
    heads_last = x.transpose(1, 2)
    fast = rope.rotate(heads_last, cos.unsqueeze(-2), sin.unsqueeze(-2)).transpose(1, 2)
    for b in range(2):
        slow = evaluate(
            ops.Rotate(source="x", rope=config), {"x": x[b]},
            positions=positions.tolist(), length=length,
        )  # fmt: skip
        torch.testing.assert_close(fast[b], slow, rtol=1e-12, atol=1e-12)
    assert torch.equal(fast[..., 16:], x[..., 16:])  # what is not rotated stays as it is


def test_scalings_differ_and_only_two_see_the_length():
    plain, _ = rope.frequencies(RopeConfig(theta=1e4, dims=16), 10)
    for kind, scaling in SCALINGS.items():
        config = RopeConfig(theta=1e4, dims=16, scaling=scaling)
        short, _ = rope.frequencies(config, 10)
        long, _ = rope.frequencies(config, 200)
        assert torch.equal(short, long) != rope.depends_on_length(config)
        if kind not in ("none", "dynamic", "longrope"):
            assert not torch.equal(short, plain)


@settings(max_examples=30, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]), queries=st.integers(1, 6),
    past=st.integers(0, 5), window=st.sampled_from([None, 1, 3]),
    sizes=st.sampled_from([(4, 4), (4, 6)]),
)  # fmt: skip
def test_attention_equals_its_twin(heads, queries, past, window, sizes):
    many, few = heads
    keys = past + queries
    g = torch.Generator().manual_seed(queries * 100 + past)
    q = torch.randn(1, many, queries, sizes[0], dtype=F64, generator=g)
    k = torch.randn(1, few, keys, sizes[0], dtype=F64, generator=g)
    v = torch.randn(1, few, keys, sizes[1], dtype=F64, generator=g)
    positions = torch.arange(past, keys)
    mask = visible_keys(positions, keys, window)
    fast = attend(q, k, v, scale=0.37, mask=mask)
    pattern = scores(q, k, mask, scale=0.37).softmax(-1)
    whole = torch.nn.functional.pad(q[0], (0, 0, past, 0))  # queries from position 0 on
    for evaluation in (evaluate, derive):
        slow = attention(whole, k[0], v[0], scale=0.37, window=window, slow=evaluation)[:, past:]
        torch.testing.assert_close(fast[0], slow, rtol=1e-10, atol=1e-10)
        for h in range(many):
            kv = h // (many // few)
            torch.testing.assert_close(pattern[0, h] @ v[0, kv], slow[h], rtol=1e-10, atol=1e-10)
    assert (pattern[:, :, ~mask] == 0).all()
    if past == 0 and window is None:
        causal = attend(q, k, v, scale=0.37, causal=True)
        torch.testing.assert_close(causal, fast, rtol=1e-10, atol=1e-10)
    if queries == 1 and window is None:
        torch.testing.assert_close(attend(q, k, v, scale=0.37), fast, rtol=1e-10, atol=1e-10)
