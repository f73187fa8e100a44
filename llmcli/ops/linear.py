"""Products with a weight matrix.

16-bit numbers are always multiplied and accumulated in float32, but on a CPU PyTorch rounds the
sums to 16 bits. `linear` accepts this for inputs of further products; `linear_fp32_out`, for sums
that are added to a float32 stream or normalized, avoids it if a kernel is available;
`product.product_float32` never rounds sums.

Axes: M rows of the input, K columns of it, N outputs. Weights are `[N, K]`, one row per output, but
may be stored as `[K, N]`: see `lies_by_columns`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli import processor
from llmcli.kernels import native
from llmcli.ops import compiled, on_card
from llmcli.ops.norm import at_least_float32
from llmcli.ops.product import by_kernel, has_kernel, product_float32

# Rows from which converting the weights pays off without kernels (break-even at 8 to 16).
_MANY_ROWS = 16
# Rows up to which our kernel is faster than PyTorch's product: 1.8 times at one to four rows, 0.9
# to 1.1 times at 16 (`tests/benchmarks/kernels.py`).
_FEW_ROWS = 8
_LOT = 32  # rows


def linear(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b`: `[…, K]` → `[…, N]`, in the dtype of `x`; W may have 16 bits with float32 `x`.

    Few bfloat16 rows on a CPU use our kernel. Rows in 16 bits that the processor has no arithmetic
    for are computed in float32 (few of them only with kernels): PyTorch's emulation has a third of
    float32's speed (512 rows of SmolLM2: 260 against 680 tokens/s, 2 cores). The sums are float32
    either way, and rounded once.
    """
    if x.dtype == torch.float32 and w_NK.dtype in (torch.bfloat16, torch.float16):
        return product_float32(x, w_NK, b_N)
    if on_card.multiplies(x, w_NK):
        return on_card.product(x, w_NK, b_N, x.dtype)
    if x.dtype in compiled.EMULATED and _in_float32(x):
        return compiled.cast(product_float32(x, w_NK, b_N), x.dtype)
    if _takes_kernel(x, w_NK):
        return by_kernel(x, w_NK, b_N).to(x.dtype)
    return F.linear(x, w_NK, b_N)


def pad_rows(rows: Tensor | slice, x: Tensor) -> Tensor | slice:
    """Pad a selection of rows by repeating some, so that 16-bit products have few shapes.

    For every number of rows oneDNN generates code, 0.6 MiB each (AVX512-BF16), and caches 1,024
    products: the experts of one prompt need hundreds.
    """
    if isinstance(rows, slice) or len(rows) <= _FEW_ROWS or not x.is_cpu:
        return rows
    if x.dtype.itemsize >= 4 or not processor.has_bfloat16():
        return rows
    return torch.cat((rows, rows[:1].expand(-len(rows) % _LOT)))


def linear_fp32_out(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b`: `[…, K]` → `[…, N]` in at least float32, by the fastest available product."""
    if x.is_cuda or (x.dtype in compiled.EMULATED and _in_float32(x)):
        return product_float32(x, w_NK, b_N)
    if _takes_kernel(x, w_NK):
        return by_kernel(x, w_NK, b_N)
    return at_least_float32(linear(x, w_NK, b_N))


def each_own(
    x_PK: Tensor, w_ENK: Tensor, expert_P: Tensor, bias_EN: Tensor | None = None, *,
    at_once: int, wide: bool,
) -> Tensor:  # fmt: skip
    """Every row times the matrix of its own expert, plus its bias: `[P, K]` → `[P, N]`.

    The result has the dtype of `x`, or with `wide` at least float32 without rounded sums. Shapes do
    not depend on `expert_P`; the matrices of `at_once` rows are copied at a time.
    """
    # Not PyTorch's `grouped_mm`: but for bfloat16 on compute capability 9.0 and 10.0 it reads the
    # groups' ends on the host, which no CUDA graph can hold, and it rounds sums (2.11 to 2.13)
    parts = []
    at_once = len(x_PK) if x_PK.is_meta else at_once
    for first in range(0, len(x_PK), at_once):
        here = slice(first, first + at_once)
        w_RNK, x_RK1 = w_ENK.index_select(0, expert_P[here]), x_PK[here].unsqueeze(-1)
        if wide and x_PK.is_cuda and x_PK.dtype.itemsize < 4:
            out_RN1 = torch.bmm(w_RNK, x_RK1, out_dtype=torch.float32)
        else:
            out_RN1 = torch.bmm(w_RNK.to(x_PK.dtype), x_RK1)
        out_RN = out_RN1.squeeze(-1)
        if bias_EN is not None:
            sums_RN = at_least_float32(out_RN) + bias_EN.index_select(0, expert_P[here])
            out_RN = sums_RN.to(out_RN.dtype)
        parts.append(out_RN)
    out_PN = parts[0] if len(parts) == 1 else torch.cat(parts)
    return at_least_float32(out_PN) if wide else out_PN


def rounds_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `linear_fp32_out` may round sums to `dtype` before widening: many rows on a CPU."""
    return dtype.itemsize < 4 and device.type != "cuda"


def lies_by_columns(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a weight with this many rows should be stored as `[K, N]`.

    Without bfloat16 instructions PyTorch's product of one row reads a wide matrix at 12 to 15 GB/s
    if stored by rows, and at 18 to 25 GB/s by columns (2 cores, 576 × 3072 to 14336 × 4096); below
    about 2,000 rows it is the reverse. With these instructions rows are always better: SmolLM2
    decodes 1.35 times as fast on one thread, 1.23 on two (median of 9 pairs). Our kernel reads
    rows.
    """
    narrow = device.type == "cpu" and dtype == torch.bfloat16
    wide = narrow and rows >= 2048 and not processor.has_bfloat16()
    return wide and native.level() is None


def _takes_kernel(x: Tensor, w_NK: Tensor) -> bool:
    few = x.dtype == torch.bfloat16 and x.numel() <= _FEW_ROWS * x.shape[-1]
    return few and has_kernel(x, w_NK)


def _in_float32(x: Tensor) -> bool:
    many = x.numel() >= _MANY_ROWS * x.shape[-1]
    return x.is_cpu and (many or compiled.runs(x))
