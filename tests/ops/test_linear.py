"""Products that take another way give the same numbers, wherever the weights lie."""

import pytest
import torch
import torch.nn.functional as F

from llmcli.ops import linear as ops
from llmcli.ops import processor


@pytest.fixture(params=["by rows", "by columns"])
def weight(request):
    w = torch.randn(300, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    return w if request.param == "by rows" else w.t().contiguous().t()


@pytest.mark.parametrize("hardware", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 40), (1, 15, 40), (2, 33, 40), (70, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_rows_are_rounded_once(monkeypatch, weight, hardware, shape, bias):
    monkeypatch.setattr(processor, "flags", lambda: frozenset({"avx512_bf16"} if hardware else ()))
    monkeypatch.setattr(ops, "_CHUNK", 40 * 64)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    b = torch.randn(300, generator=torch.Generator().manual_seed(3)).bfloat16() if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    out = ops.linear(x, weight, b)
    assert out.dtype == torch.bfloat16
    assert out.shape == exact.shape
    # one rounding to 8 bits, and before it float32 sums of 40 products
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)


def test_many_bfloat16_rows_avoid_the_emulation(monkeypatch, weight):
    monkeypatch.setattr(processor, "flags", frozenset)
    seen = []
    through = ops._through_float32
    monkeypatch.setattr(ops, "_through_float32", lambda *a: seen.append(a) or through(*a))
    for rows, dtype in ((15, torch.bfloat16), (16, torch.bfloat16), (16, torch.float32)):
        ops.linear(torch.ones(rows, 40, dtype=dtype), weight.to(dtype), None)
    assert len(seen) == 1


def test_only_wide_bfloat16_matrices_on_a_cpu_lie_by_columns(monkeypatch):
    monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
    monkeypatch.setattr(ops.native, "level", lambda: None)
    cpu = torch.device("cpu")
    assert ops.lies_by_columns(2048, cpu, torch.bfloat16)
    assert not ops.lies_by_columns(2047, cpu, torch.bfloat16)
    assert not ops.lies_by_columns(4096, cpu, torch.float32)
    assert not ops.lies_by_columns(4096, torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(ops.native, "level", lambda: "avx2")
    assert not ops.lies_by_columns(2048, cpu, torch.bfloat16), "our kernel reads rows"
    monkeypatch.setattr(ops.native, "level", lambda: None)
    monkeypatch.setattr(processor, "has_bfloat16", lambda: True)
    assert not ops.lies_by_columns(4096, cpu, torch.bfloat16)
