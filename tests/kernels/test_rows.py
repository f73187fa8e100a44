"""The kernels of many tokens: attention over a cache, products with bfloat16 weights, look-ups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tensors import drawn

from llmcli.config.attention import Chunk
from llmcli.graph.precision import FAST_WIDE
from llmcli.kernels import native, program
from llmcli.ops import compiled, product
from llmcli.ops.attention import attend, visible_keys
from llmcli.ops.compiled import cast


@pytest.fixture(
    scope="module", params=["packaged", pytest.param("emulated", marks=pytest.mark.machine)]
)
def library(request):
    """Also with AVX-512 emulated: products of many rows have other bits with AMX."""
    return request.getfixturevalue(request.param)


def exact(q, k, v, starts, scale, window, cap=None, sinks=None, slopes=None):
    """PyTorch's twin in float64."""
    positions = starts.expand(len(q))[:, None] + torch.arange(q.shape[2])
    mask = visible_keys(positions, k.shape[2], window).unsqueeze(1)
    options = {"cap": cap, "sinks_H": sinks, "slopes_H": slopes, "positions": positions}
    return attend(*(x.double() for x in (q, k, v)), scale=scale, mask=mask, **options)


# B, H, K, T, d, e, window, starts
CASES = (
    (1, 1, 1, 2, 1, 1, None, [0]), (1, 3, 1, 5, 16, 16, None, [0]),
    (2, 9, 3, 70, 64, 64, None, [3, 120]), (2, 4, 4, 33, 20, 7, 9, [64, 0]),
    (3, 8, 2, 64, 32, 48, 64, [17]), (1, 70, 1, 3, 8, 8, None, [200]),
    (1, 128, 1, 2, 5, 3, 1, [63]), (1, 2, 1, 130, 512, 512, 100, [1]),
    (1, 1, 1, 1, 16, 16, None, [0]), (2, 9, 3, 1, 64, 64, None, [3, 700]),
    (2, 8, 4, 1, 80, 48, 9, [64, 0]), (3, 12, 2, 1, 32, 128, 300, [511]),
    (1, 7, 1, 1, 512, 512, None, [256]),
    (2, 4, 4, 33, 20, 7, Chunk(size=19), [64, 0]), (2, 8, 2, 1, 32, 48, Chunk(size=19), [37, 38]),
    (2, 9, 3, 1, 64, 64, Chunk(size=300), [599, 20]),
)  # fmt: skip


def tensors(case, dtype):
    batch, heads, kv_heads, tokens, size, values, window, starts = case
    slots = max(starts) + tokens + 5
    q = drawn(batch, tokens, heads, size).transpose(1, 2)
    k = drawn(batch, kv_heads, slots, size, seed=1)
    v = drawn(batch, kv_heads, slots, values, seed=2)
    return q, k.to(dtype), v.to(dtype), torch.tensor(starts), window


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# a cap, and whether there are sinks and slopes
KINDS = (
    (None, False, False), (0.8, False, False), (None, True, False), (30.0, True, False),
    (None, False, True), (30.0, True, True),
)  # fmt: skip


@pytest.mark.parametrize(("case", "kind", "dtype"), [
    (case, kind, DTYPES[(i + j) % 3])
    for i, case in enumerate(CASES) for j, kind in enumerate(KINDS)
], ids=str)  # fmt: skip
def test_attention(every_level, case, kind, dtype):
    """Of many tokens, and of one; a case with each kind, and each of both with every dtype."""
    q, k, v, starts, window = tensors(case, dtype)
    scale, (cap, sunk, sloped) = q.shape[-1] ** -0.5, kind
    sinks = torch.linspace(-3, 4, q.shape[1]) if sunk else None
    slopes = torch.linspace(0.002, 0.7, q.shape[1]) if sloped else None
    expected = exact(q, k, v, starts, scale, window, cap, sinks, slopes)
    # what lies behind the last token is never read
    for b, start in enumerate(starts.expand(len(q)).tolist()):
        k[b, :, start + q.shape[2] :] = v[b, :, start + q.shape[2] :] = math.nan
    options = {
        "scale": scale, "window": window, "cap": cap, "sinks_H": sinks, "slopes_H": slopes
    }  # fmt: skip
    found = every_level(lambda: compiled.attend(q, k, v, starts, **options))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_for_the_cache_are_rounded_as_by_pytorch(levels, dtype):
    """To even, subnormal numbers and infinities included: all of 16 bits, and what lies between."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()].sort().values
    between = (every[:-1].double() + every[1:].double()).float() / 2
    near = torch.cat([between, between.nextafter(torch.tensor(1e30)), between * (1 - 2e-7)])
    special = torch.tensor([65519.0, 65520.0, -65536.0, 1e38, math.inf, -math.inf, math.nan, 1e-45])
    x = torch.cat([every, near, special])
    x = x[: len(x) // 2 * 2].view(2, -1)
    for _ in levels():
        with program.recorded([x]) as recording:
            found = cast(x, dtype)
        assert recording.wrote([found])
        torch.testing.assert_close(found, x.to(dtype), rtol=0, atol=0, equal_nan=True)


# B, H, T = 1, size of a key, of the value that it begins with, starts
LATENTS = ((1, 1, 48, 32, [0]), (2, 16, 80, 64, [3, 700]), (3, 6, 576, 512, [300]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LATENTS)
def test_values_that_are_the_beginning_of_the_keys_of_all_heads(every_level, case, dtype):
    batch, heads, size, values, starts = case
    q, k, _, starts, _ = tensors((batch, heads, 1, 1, size, 1, None, starts), dtype)
    v = k[..., :values]
    expected = exact(q, k, v, starts, 0.1, None)

    def compute():
        assert compiled.attends(q, k, v)
        found = compiled.attend(q, k, v, starts, scale=0.1, window=None)
        own = compiled.attend(q, k, v.contiguous(), starts, scale=0.1, window=None)
        assert torch.equal(own, found)
        return found

    torch.testing.assert_close(every_level(compute).double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("cap", [0.3, 30.0, 50.0])
def test_a_cap_of_any_score(levels, cap):
    """One key with a score and one with 0: the weight tells the capped score."""
    raw = torch.cat([torch.logspace(-12, 6, 400), torch.tensor([0.6249, 0.6251]) * cap])
    q = torch.cat([raw, -raw]).view(1, -1, 1, 1) * torch.eye(1, 16)
    k, v = torch.eye(16)[:2].view(1, 1, 2, 16), torch.eye(16)[:2].view(1, 1, 2, 16)
    heads = q.split(100, 1)
    expected = cap * (q[..., 0].double() / cap).tanh()
    for _ in levels():
        options = {"scale": 1.0, "window": None, "cap": cap}
        pairs = [compiled.attend(x, k, v, torch.tensor([1]), **options) for x in heads]
        a = torch.cat(pairs, 1).double()
        found = (a[..., 0] / a[..., 1]).log()
        close = expected.abs() < 10  # the smaller weight is large enough to tell
        torch.testing.assert_close(found[close], expected[close], rtol=3e-7, atol=4e-7)


def test_a_row_has_the_same_bits_in_any_chunk(levels):
    """Keys of no multiple of 16 numbers: a single token is one of many, too."""
    q, k, v, starts, window = tensors((1, 6, 2, 90, 36, 32, 50, [30]), torch.bfloat16)
    options = {"scale": 0.2, "window": window}
    for _ in levels():
        whole = compiled.attend(q, k, v, starts, **options)
        for cuts in ((0, 1, 90), (0, 33, 34, 90), tuple(range(91))):
            parts = [
                compiled.attend(q[:, :, a:b].contiguous(), k, v, starts + a, **options)
                for a, b in itertools.pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts, 2), whole)


def test_scores_without_bounds(every_level):
    """Scores of ±1e30: one key has all the weight. An infinite one makes its own row NaN."""
    q, k, v, starts, _ = tensors((1, 2, 1, 8, 16, 16, None, [0]), torch.float32)
    q, k = q * 1e15, k * 1e15
    expected = exact(q, k, v, starts, 1.0, None)
    options = {"scale": 1.0, "window": None}
    bad = q.clone()
    bad[0, 1, 3, 2] = math.inf
    found, seen = every_level(lambda: (
        compiled.attend(q, k, v, starts, **options), compiled.attend(bad, k, v, starts, **options),
    ))  # fmt: skip
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert seen[0, 1, 3].isnan().all()
    seen[0, 1, 3] = found[0, 1, 3]
    assert torch.equal(seen, found)


@pytest.mark.parametrize(
    "shape", [(25, 1, 1), (33, 31, 17), (40, 64, 130), (70, 300, 65), (64, 576, 96)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_rows_with_weights_of_16_bits(every_level, shape, dtype):
    rows, columns, outputs = shape
    x, bias = drawn(rows, columns + 3)[:, 2:-1], drawn(outputs, seed=2)
    w = drawn(outputs, columns + 5, seed=1).to(dtype)[:, 1:-4]
    expected = x.double() @ w.double().T + bias.double()

    def compute():
        by_rows = product._by_rows(x, w, bias)
        assert torch.equal(by_rows[:7], product._by_rows(x[:7], w, bias))
        found = product.product_float32(x, w, bias)
        assert (found - expected).norm() <= 1e-6 * expected.norm()
        if native.level() == "amx" and dtype == torch.bfloat16:
            assert torch.equal(found, product._by_tiles(x, w, bias))
            assert torch.equal(found[:25], product.product_float32(x[:25], w, bias))
        elif native.level() in FAST_WIDE:
            assert torch.equal(found, by_rows)
        return by_rows, product.by_kernel(x[:9], w, bias)

    by_rows, few = every_level(compute)
    assert (few - expected[:9]).norm() <= 1e-6 * expected[:9].norm()
    assert (by_rows - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (33, 31, 17), (40, 64, 130), (70, 577, 65), (3, 300, 999), (600, 64, 140)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("gap", [0, 5])
def test_pairs_are_products_of_rounded_rows_and_the_same_for_any_number_of_rows(levels, shape, gap):
    rows, columns, outputs = shape
    x = drawn(rows, columns + gap)[:, gap // 2 : gap // 2 + columns]
    w, bias = drawn(outputs, columns + gap, seed=1).bfloat16()[:, :columns], drawn(outputs, seed=2)
    x[0, 0], x[-1, -1] = 1 + 2**-8, 1 + 3 * 2**-8  # in the middle: to even
    expected = x.bfloat16().double() @ w.double().T + bias.double()
    for level in levels():
        found = product.product_bf16_dot(x, w, bias)
        assert (found - expected).norm() <= 1e-6 * expected.norm()
        if level == "avx512bf16":
            for some in (1, 2, 7, 8, 9, 32, 33, 500):
                assert torch.equal(found[:some], product.product_bf16_dot(x[:some], w, bias))
            assert torch.equal(found[-1:], product.product_bf16_dot(x[-1:], w, bias))


def test_experts_in_pairs_have_the_bits_of_the_product(levels):
    x, w, bias = drawn(3, 300), drawn(4, 50, 300, seed=1).bfloat16(), drawn(4, 50, seed=2)
    experts, rows = torch.tensor([2, 0, 2, 3, 0, 1]), torch.tensor([0, 1, 2, 2, 0, 1])
    for _ in levels():
        found = product.routed_by_kernel(x, w, (experts, rows, 2), bias, True)
        for i, (expert, row) in enumerate(zip(experts, rows, strict=True)):
            one = product.product_bf16_dot(x[row : row + 1], w[expert], bias[expert])[0]
            torch.testing.assert_close(found[i], one, rtol=0, atol=2e-5)
            if native.level() == "avx512bf16":
                assert torch.equal(found[i], one)


def test_infinity_in_a_row_stays_in_it(levels):
    for level in levels():
        if level not in FAST_WIDE:
            continue
        x, w = torch.ones(40, 64), torch.ones(20, 64).bfloat16()
        x[7, 3], x[9, 4] = math.inf, math.nan
        found = product.product_float32(x, w)
        assert found[7].isposinf().all()
        assert found[9].isnan().all()
        assert (found[[i for i in range(40) if i not in (7, 9)]] == 64).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_a_table_of_16_bits(levels, dtype):
    table = drawn(50, 33).to(dtype)
    table[7, :4] = torch.tensor([6e-8, -3e-6, torch.inf, torch.nan])  # subnormal ones of float16
    format = compiled.IN_16_BITS[dtype]
    ids = torch.tensor([[0, 49, 7], [7, 1, 2]])
    for _ in levels():
        found = compiled.look_up(table, format, 50, 33, ids)
        torch.testing.assert_close(found, table[ids].float(), rtol=0, atol=0, equal_nan=True)
        for bad in (50, -1, 2**40):
            with pytest.raises(IndexError, match="not one of 50 rows"):
                compiled.look_up(table, format, 50, 33, torch.tensor([3, bad]))
