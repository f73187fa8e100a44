"""Products of few rows with a matrix in GGUF blocks; see `ops.quant`.

In every format a *unit* is 32 numbers: two times 16, `distance` columns apart, the lower and the
upper 4 bits of 16 bytes (Q8_0: the former and the latter bytes of its block). A block of 32 numbers
is one unit, one of 256 is eight. Formats only differ in `numbers`, which decodes units. Layouts:
`ops.quant.simple` and `ops.quant.k_quants`. Blocks are read in words: of 32 bits if their size is a
multiple of 4 bytes, so that every word is aligned, else of 16.

Axes: M rows of the input, few, K columns of it, N outputs; r bytes of a row of blocks; E experts, P
pairs of a row and an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmcli.config.formats import FORMATS

ROWS = 8  # of a program
UNITS = 16  # of a block of columns of it

Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q5_K, Q6_K = map(tl.constexpr, range(7))
# The number of a format, and its `distance`.
PACKED = {
    "Q8_0": (Q8_0.value, 16),
    "Q4_0": (Q4_0.value, 16),
    "Q4_1": (Q4_1.value, 16),
    "Q5_0": (Q5_0.value, 16),
    "Q4_K": (Q4_K.value, 32),
    "Q5_K": (Q5_K.value, 32),
    "Q6_K": (Q6_K.value, 64),
}


@triton.jit
def words(at, i, there, TYPE: tl.constexpr):
    """Load word `i` from addresses `at`, as uint32."""
    return tl.load(at.to(tl.pointer_type(TYPE), bitcast=True) + i, there, 0).to(tl.uint32)


@triton.jit
def half(at, there):
    """Load a float16."""
    return words(at, 0, there, tl.uint16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def sixteen(at, there, WIDE: tl.constexpr):
    """Load 16 bytes from addresses `at` [rows, units, 1] as uint32; WIDE: in words of 32 bits."""
    if WIDE:
        four = words(at, tl.arange(0, 4)[None, None, :], there, tl.uint32)
        pairs = tl.interleave(four & 0xFFFF, four >> 16)
    else:
        pairs = words(at, tl.arange(0, 8)[None, None, :], there, tl.uint16)
    return tl.interleave(pairs & 0xFF, pairs >> 8)


@triton.jit
def of_six_bits(own, least, both, run):
    """Scale and minimum of a run of a block from its words: see `ops.quant.k_quants`."""
    at = run % 4 * 8
    own, least, both = own >> at, least >> at, both >> at
    scale = tl.where(run < 4, own & 63, (both & 15) | ((own >> 2) & 48))
    minimum = tl.where(run < 4, least & 63, ((both >> 4) & 15) | ((least >> 2) & 48))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def signed(byte):
    """The number of a byte in two's complement."""
    return byte.to(tl.int8).to(tl.float32)


@triton.jit
def numbers(base, unit, i, there, FORMAT: tl.constexpr, WIDE: tl.constexpr):
    """Decode a unit of the blocks at `base`, both halves in float32, bit-identical to `dequantize`.

    `base` and `there` are [rows, units, 1], `unit` [1, units, 1], `i` 0 … 15 [1, 1, 16]. A code
    times its scale is exact in float32, so a fused subtraction gives the same result.
    """
    if FORMAT == Q8_0 or FORMAT == Q4_0:  # noqa: SIM109 (Triton has no `in`)
        begin = base + 2
    elif FORMAT == Q4_1:
        begin = base + 4
    elif FORMAT == Q5_0:
        begin = base + 6
    elif FORMAT == Q4_K:
        begin = base + 16 + 16 * unit
    elif FORMAT == Q5_K:
        begin = base + 48 + 16 * unit
    else:
        begin = base + 16 * unit
    codes = sixteen(begin, there, WIDE)
    if FORMAT == Q8_0:
        first, second = signed(codes), signed(sixteen(begin + 16, there, WIDE))
    else:
        low, high = codes & 15, codes >> 4
        if FORMAT == Q5_0:
            low |= ((words(base, 1, there, tl.uint16) >> i) & 1) << 4
            high |= ((words(base, 2, there, tl.uint16) >> i) & 1) << 4
        elif FORMAT == Q5_K:
            bits = sixteen(base + 16 + 16 * (unit % 2), there, WIDE) >> (unit // 2 * 2)
            low |= (bits & 1) << 4
            high |= (bits & 2) << 3
        elif FORMAT == Q6_K:
            bits = sixteen(base + 128 + 32 * (unit // 4) + 16 * (unit % 2), there, WIDE)
            bits >>= unit % 4 // 2 * 2
            low |= (bits & 3) << 4
            high |= bits & 48
        first, second = low.to(tl.float32), high.to(tl.float32)
    if FORMAT == Q4_0:
        first, second = first - 8, second - 8
    elif FORMAT == Q5_0:
        first, second = first - 16, second - 16
    elif FORMAT == Q6_K:
        first, second = first - 32, second - 32
    if FORMAT == Q6_K:
        d = half(base + 208, there)
        pair, odd = base + 192 + unit // 4 * 8 + unit % 4 // 2 * 2, unit % 2 * 8
        first *= signed(words(pair, 0, there, tl.uint16) >> odd) * d
        second *= signed(words(pair, 2, there, tl.uint16) >> odd) * d
    elif FORMAT == Q4_K or FORMAT == Q5_K:  # noqa: SIM109
        d, least = half(base, there), half(base + 2, there)
        own, below = words(base, 1, there, tl.uint32), words(base, 2, there, tl.uint32)
        both = words(base, 3, there, tl.uint32)
        scale, minimum = of_six_bits(own, below, both, unit // 2 * 2)
        first = first * (scale * d) - minimum * least
        scale, minimum = of_six_bits(own, below, both, unit // 2 * 2 + 1)
        second = second * (scale * d) - minimum * least
    else:
        d = half(base, there)
        first, second = first * d, second * d
        if FORMAT == Q4_1:
            least = half(base + 2, there)
            first, second = first + least, second + least
    return first, second


@triton.jit
def packed_kernel(
    x, w, bias, out, expert, row, columns, outputs, w_row, bias_row, each,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, PER_BLOCK: tl.constexpr, DISTANCE: tl.constexpr,
    BIAS: tl.constexpr, ROUTED: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Product of few rows; PER_BLOCK: units per block of BYTES.

    ROUTED: output m uses matrix `expert[m]` and row m // `each` of x, or with ROW row `row[m]`.
    """
    m = tl.program_id(1)
    source = m
    if ROUTED:
        own = tl.load(expert + m).to(tl.int64)
        w += own * outputs * w_row
        bias += own * bias_row
        source = tl.load(row + m) if ROW else m // each
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, 16)[None, None, :]
    x += source.to(tl.int64) * columns
    rows = n.to(tl.int64)[:, None, None] * w_row
    sums = tl.zeros([ROWS, UNITS], tl.float32)
    for start in range(0, columns // 32, UNITS):
        number = start + tl.arange(0, UNITS)[None, :, None]
        within = number < columns // 32
        there = (n[:, None, None] < outputs) & within
        unit = number % PER_BLOCK
        base = w + rows + number // PER_BLOCK * BYTES
        first, second = numbers(base, unit, i, there, FORMAT, BYTES % 4 == 0)
        # 16 columns at a time, so many of them beside one another as there are before the second
        beside: tl.constexpr = DISTANCE // 16
        at = number // beside * (2 * DISTANCE) + number % beside * 16 + i
        first *= tl.load(x + at, within, 0.0).to(tl.float32)
        first += second * tl.load(x + at + DISTANCE, within, 0.0).to(tl.float32)
        sums += tl.sum(first, 2)
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias + n, n < outputs, 0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * outputs + n, y.to(out.dtype.element_ty), n < outputs)


def constants(format: str) -> dict[str, int]:
    """Compile-time constants of `packed_kernel`."""
    stored, (number, distance) = FORMATS[format], PACKED[format]
    return {
        "FORMAT": number, "BYTES": stored.bytes, "PER_BLOCK": stored.block // 32,
        "DISTANCE": distance, "ROWS": ROWS, "UNITS": UNITS,
    }  # fmt: skip


def packed_product(
    x_MK: Tensor, raw_Nr: Tensor, format: str, bias_N: Tensor | None = None, *, out: torch.dtype
) -> Tensor:
    """`X Wᵀ + b` of few rows, `[M, N]` in the dtype `out`; rows of blocks may have gaps.

    W is exactly `ops.quant.dequantize` in float32; X is not rounded, sums are float32. Rows are
    aligned like the words of their blocks.
    """
    rows, columns = x_MK.shape
    y_MN = torch.empty(rows, len(raw_Nr), device=x_MK.device, dtype=out)
    packed_kernel[(triton.cdiv(len(raw_Nr), ROWS), rows)](
        x_MK.contiguous(), raw_Nr, x_MK if bias_N is None else bias_N, y_MN, x_MK, x_MK, columns,
        len(raw_Nr), raw_Nr.stride(0), 0, 1, BIAS=bias_N is not None, ROUTED=False, ROW=False,
        **constants(format),
    )  # fmt: skip
    return y_MN


def routed_product(
    x_MK: Tensor, raw_ENr: Tensor, format: str, routes: Routed, bias_EN: Tensor | None = None, *,
    out: torch.dtype,
) -> Tensor:  # fmt: skip
    """`X Wᵀ + b` of P pairs of a row and an expert: `[P, N]`; see `Routed`."""
    expert_P, row_P, each = routes
    pairs, (_, outputs, _), columns = len(expert_P), raw_ENr.shape, x_MK.shape[1]
    y_PN = torch.empty(pairs, outputs, device=x_MK.device, dtype=out)
    packed_kernel[(triton.cdiv(outputs, ROWS), pairs)](
        x_MK.contiguous(), raw_ENr.contiguous(), x_MK if bias_EN is None else bias_EN, y_PN,
        expert_P, x_MK if row_P is None else row_P, columns, outputs, raw_ENr.stride(1),
        0 if bias_EN is None else bias_EN.stride(0), each, BIAS=bias_EN is not None, ROUTED=True,
        ROW=row_P is not None, **constants(format),
    )  # fmt: skip
    return y_PN


# Experts int64 `[P]`; rows of x `[P]` (or None); number of consecutive pairs per row.
Routed = tuple[Tensor, Tensor | None, int]
