"""Operations by our C kernels for float32 on a CPU, equivalents of PyTorch implementations.

Results are bit-identical for any number of rows, threads and processor level. Axes: B batch, T
tokens, N heads of queries and keys together, H heads, K key/value heads, C slots, d and e sizes of
a head.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

from llmcli.graph.blocks import PACKED
from llmcli.kernels import native, program
from llmcli.parts.mlp.config import GateClamp

SLOTS = 256  # read by one item of ATTEND (attention.c)
_MOST_SIZE = 512  # of a head (attention.c)
_MOST_GROUP = 128  # query heads that share keys and values (attention.c)
_PASS = 4  # of these share a pass over one token's keys and values (attention.c)
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)  # `enum numbers` in program.h
# `enum activation` in steps.c
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")

# Formats of `look_up` for row-major matrices.
IN_16_BITS = {torch.bfloat16: len(PACKED), torch.float16: len(PACKED) + 1}

_bits = lru_cache(maxsize=64)(program.bits)


@cache
def _ones(columns: int) -> Tensor:
    """Weights of a norm without weights; cached, since recorded steps hold their address."""
    return torch.ones(columns)


def runs(x: Tensor) -> bool:
    """Whether kernels can read `x`: a real CPU tensor, not a stand-in without data."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and type(x) is Tensor
        and native.level() is not None
    )


def takes(x: Tensor) -> bool:
    """Whether kernels support `x`: float32 on a CPU, not empty."""
    return x.dtype == torch.float32 and x.ndim > 0 and x.numel() > 0 and runs(x)


def normalize(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, *, centred: bool,
    offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """See `ops.norm.rms_norm`, or with `centred` `layer_norm`; rows of x may have gaps.

    Weights may be `[n, D]`, one for each of n rows in turn.
    """
    columns = x.shape[-1]
    factors = _ones(columns) if w is None else w
    groups = _groups(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    address = 0 if b is None else b.data_ptr()
    op = (
        program.NORMALIZE, groups.data_ptr(), groups.stride(1), out.data_ptr(),
        x.numel() // columns, columns, factors.data_ptr(), address, _bits(eps), centred,
        _bits(offset), groups.shape[1], groups.stride(0), factors.numel() // columns,
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(groups, w, b), writes=(out,))
    return out


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


def rotate(x_BTNd: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
    """See `ops.rope.rotate`, with complete tables `[positions, R]`.

    Token t of sequence b is at position `starts[b]` + t; a single start applies to all sequences.
    """
    batch, tokens, heads, size = x_BTNd.shape
    x_BTNd, far = evenly_spaced(x_BTNd)
    out = torch.empty(x_BTNd.shape)
    op = (
        program.ROTATE, x_BTNd.data_ptr(), far, out.data_ptr(), batch, tokens, heads, size,
        cos.shape[-1], cos.data_ptr(), sin.data_ptr(), starts.data_ptr(), len(starts) > 1,
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(x_BTNd, cos, sin, starts), writes=(out,))
    return out


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in bfloat16 or float16, contiguous."""
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=dtype)
    op = (
        program.NARROW, rows.data_ptr(), rows.stride(0), out.data_ptr(), len(rows), x.shape[-1],
        _NUMBERS.index(dtype),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(rows,), writes=(out,))
    return out


def stores(x_BKTd: Tensor, cache_BKCd: Tensor) -> bool:
    """Whether `store` supports it: one token in the cache's dtype, on a CPU."""
    return x_BKTd.shape[2] == 1 and x_BKTd.dtype == cache_BKCd.dtype and runs(x_BKTd)


def store(x_BK1d: Tensor, cache_BKCd: Tensor, starts: Tensor) -> None:
    """Store one new row of each head in slot `starts[b]`."""
    size = x_BK1d.element_size()
    batch, heads, _, columns = x_BK1d.shape
    op = (
        program.STORE, x_BK1d.data_ptr(), x_BK1d.stride(0) * size, x_BK1d.stride(1) * size,
        cache_BKCd.data_ptr(), *(far * size for far in cache_BKCd.stride()[:3]), batch, heads,
        columns * size, starts.data_ptr(), len(starts) > 1, cache_BKCd.shape[2],
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(x_BK1d, starts), writes=(cache_BKCd,))


def attends(
    q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, *, unfused: bool = False
) -> bool:
    """Whether `attend` supports it: heads within its size limits, contiguous in the last axis.

    Many tokens only with 16-bit keys, or `unfused` (with a cap or sinks); otherwise PyTorch's
    kernel is used. So it is without a processor level, where our FMAs would be function calls. For
    one token, rows of values may have gaps.
    """
    sizes = (k_BKCd.shape[-1], v_BKCe.shape[-1])
    one = q_BHTd.shape[2] == 1 and not (sizes[0] % 16 or sizes[1] % 16)
    many = (
        (k_BKCd.dtype in IN_16_BITS or unfused)
        and native.level() != "portable"
        and max(sizes) <= _MOST_SIZE
        and q_BHTd.shape[1] <= _MOST_GROUP * k_BKCd.shape[1]
        and v_BKCe.stride(2) == sizes[1]
    )
    return (
        takes(q_BHTd)
        and (one or many)
        and k_BKCd.dtype in _NUMBERS
        and k_BKCd.stride()[2:] == (sizes[0], 1)
        and v_BKCe.stride(3) == 1
    )


def attend(
    q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, starts: Tensor, *, scale: float,
    window: int | None, cap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.attention.attend`: query t of sequence b sees the slots up to `starts[b]` + t.

    With a window only the last ones. Returns `[B, H, T, e]`.
    """
    if q_BHTd.shape[2] > 1 or k_BKCd.shape[-1] % 16 or v_BKCe.shape[-1] % 16:
        return _attend_many(q_BHTd, k_BKCd, v_BKCe, starts, scale, window, cap, sinks_H)
    batch, heads, _, size = q_BHTd.shape
    kv_heads, capacity, values = v_BKCe.shape[1:]
    key_head, value_head = k_BKCd.stride(1), v_BKCe.stride(1)
    if kv_heads == 1 and heads % _PASS == 0:  # threads share them
        kv_heads, key_head, value_head = heads // _PASS, 0, 0
    queries, blocks = heads // kv_heads, -(-capacity // SLOTS) + (window is not None)
    if q_BHTd.stride(1) != size or q_BHTd.stride(3) != 1:
        q_BHTd = q_BHTd.contiguous()
    room = torch.empty(batch * heads * blocks * (values + 2))
    out = torch.empty(batch, heads, 1, values)
    arguments = (
        q_BHTd.data_ptr(), k_BKCd.data_ptr(), v_BKCe.data_ptr(), k_BKCd.stride(0),
        v_BKCe.stride(0), key_head, value_head, batch, kv_heads, queries, size,
        values, _bits(scale), window or 0, starts.data_ptr(), len(starts) > 1, room.data_ptr(),
        blocks, _NUMBERS.index(k_BKCd.dtype), q_BHTd.stride(0), out.data_ptr(),
        _bits(cap or 0.0), 0 if sinks_H is None else sinks_H.data_ptr(), v_BKCe.stride(2),
    )  # fmt: skip
    program.run(
        torch.get_num_threads(), (program.ATTEND, *arguments), (program.COMBINE, *arguments),
        reads=(q_BHTd, k_BKCd, v_BKCe, starts, sinks_H), writes=(room, out),
    )  # fmt: skip
    return out


def _attend_many(
    q_BHTd: Tensor, k_BKCd: Tensor, v_BKCe: Tensor, starts: Tensor, scale: float,
    window: int | None, cap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, heads, tokens, size = q_BHTd.shape
    kv_heads, _, values = v_BKCe.shape[1:]
    if q_BHTd.stride(3) != 1:
        q_BHTd = q_BHTd.contiguous()
    out_BTHe = torch.empty(batch, tokens, heads, values)
    op = (
        program.ATTEND_ROWS, q_BHTd.data_ptr(), k_BKCd.data_ptr(), v_BKCe.data_ptr(),
        k_BKCd.stride(0), v_BKCe.stride(0), k_BKCd.stride(1), v_BKCe.stride(1), batch, kv_heads,
        heads // kv_heads, size, values, _bits(scale), min(window or 0, 1 << 30),
        starts.data_ptr(), len(starts) > 1, _NUMBERS.index(k_BKCd.dtype), *q_BHTd.stride()[:3],
        tokens, out_BTHe.data_ptr(), _bits(cap or 0.0),
        0 if sinks_H is None else sinks_H.data_ptr(),
    )  # fmt: skip
    program.run(
        torch.get_num_threads(), op, reads=(q_BHTd, k_BKCd, v_BKCe, starts, sinks_H),
        writes=(out_BTHe,),
    )  # fmt: skip
    return out_BTHe.transpose(1, 2)


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
    op = (
        program.LOOK_UP, format, memory.data_ptr(), columns, ids.data_ptr(), ids.numel(),
        out.data_ptr(), rows, stored,
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(memory, ids), writes=(out,))
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` of equal shapes."""
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    op = (program.ADD, x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel())
    program.run(torch.get_num_threads(), op, reads=(x, y), writes=(out,))
    return out


def scale(x: Tensor, factor: float) -> Tensor:
    """`x · factor`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    op = (program.SCALE, x.data_ptr(), _bits(factor), out.data_ptr(), x.numel())
    program.run(torch.get_num_threads(), op, reads=(x,), writes=(out,))
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap · tanh(x / cap)`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    op = (program.SOFT_CAP, x.data_ptr(), _bits(cap), out.data_ptr(), x.numel())
    program.run(torch.get_num_threads(), op, reads=(x,), writes=(out,))
    return out


def activate(x: Tensor, name: str, limit: float | None = None) -> Tensor:
    """See `ops.activations.activation`."""
    rows = _rows(x)
    out = torch.empty(x.shape)
    op = (
        program.ACTIVATE, ACTIVATIONS.index(name), rows.data_ptr(), rows.stride(0), out.data_ptr(),
        len(rows), x.shape[-1], _bits(math.inf if limit is None else limit),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(rows,), writes=(out,))
    return out


def gate(x: Tensor, y: Tensor, clamp: GateClamp | None = None) -> Tensor:
    """See `ops.elements.gate`."""
    first, second = _rows(x), _rows(y)
    out = torch.empty(x.shape)
    op = (
        program.GATE, first.data_ptr(), second.data_ptr(), second.stride(0), out.data_ptr(),
        len(first), x.shape[-1], clamp is not None, _bits(clamp.limit if clamp else 0.0),
        _bits(clamp.offset if clamp else 0.0), first.stride(0),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(first, second), writes=(out,))
    return out


def join(x_BTNd: Tensor, y_BTNe: Tensor) -> Tensor:
    """See `ops.heads.join`."""
    groups, y_BTNe = _groups(x_BTNd), y_BTNe.contiguous()
    first, second = x_BTNd.shape[-1], y_BTNe.shape[-1]
    out = torch.empty(*x_BTNd.shape[:-1], first + second)
    op = (
        program.JOIN, groups.data_ptr(), groups.stride(1), first, y_BTNe.data_ptr(), second,
        out.data_ptr(), *groups.shape[:2], groups.stride(0),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(groups, y_BTNe), writes=(out,))
    return out


def has_heads(x_BHTk: Tensor, w_HNc: Tensor) -> bool:
    """Whether `multiply_heads` supports it: one row per head, and contiguous matrix rows."""
    return (
        x_BHTk.shape[2] == 1
        and x_BHTk.numel() > 0
        and x_BHTk.dtype in _NUMBERS
        and runs(x_BHTk)
        and w_HNc.dtype in _NUMBERS
        and w_HNc.shape[2] % 16 == 0
        and w_HNc.stride(2) == 1
    )


def multiply_heads(x_BH1k: Tensor, w_HNc: Tensor, *, turned: bool) -> Tensor:
    """See `ops.heads.to_rows`, or with `turned` `to_columns`."""
    batch, heads, _, given = x_BH1k.shape
    inputs, outputs = w_HNc.shape[1:] if turned else (w_HNc.shape[2], w_HNc.shape[1])
    if x_BH1k.stride(3) != 1:
        x_BH1k = x_BH1k.contiguous()
    out = torch.empty(batch, heads, 1, outputs + given - inputs)
    op = (
        program.MULTIPLY_HEADS, x_BH1k.data_ptr(), *x_BH1k.stride()[:2], w_HNc.data_ptr(),
        *w_HNc.stride()[:2], out.data_ptr(), batch, heads, inputs, outputs, given - inputs,
        _NUMBERS.index(w_HNc.dtype), turned,
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(x_BH1k, w_HNc), writes=(out,))
    return out


def product(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """`X Wᵀ + b` with a small float32 matrix with contiguous rows."""
    rows, (outputs, columns) = _rows(x), w_NK.shape
    out = torch.empty(*x.shape[:-1], outputs)
    op = (
        program.MULTIPLY_FLOAT, rows.data_ptr(), rows.stride(0), w_NK.data_ptr(), w_NK.stride(0),
        out.data_ptr(), len(rows), outputs, columns, 0 if b_N is None else b_N.data_ptr(),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(rows, w_NK, b_N), writes=(out,))
    return out


def share(x: Tensor, *, sigmoid: bool) -> Tensor:
    """See `ops.routing.share`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    op = (
        program.SHARE, x.data_ptr(), out.data_ptr(), x.numel() // columns, columns, sigmoid
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(x,), writes=(out,))
    return out


def choose(
    scores: Tensor, correction_E: Tensor | None, count: int, groups: int, kept: int, best: int
) -> Tensor:
    """See `ops.routing.choose`; `best`: number of scores summed to a group's score."""
    scores = scores.contiguous()
    experts = scores.shape[-1]
    out = torch.empty(*scores.shape[:-1], count, dtype=torch.int64)
    room = torch.empty(3 * scores.numel())
    op = (
        program.CHOOSE, scores.data_ptr(), out.data_ptr(), scores.numel() // experts, experts,
        count, 0 if correction_E is None else correction_E.data_ptr(), groups, kept,
        room.data_ptr(), best,
    )  # fmt: skip
    reads = (scores, correction_E)
    program.run(torch.get_num_threads(), op, reads=reads, writes=(out, room))
    return out


def weigh(
    scores: Tensor, chosen: Tensor, *, softmax: bool, renormalized: bool, least: float,
    factor: float, factor_E: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `ops.routing.weigh`."""
    scores, chosen = scores.contiguous(), chosen.contiguous()
    experts, count = scores.shape[-1], chosen.shape[-1]
    out = torch.empty(chosen.shape)
    op = (
        program.WEIGH, scores.data_ptr(), chosen.data_ptr(), out.data_ptr(),
        scores.numel() // experts, experts, count, softmax, renormalized, _bits(least),
        _bits(factor), 0 if factor_E is None else factor_E.data_ptr(),
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(scores, chosen, factor_E), writes=(out,))
    return out


def sum_experts(y_BKTD: Tensor, weight_BTK: Tensor, z_BTD: Tensor | None) -> Tensor:
    """See `ops.routing.summed`."""
    y_BKTD, weight_BTK = y_BKTD.contiguous(), weight_BTK.contiguous()
    z_BTD = None if z_BTD is None else z_BTD.contiguous()
    batch, count, tokens, columns = y_BKTD.shape
    out = torch.empty(batch, tokens, columns)
    op = (
        program.SUM_EXPERTS, y_BKTD.data_ptr(), weight_BTK.data_ptr(),
        0 if z_BTD is None else z_BTD.data_ptr(), out.data_ptr(), batch * tokens, columns, count,
        tokens,
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(y_BKTD, weight_BTK, z_BTD), writes=(out,))
    return out


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """`x ∘ f`, with one factor f `[…, 1]` per row."""
    x, factors = x.contiguous(), factors.contiguous()
    out = torch.empty_like(x)
    op = (
        program.SCALE_ROWS, x.data_ptr(), factors.data_ptr(), out.data_ptr(), factors.numel(),
        x.shape[-1],
    )  # fmt: skip
    program.run(torch.get_num_threads(), op, reads=(x, factors), writes=(out,))
    return out


def _groups(x: Tensor) -> Tensor:
    """Reshape to `[groups, rows, columns]`, as a view if possible.

    Heads of several tokens in a larger tensor are groups.
    """
    try:
        groups = x.view(1, -1, x.shape[-1])
    except RuntimeError:
        groups = x.flatten(0, -3)
    return groups if groups.stride(2) == 1 else groups.contiguous()


def _rows(x: Tensor) -> Tensor:
    """Reshape to `[rows, columns]` with contiguous rows, as a view if possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
