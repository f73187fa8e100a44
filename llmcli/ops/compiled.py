"""Operations by our C kernels for float32 on a CPU: when they are used, attention, and look-ups.

Results are bit-identical for any number of rows, threads and processor level. Other operations call
their kernels beside their PyTorch implementation. Where the processor has no arithmetic in the 16
bits of the activations, operands are widened to float32 and each result is rounded once (`widened`,
`cast`).

Axes: B batch, T tokens, N heads of queries and keys together, H heads, K key/value heads, C slots,
d and e sizes of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli import processor
from llmcli.config.attention import Chunk, QueryGrowth, Window, most_keys
from llmcli.config.formats import PACKED
from llmcli.kernels import native, program
from llmcli.kernels.program import bits, call

SLOTS = 256  # read by one item of ATTEND (attention.c)
_MOST_SIZE = 512  # of a head (attention.c)
MAX_GROUP = 128  # query heads that share keys and values (attention.c)
_PASS = 4  # of these share a pass over one token's keys and values (attention.c)
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)  # `enum numbers` in program.h

# Argument 5 of WIDEN (bfloat16.c).
WIDEN_FROM = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}

# Formats of `look_up` for row-major matrices.
IN_16_BITS = {torch.bfloat16: len(PACKED), torch.float16: len(PACKED) + 1}

# The 16-bit dtypes that this processor has no arithmetic for, so that PyTorch's is slow.
EMULATED = frozenset({
    *(() if processor.has_bfloat16() else (torch.bfloat16,)),
    *(() if processor.has_float16() else (torch.float16,)),
})  # fmt: skip


def runs(x: Tensor) -> bool:
    """Whether kernels can read `x`: a real CPU tensor, not a stand-in without data."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and type(x) is Tensor
        and native.level() is not None
    )


def takes(*tensors: Tensor | None, narrow: bool = False) -> bool:
    """Whether kernels support these: float32, or with `narrow` `EMULATED`, on a CPU, not empty."""
    if torch.compiler.is_compiling() or native.level() is None:
        return False
    for x in tensors:
        if x is None:
            continue
        if x.dtype != torch.float32 and not (narrow and x.dtype in EMULATED):
            return False
        if not (x.ndim and x.numel() and x.is_cpu and type(x) is Tensor):
            return False
    return True


def widened(x: Tensor) -> Tensor:
    """`x` `[…]` or `[B, T, N, d]` in float32."""
    if x.dtype not in IN_16_BITS or not (program.recording() and runs(x)):
        return x.float()
    rows = x.view(1, -1) if x.is_contiguous() else in_rows(x.flatten(2) if x.ndim == 4 else x)
    wide = torch.empty(len(rows), -(-rows.shape[1] // 32) * 32)
    kind = WIDEN_FROM[x.dtype], True, True
    call(program.WIDEN, rows, rows.stride(0), wide, *rows.shape, *kind, out=wide)
    return wide[:, : rows.shape[1]].view(x.shape)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` converted to `dtype`, or `x` itself if it has that dtype."""
    if x.dtype == dtype or dtype not in IN_16_BITS or not (program.recording() and takes(x)):
        return x.to(dtype)
    rows, out = in_rows(x), torch.empty(x.shape, dtype=dtype)
    number = NUMBERS.index(dtype)
    return call(program.NARROW, rows, rows.stride(0), out, *rows.shape, number, out=out)


def rotate(x_BTNd: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
    """See `ops.rope.rotate`, with complete tables `[positions, R]`.

    Token t of sequence b is at position `starts[b]` + t; a single start applies to all sequences.
    """
    if x_BTNd.dtype != torch.float32:
        return cast(rotate(widened(x_BTNd), cos, sin, starts), x_BTNd.dtype)
    x_BTNd, far = evenly_spaced(x_BTNd)
    out = torch.empty(x_BTNd.shape)
    table = cos.shape[-1], cos, sin, starts, len(starts) > 1
    return call(program.ROTATE, x_BTNd, far, out, *x_BTNd.shape, *table, out=out)


def grow(q_BHTd: Tensor, growth: QueryGrowth, starts: Tensor) -> Tensor:
    """Queries scaled by `growth` at their positions, which `starts` gives as in `rotate`."""
    x_BTHd, far = evenly_spaced(q_BHTd.transpose(1, 2))
    out, (batch, tokens, heads, size) = torch.empty(x_BTHd.shape), x_BTHd.shape
    how = bits(growth.beta), growth.original, growth.first, starts, len(starts) > 1
    call(program.GROW, x_BTHd, far, out, batch, tokens, heads * size, *how, out=out)
    return out.transpose(1, 2)


def stores(x_BKTd: Tensor, cache_BKCd: Tensor) -> bool:
    """Whether `store` supports it: one token in the cache's dtype, on a CPU."""
    return x_BKTd.shape[2] == 1 and x_BKTd.dtype == cache_BKCd.dtype and runs(x_BKTd)


def store(x_BK1d: Tensor, cache_BKCd: Tensor, starts: Tensor) -> None:
    """Store one new row of each head in slot `starts[b]`."""
    size = x_BK1d.element_size()
    batch, heads, _, columns = x_BK1d.shape
    rows = x_BK1d, x_BK1d.stride(0) * size, x_BK1d.stride(1) * size
    slots = [far * size for far in cache_BKCd.stride()[:3]]
    shape = batch, heads, columns * size, starts, len(starts) > 1, cache_BKCd.shape[2]
    call(program.STORE, *rows, cache_BKCd, *slots, *shape, out=cache_BKCd)


def flat(kind: int, x: Tensor, operand: program.Argument) -> Tensor:
    """Each number of `x` by an operation with arguments `x, operand, out, count` (steps.c)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    return call(kind, x, operand, out, x.numel(), out=out)


def attends(q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, *, unfused: bool = False) -> bool:
    """Whether `attend` supports it: heads within its size limits, contiguous in the last axis.

    Queries in 16 bits only if these are `EMULATED`, or `unfused` (with a cap, sinks or slopes);
    many tokens only with 16-bit keys, or `unfused`; otherwise PyTorch's kernel is used. So it is
    without a processor level, where our FMAs would be function calls. For one token, rows of values
    may have gaps.
    """
    narrow = unfused and q_BHTd.dtype in IN_16_BITS and runs(q_BHTd) and q_BHTd.numel() > 0
    sizes = (k_BKCd.shape[-1], v_BKCe.shape[-1])
    one = q_BHTd.shape[2] == 1 and not (sizes[0] % 16 or sizes[1] % 16)
    many = (
        (k_BKCd.dtype in IN_16_BITS or unfused)
        and native.level() != "portable"
        and max(sizes) <= _MOST_SIZE
        and q_BHTd.shape[1] <= MAX_GROUP * k_BKCd.shape[1]
        and v_BKCe.stride(2) == sizes[1]
    )
    return (
        (narrow or takes(q_BHTd, narrow=True))
        and (one or many)
        and k_BKCd.dtype in NUMBERS
        and k_BKCd.stride()[2:] == (sizes[0], 1)
        and v_BKCe.stride(3) == 1
    )


def attend(
    q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, starts: Tensor, *, scale: float,
    window: Window | None, cap: float | None = None, sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.attention.attend`: query t of sequence b sees the slots up to `starts[b]` + t.

    With a window only the last ones, or those of its chunk. Returns `[B, H, T, e]`, in 16 bits
    rounded once. `slopes_H` in float32 must last as long as recorded steps.
    """
    dtype = q_BHTd.dtype
    if dtype != torch.float32:
        q_BHTd = widened(q_BHTd.transpose(1, 2)).transpose(1, 2)
    slopes = None if slopes_H is None else slopes_H.data_ptr()
    batch, heads, tokens, size = q_BHTd.shape
    kv_heads, capacity, values = v_BKCe.shape[1:]
    one = tokens == 1 and not (size % 16 or values % 16)
    apart = k_BKCd.stride(1), v_BKCe.stride(1)
    if one and kv_heads == 1 and heads % _PASS == 0:  # threads share them
        kv_heads, apart = heads // _PASS, (0, 0)
    if q_BHTd.stride(3) != 1 or (one and q_BHTd.stride(1) != size):
        q_BHTd = q_BHTd.contiguous()
    out_BTHe = torch.empty(batch, tokens, heads, values)
    places = q_BHTd, k_BKCd, v_BKCe, k_BKCd.stride(0), v_BKCe.stride(0), *apart
    shape = batch, kv_heads, heads // kv_heads, size, values
    most = min(most_keys(window) or 0, 1 << 30)
    seen = bits(scale), -most if isinstance(window, Chunk) else most, starts, len(starts) > 1
    numbers, end = NUMBERS.index(k_BKCd.dtype), (out_BTHe, bits(cap or 0.0), sinks_H)
    if one:
        blocks = -(-capacity // SLOTS) + (window is not None)
        room = torch.empty(batch * heads * blocks * (values + 2))
        more = room, blocks, numbers, q_BHTd.stride(0), *end, v_BKCe.stride(2), slopes
        both = [(kind, *places, *shape, *seen, *more) for kind in (program.ATTEND, program.COMBINE)]
        program.run(*both, writes=(room, out_BTHe))
    else:
        rows = numbers, *q_BHTd.stride()[:3], tokens
        call(program.ATTEND_ROWS, *places, *shape, *seen, *rows, *end, slopes, out=out_BTHe)
    return (out_BTHe if dtype == torch.float32 else cast(out_BTHe, dtype)).transpose(1, 2)


def look_up(
    memory: Tensor, format: int, rows: int, columns: int, ids: Tensor, *, stored: int = 0
) -> Tensor:
    """Rows `ids` of a matrix in float32, `[…, columns]`; `format`: its number.

    `stored`: address of `struct stored` (formats.h) for a matrix in the file's layout. Raises
    IndexError for an id out of range; a replayed step gives NaN for it.
    """
    ids = ids.contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"an id is not one of {rows} rows")
    out = torch.empty(*ids.shape, columns)
    numbers = columns, ids, ids.numel(), out, rows, stored
    return call(program.LOOK_UP, format, memory, *numbers, out=out)


def evenly_spaced(x_BTNd: Tensor) -> tuple[Tensor, int]:
    """`x` with each token's heads contiguous, and the stride between tokens.

    A copy if the tokens of the batch have no common stride.
    """
    batch, tokens, _, size = x_BTNd.shape
    sequence, token = x_BTNd.stride()[:2]
    even = batch == 1 or tokens == 1 or sequence == tokens * token
    if not even or x_BTNd.stride()[2:] != (size, 1):
        x_BTNd = x_BTNd.contiguous()
    return x_BTNd, x_BTNd.stride(1) if tokens > 1 else x_BTNd.stride(0)


def in_groups(x: Tensor) -> Tensor:
    """Reshape to `[groups, rows, columns]`, as a view if possible.

    Heads of several tokens in a larger tensor are groups.
    """
    try:
        groups = x.view(1, -1, x.shape[-1])
    except RuntimeError:
        groups = x.flatten(0, -3)
    return groups if groups.stride(2) == 1 else groups.contiguous()


def in_rows(x: Tensor) -> Tensor:
    """Reshape to `[rows, columns]` with contiguous rows, as a view if possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
