"""Products with float32 results: within their rounding bound, wherever they are computed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from llmcli.kernels import native, program
from llmcli.ops import product
from llmcli.ops.product import product_float32


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_columns(w):
    return w.t().contiguous().t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lay", [lambda w: w, by_columns, lambda w: torch.cat([w, w])[3:303]])
@pytest.mark.parametrize("shape", [(65,), (1, 1, 65), (2, 7, 65), (70, 65)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_float32_and_rounded_as_such(monkeypatch, dtype, lay, shape, bias):
    monkeypatch.setattr(product, "HEAD_NUMBERS", 65 * 64)
    w = lay(numbers(300, 65, dtype=dtype, seed=1))
    x = numbers(*shape, dtype=dtype, seed=2)
    b = numbers(300, dtype=dtype, seed=3) if bias else None
    out = product_float32(x, w, b)
    exact = x.double() @ w.double().t()
    bound = x.double().abs() @ w.double().abs().t()
    if b is not None:
        exact, bound = exact + b.double(), bound + b.double().abs()
    assert out.dtype == torch.float32
    assert out.shape == exact.shape
    assert ((out - exact).abs() <= bound * 66 * 2**-24).all()  # 65 products and a bias in any order
    assert (out != out.to(dtype).float()).any()  # what rounding to 16 bits would have lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_stay_as_they_are(dtype):
    x, w, b = (numbers(*s, dtype=dtype) for s in ((2, 3, 40), (30, 40), (30,)))
    assert torch.equal(product_float32(x, w, b), torch.nn.functional.linear(x, w, b))


def test_shapes_and_flops_without_numbers():
    x, w, b = numbers(2, 3, 40), numbers(30, 40), numbers(30)
    with FlopCounterMode(display=False) as flops:
        out = product_float32(x.to("meta"), w.to("meta"), b.to("meta"))
    assert flops.get_total_flops() == 2 * 6 * 40 * 30
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 30), torch.float32, "meta")
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as flops:
        out = product_float32(*(mode.from_tensor(t) for t in (x, w, b)))
    assert flops.get_total_flops() == 2 * 6 * 40 * 30
    assert (out.shape, out.dtype) == ((2, 3, 30), torch.float32)


def test_the_kernel_computes_few_bfloat16_rows_that_lie_by_rows(monkeypatch):
    seen = []
    monkeypatch.setattr(native, "level", lambda: "portable")

    def run(threads, widen, multiply, **memory):
        seen.append(multiply[6:9])

    monkeypatch.setattr(program, "run", run)
    w = numbers(30, 40)
    product_float32(numbers(2, 3, 40), w)
    product_float32(numbers(40, 2).t(), w)  # rows that do not lie together are made to
    product_float32(numbers(3, 40).float(), w)
    assert seen == [(6, 30, 40), (2, 30, 40), (3, 30, 40)]
    product_float32(numbers(4, 40), by_columns(w))
    product_float32(numbers(product._FEW_ROWS + 1, 40), w)
    product_float32(numbers(4, 40, dtype=torch.float16), w.half())
    assert len(seen) == 3
    monkeypatch.setattr(native, "level", lambda: None)
    product_float32(numbers(4, 40), w)
    assert len(seen) == 3
