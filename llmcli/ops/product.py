"""Products with 16-bit weights whose results are not rounded to 16 bits.

Axes: M rows of the input, K columns of it, N outputs; E experts, P pairs of a row and an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.anatomy.arithmetic import FAST_WIDE
from llmcli.anatomy.counts import HEAD_NUMBERS
from llmcli.graph.blocks import DEEP
from llmcli.kernels import native, program
from llmcli.ops import on_card

# With more rows, converting the weights is faster: break-even at 24 to 48 rows with AVX-512 and at
# 16 to 32 with AVX2 (576 × 1,536 to 14,336 × 4,096).
_FEW_ROWS = 24
_TAKEN = {
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
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


def product_pairs(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """`X Wᵀ + b` of float32 x rounded to bfloat16, like W: `[…, K]` → `[…, N]` in float32.

    Uses dot products of pairs if the processor has them: the same bits for any number of rows.
    """
    if native.level() != "bf16" or not _is_for_kernels(x, w_NK):
        return product_float32(x.bfloat16().float(), w_NK, b_N)
    x_MK, b_N, out_MN = _operands(x, w_NK, b_N)
    op, pairs = _paired(x_MK)
    program.run(
        torch.get_num_threads(),
        op, (program.MULTIPLY_PAIRS, *_numbers(pairs, w_NK, b_N, out_MN)),
        reads=(x_MK, w_NK, b_N), writes=(pairs, out_MN),
    )  # fmt: skip
    return out_MN.view(*x.shape[:-1], len(w_NK))


def _paired(x_MK: Tensor) -> tuple[program.Op, Tensor]:
    """The op that rounds rows for products of pairs, and its output."""
    rows, columns = x_MK.shape
    pairs = torch.empty(-(-columns // DEEP) * rows * DEEP, dtype=torch.bfloat16)
    return (
        program.PAIR, x_MK.data_ptr(), x_MK.stride(0), pairs.data_ptr(), rows, columns
    ), pairs  # fmt: skip


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
    x_MK, b_N, out_MN = _operands(x, w_NK, b_N)
    rows, columns = x_MK.shape
    wide = torch.empty(rows, -(-columns // 32) * 32)
    halves = w_NK.dtype == torch.float16
    program.run(
        torch.get_num_threads(),
        (program.WIDEN, x_MK.data_ptr(), x_MK.stride(0), wide.data_ptr(), rows, columns,
         x_MK.dtype == torch.float32, halves),
        (program.MULTIPLY_BFLOAT16, *_numbers(wide, w_NK, b_N, out_MN), halves),
        reads=(x_MK, w_NK, b_N), writes=(wide, out_MN),
    )  # fmt: skip
    return out_MN.view(*x.shape[:-1], len(w_NK))


def routed_by_kernel(
    x_MK: Tensor, w_ENK: Tensor, expert_P: Tensor, row_P: Tensor | None, each: int,
    bias_EN: Tensor | None, *, pairs: bool = False,
) -> Tensor:  # fmt: skip
    """Rows times the matrices of their experts, plus biases: `[P, N]` in float32.

    Pair p is row `row_P[p]`, or p // `each`, of x with matrix `expert_P[p]`, both int64.
    Bit-identical to `by_kernel`, or with `pairs` to `product_pairs`. Requires `has_kernel` for one
    row and one matrix; matrices are stored by rows.
    """
    x_MK, expert_P = x_MK.contiguous(), expert_P.contiguous()
    rows, columns = x_MK.shape
    out_PN = torch.empty(len(expert_P), w_ENK.shape[1])
    if pairs and native.level() != "bf16":
        x_MK, pairs = x_MK.bfloat16().float(), False
    kind = 2 if pairs else int(w_ENK.dtype == torch.float16)
    if pairs:
        prepare, wide = _paired(x_MK)
    else:
        wide = torch.empty(rows, -(-columns // 32) * 32)
        prepare = (
            program.WIDEN, x_MK.data_ptr(), x_MK.stride(0), wide.data_ptr(), rows, columns,
            x_MK.dtype == torch.float32, kind == 1, True,
        )  # fmt: skip
    rows_at, bias, bias_stride = 0, 0, 0
    if row_P is not None:
        row_P = row_P.contiguous()
        rows_at = row_P.data_ptr()
    if bias_EN is not None:
        bias_EN = bias_EN.float()
        bias, bias_stride = bias_EN.data_ptr(), bias_EN.stride(0)
    program.run(
        torch.get_num_threads(),
        prepare,
        (program.MULTIPLY_EXPERTS_BFLOAT16, wide.data_ptr(), w_ENK.data_ptr(), w_ENK.stride(1),
         out_PN.data_ptr(), *out_PN.shape, columns, kind, w_ENK.stride(0), expert_P.data_ptr(),
         rows_at, each, bias, bias_stride, rows),
        reads=(x_MK, w_ENK, expert_P, row_P, bias_EN), writes=(wide, out_PN),
    )  # fmt: skip
    return out_PN


def _by_tiles(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b` of many float32 rows by AMX, with each number split into three bfloat16."""
    x_MK, b_N, out_MN = _operands(x, w_NK, b_N)
    rows, columns = x_MK.shape
    pieces = torch.empty(-(-rows // 32) * -(-columns // 32) * 32 * 32 * 3, dtype=torch.bfloat16)
    program.run(
        torch.get_num_threads(),
        (program.SPLIT, x_MK.data_ptr(), x_MK.stride(0), pieces.data_ptr(), rows, columns),
        (program.MULTIPLY_SPLIT, *_numbers(pieces, w_NK, b_N, out_MN)),
        reads=(x_MK, w_NK, b_N), writes=(pieces, out_MN),
    )  # fmt: skip
    return out_MN.view(*x.shape[:-1], len(w_NK))


def _by_rows(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b` of many float32 rows by fused multiply-adds."""
    x_MK, b_N, out_MN = _operands(x, w_NK, b_N)
    numbers = _numbers(x_MK, w_NK, b_N, out_MN)
    program.run(
        torch.get_num_threads(),
        (program.MULTIPLY_ROWS, *numbers, x_MK.stride(0), w_NK.dtype == torch.float16),
        reads=(x_MK, w_NK, b_N), writes=(out_MN,),
    )  # fmt: skip
    return out_MN.view(*x.shape[:-1], len(w_NK))


def _operands(
    x: Tensor, w_NK: Tensor, b_N: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows and bias in the kernels' layout, and the output tensor."""
    x_MK = x.reshape(-1, x.shape[-1])
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    if b_N is not None:
        b_N = b_N.float().contiguous()
    return x_MK, b_N, torch.empty(len(x_MK), len(w_NK))


def _numbers(
    source: Tensor, w_NK: Tensor, b_N: Tensor | None, out_MN: Tensor
) -> tuple[int, ...]:
    """The arguments 0 to 8 of MULTIPLY_BFLOAT16 (bfloat16.c) and similar ops."""
    (rows, outputs), columns = out_MN.shape, w_NK.shape[1]
    return (
        source.data_ptr(), w_NK.data_ptr(), w_NK.stride(0), out_MN.data_ptr(), outputs, rows,
        outputs, columns, 0 if b_N is None else b_N.data_ptr(),
    )  # fmt: skip


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
        out_MN[:, part] = wide_MK @ w_NK[part].float().t()
    return out_MN
