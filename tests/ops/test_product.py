"""Products: within their rounding bound, whichever way they take and wherever the weights lie."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tensors import drawn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from llmcli import processor
from llmcli.kernels import native, program
from llmcli.ops import compiled, linear, product
from llmcli.ops.product import product_float32

numbers = partial(drawn, dtype=torch.bfloat16)


def test_what_is_emulated(monkeypatch):
    known = {torch.bfloat16: processor.has_bfloat16(), torch.float16: processor.has_float16()}
    assert {dtype for dtype, there in known.items() if not there} == compiled.EMULATED
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for flag in ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "asimdhp", "avx2"):
        monkeypatch.setattr(processor, "flags", lambda flag=flag: frozenset({flag}))
        assert processor.has_bfloat16() == flag.endswith("bf16")
        assert processor.has_float16() == flag.endswith(("_fp16", "hp"))


def by_columns(w):
    return w.t().contiguous().t()


LAYS = {
    "by rows": lambda w: w, "by columns": by_columns,
    "part of another": lambda w: torch.cat([w, w])[3:303],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lay", LAYS)
@pytest.mark.parametrize("shape", [(65,), (1, 1, 65), (2, 7, 65), (70, 65)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_float32_and_rounded_as_such(monkeypatch, dtype, lay, shape, bias):
    monkeypatch.setattr(product, "HEAD_NUMBERS", 65 * 64)
    w = LAYS[lay](numbers(300, 65, dtype=dtype, seed=1))
    x = numbers(*shape, dtype=dtype, seed=2)
    b = numbers(300, dtype=dtype, seed=3) if bias else None
    out = product_float32(x, w, b)
    exact = x.double() @ w.double().t()
    bound = x.double().abs() @ w.double().abs().t()
    if b is not None:
        exact, bound = exact + b.double(), bound + b.double().abs()
    assert (out.dtype, out.shape) == (torch.float32, exact.shape)
    assert ((out - exact).abs() <= bound * 66 * 2**-24).all()  # 65 products and a bias in any order
    assert (out != out.to(dtype).float()).any()  # what rounding to 16 bits would have lost


@pytest.mark.parametrize("lay", ["by rows", "by columns"])
@pytest.mark.parametrize("hardware", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 40), (1, 15, 40), (2, 33, 40), (70, 40)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_rounded_once(monkeypatch, lay, hardware, shape, bias, dtype):
    monkeypatch.setattr(compiled, "EMULATED", () if hardware else (dtype,))
    monkeypatch.setattr(product, "HEAD_NUMBERS", 40 * 64)
    w = LAYS[lay](numbers(300, 40, seed=1, dtype=dtype))
    x = numbers(*shape, seed=2, dtype=dtype)
    b = numbers(300, seed=3, dtype=dtype) if bias else None
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    out = linear.linear(x, w, b)
    assert (out.dtype, out.shape) == (dtype, exact.shape)
    # one rounding to 8 or 11 bits, and before it float32 sums of 40 products
    rtol = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=1e-4)
    wide = linear.linear_fp32_out(x, w, b)
    assert wide.dtype == torch.float32
    if not hardware and native.level():
        torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("level", ["portable", None])
def test_rows_in_16_bits_avoid_the_emulation(monkeypatch, level):
    monkeypatch.setattr(compiled, "EMULATED", compiled.IN_16_BITS)
    monkeypatch.setattr(native, "level", lambda: level)
    seen, through = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(len(x)) or through(x, *rest))
    for rows in (1, 15, 16):
        for dtype in (torch.bfloat16, torch.float16):
            linear.linear(torch.ones(rows, 40, dtype=dtype), numbers(300, 40, dtype=dtype), None)
    assert seen == ([] if level else [1, 1, 15, 15])  # few rows without kernels


def test_only_wide_bfloat16_matrices_on_a_cpu_lie_by_columns(monkeypatch):
    cpu, card = torch.device("cpu"), torch.device("cuda")
    for rows, device, dtype, hardware, level, lies in (
        (2048, cpu, torch.bfloat16, False, None, True),
        (2047, cpu, torch.bfloat16, False, None, False),
        (4096, cpu, torch.float32, False, None, False),
        (4096, card, torch.bfloat16, False, None, False),
        (2048, cpu, torch.bfloat16, False, "avx2", False),  # our kernel reads rows
        (4096, cpu, torch.bfloat16, True, None, False),
    ):
        monkeypatch.setattr(processor, "has_bfloat16", lambda there=hardware: there)
        monkeypatch.setattr(native, "level", lambda level=level: level)
        assert linear.lies_by_columns(rows, device, dtype) == lies


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_stay_as_they_are(dtype):
    x, w, b = (numbers(*s, dtype=dtype) for s in ((2, 3, 40), (30, 40), (30,)))
    assert torch.equal(product_float32(x, w, b), F.linear(x, w, b))


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

    def run(widen, multiply, **memory):
        seen.append(multiply[6:9])

    monkeypatch.setattr(program, "run", run)
    w = numbers(30, 40)
    product_float32(numbers(2, 3, 40), w)
    product_float32(numbers(40, 2).t(), w)  # rows that do not lie together are made to
    product_float32(numbers(3, 40).float(), w)
    product_float32(numbers(4, 40, dtype=torch.float16), w.half())
    assert seen == [(6, 30, 40), (2, 30, 40), (3, 30, 40), (4, 30, 40)]
    product_float32(numbers(4, 40), by_columns(w))
    product_float32(numbers(product._FEW_ROWS + 1, 40), w)
    assert len(seen) == 4
    monkeypatch.setattr(native, "level", lambda: None)
    product_float32(numbers(4, 40), w)
    assert len(seen) == 4
