"""Products with 16-bit weights whose results are not rounded to 16 bits.

Axes: M rows of the input, K columns of it, N outputs; E experts, P pairs of a row and an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.formats import DEEP
from llmcli.graph.memory import HEAD_NUMBERS
from llmcli.graph.precision import FAST_WIDE
from llmcli.kernels import native, program
from llmcli.kernels.program import Pairs
from llmcli.ops import compiled, on_card
from llmcli.ops.norm import at_least_float32

# With more rows, converting the weights is faster: break-even at 24 to 48 rows with AVX-512 and at
# 16 to 32 with AVX2 (576 × 1,536 to 14,336 × 4,096).
_FEW_ROWS = 24
_TAKEN = {
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
}


def product_float32(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """`X Wᵀ + b` in float32: `[…, K]` → `[…, N]`; in float64 if x and W are.

    x and W have the same dtype, or W has 16 bits and x is float32; b may be wider. Sums are float32
    or wider on every device and never rounded to the 16 bits of x: two logits differ if their sums
    do. W may be stored by rows or by columns.
    """
    if on_card.multiplies(x, w_NK):
        return on_card.product(x, w_NK, b_N, torch.float32)
    if x.dtype == w_NK.dtype and x.dtype in (torch.float32, torch.float64):
        return F.linear(x, w_NK, b_N)
    if has_kernel(x, w_NK):
        return by_kernel(x, w_NK, b_N)
    if x.dtype in compiled.EMULATED and compiled.runs(x):
        x = compiled.widened(x)
    if x.dtype == torch.float32 and native.level() in FAST_WIDE and _is_for_kernels(x, w_NK):
        tiles = native.level() == "amx" and w_NK.dtype == torch.bfloat16
        return (_by_tiles if tiles else _by_rows)(x, w_NK, b_N)
    x_MK = x.reshape(-1, x.shape[-1])
    if x.is_meta:
        out_MN = F.linear(x_MK.to(w_NK.dtype), w_NK).float()
    elif x.is_cuda:
        out_MN = torch.mm(x_MK, w_NK.t(), out_dtype=torch.float32)
    else:
        out_MN = _in_chunks(x_MK, w_NK)
    return _finished(out_MN, b_N, x)


def product_bf16_dot(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """`X Wᵀ + b` of float32 x rounded to bfloat16, like W: `[…, K]` → `[…, N]` in float32.

    Uses dot products of pairs if the processor has them: the same bits for any number of rows.
    """
    if native.level() != "avx512bf16" or not _is_for_kernels(x, w_NK):
        return product_float32(x.bfloat16().float(), w_NK, b_N)
    prepare, pairs = _paired(compiled.in_rows(x))
    return _multiplied(x, w_NK, b_N, program.MULTIPLY_PAIRS, pairs, prepare=prepare)


def _paired(x_MK: Tensor) -> tuple[program.Op, Tensor]:
    """The op that rounds rows for products of pairs, and its output."""
    rows, columns = x_MK.shape
    pairs = torch.empty(-(-columns // DEEP) * rows * DEEP, dtype=torch.bfloat16)
    return (program.PAIR, x_MK, x_MK.stride(0), pairs, rows, columns), pairs


def _widened(x_MK: Tensor, halves: bool, *, own: bool = False) -> tuple[program.Op, Tensor]:
    """The op that widens rows for weights of float16 (`halves`) or bfloat16, and its output.

    `own`: each row is a pass of its own, for MULTIPLY_EXPERTS_BFLOAT16.
    """
    rows, columns = x_MK.shape
    wide = torch.empty(rows, -(-columns // 32) * 32)
    kind = compiled.WIDEN_FROM[x_MK.dtype], halves, own
    return (program.WIDEN, x_MK, x_MK.stride(0), wide, rows, columns, *kind), wide


def batched_factor(y: Tensor, inputs: torch.dtype) -> Tensor:
    """`y` for `batched_product` with inputs of this dtype.

    In at least float32, but on CUDA as it is if both have the same 16-bit dtype.
    """
    kept = y.is_cuda and y.dtype == inputs and inputs.itemsize == 2
    return y if kept else at_least_float32(y)


def batched_product(x_BMK: Tensor, y_BKN: Tensor) -> Tensor:
    """`X Y` with a `batched_factor` Y, `[B, M, N]` in at least float32.

    X is rounded to the dtype of a 16-bit Y, otherwise widened; sums are not rounded.
    """
    if y_BKN.dtype.itemsize == 2:
        return torch.bmm(x_BMK.to(y_BKN.dtype), y_BKN, out_dtype=torch.float32)
    return at_least_float32(x_BMK) @ y_BKN


def has_kernel(x: Tensor, w_NK: Tensor) -> bool:
    """Whether our kernel supports the product: few rows and 16-bit weights on a CPU."""
    return x.numel() <= _FEW_ROWS * x.shape[-1] and _is_for_kernels(x, w_NK)


def _is_for_kernels(x: Tensor, w_NK: Tensor) -> bool:
    return (
        (x.dtype, w_NK.dtype) in _TAKEN
        and w_NK.stride(1) == 1
        and type(x) is type(w_NK) is Tensor  # a FakeTensor reports `cpu` but has no data
        and x.is_cpu
        and native.level() is not None
    )


def by_kernel(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b` by our kernel; requires `has_kernel`."""
    halves = w_NK.dtype == torch.float16
    prepare, wide = _widened(compiled.in_rows(x), halves)
    return _multiplied(x, w_NK, b_N, program.MULTIPLY_BFLOAT16, wide, halves, prepare=prepare)


def routed_by_kernel(
    x_MK: Tensor, w_ENK: Tensor, pairs: Pairs, bias_EN: Tensor | None, bf16_dot: bool = False
) -> Tensor:
    """Rows times the matrices of their experts, plus biases: `[P, N]` in float32.

    Bit-identical to `by_kernel`, or with `bf16_dot` to `product_bf16_dot`. Requires `has_kernel`
    for one row and one matrix; matrices are stored by rows.
    """
    x_MK = x_MK.contiguous()
    bias_EN = None if bias_EN is None else compiled.widened(bias_EN)
    out_PN = torch.empty(len(pairs[0]), w_ENK.shape[1])
    if bf16_dot and native.level() != "avx512bf16":
        x_MK, bf16_dot = x_MK.bfloat16().float(), False
    kind = 2 if bf16_dot else w_ENK.dtype == torch.float16
    prepare, wide = _paired(x_MK) if bf16_dot else _widened(x_MK, bool(kind), own=True)
    shape, bias_row = (*out_PN.shape, x_MK.shape[1]), 0 if bias_EN is None else bias_EN.stride(0)
    matrix, rest = (wide, w_ENK, w_ENK.stride(1)), (*pairs, bias_EN, bias_row, len(x_MK))
    kernel = program.MULTIPLY_EXPERTS_BFLOAT16
    multiply = (kernel, *matrix, out_PN, *shape, kind, w_ENK.stride(0), *rest)
    program.run(prepare, multiply, writes=(wide, out_PN))
    return out_PN


def _by_tiles(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b` of many float32 rows by AMX, with each number split into three bfloat16."""
    x_MK = compiled.in_rows(x)
    rows, columns = x_MK.shape
    pieces = torch.empty(-(-rows // 32) * -(-columns // 32) * 32 * 32 * 3, dtype=torch.bfloat16)
    prepare = (program.SPLIT, x_MK, x_MK.stride(0), pieces, rows, columns)
    return _multiplied(x, w_NK, b_N, program.MULTIPLY_SPLIT, pieces, prepare=prepare)


def _by_rows(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b` of many float32 rows by fused multiply-adds."""
    x_MK, halves = compiled.in_rows(x), w_NK.dtype == torch.float16
    return _multiplied(x, w_NK, b_N, program.MULTIPLY_ROWS, x_MK, x_MK.stride(0), halves)


def _multiplied(
    x: Tensor, w_NK: Tensor, b_N: Tensor | None, kind: int, source: Tensor, *more: int,
    prepare: program.Op | None = None,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` by an op with arguments 0 to 8 as MULTIPLY_BFLOAT16 (bfloat16.c), then `more`.

    `source`: rows of x, or the output of `prepare`, the op that converts them.
    """
    if b_N is not None:
        b_N = compiled.widened(b_N).contiguous()
    rows, outputs = x.shape[:-1], len(w_NK)
    out = torch.empty(*rows, outputs)
    shape = outputs, rows.numel(), *w_NK.shape
    multiply = kind, source, w_NK, w_NK.stride(0), out, *shape, b_N, *more
    if prepare is None:
        return program.call(*multiply, out=out)
    program.run(prepare, multiply, writes=(source, out))
    return out


def _finished(out_MN: Tensor, b_N: Tensor | None, x: Tensor) -> Tensor:
    if b_N is not None:
        out_MN.add_(b_N)
    return out_MN.view(*x.shape[:-1], out_MN.shape[1])


def _in_chunks(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    wide_MK = x_MK.float()
    out_MN = wide_MK.new_empty(len(x_MK), len(w_NK))
    step = max(1, HEAD_NUMBERS // max(1, w_NK.shape[1]))
    for start in range(0, len(w_NK), step):
        part = slice(start, start + step)
        torch.mm(wide_MK, w_NK[part].float().t(), out=out_MN[:, part])
    return out_MN
