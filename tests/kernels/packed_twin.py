"""What the kernels of packed blocks compute, in NumPy: the twin of packing.c and packed.c.

Axes: N rows of weights, K columns, M rows of x; a part is the columns that share a scale.
"""

from __future__ import annotations

import numpy as np
from tensors import HALVES

from llmcli.config.formats import FORMATS

SUBTRACTED = ("Q2_K", "Q4_K", "Q5_K")  # their minima; those of Q4_1 and Q5_1 are added

_STEPS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def _half(blocks, at):
    """The float16 number at that byte of each block, as float32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _bits(bytes_, count, width):
    """Of each byte `count` numbers of `width` bits, the lowest first: `[blocks, count, bytes]`."""
    shifts = width * np.arange(count)[:, None]
    return bytes_[:, None, :] >> shifts & ((1 << width) - 1)


def _flat(numbers):
    return numbers.reshape(len(numbers), -1)


def _halves(bytes_, width, size):
    """As K-quants do: each `size` bytes hold their lowest bits, then those above, and so on."""
    groups = bytes_.reshape(len(bytes_), -1, size)
    return np.concatenate([_flat(_bits(groups[:, i], 8 // width, width))
                           for i in range(groups.shape[1])], 1)  # fmt: skip


def _six_bits(s):
    """Scales and minima of the 8 runs of Q4_K and Q5_K, `[blocks, 8]` each."""
    low, mid, high = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], 1)
    return scale, np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], 1)


def _decode_block(f, blocks):
    """Of blocks `[n, bytes]`: integers `[n, columns]`, scales `[n, parts]`, minima or None."""
    b = blocks.astype(np.int64)
    d, dmin, *_ = *(_half(blocks, at) for at in HALVES[f]), None, None
    if f == "Q4_0":
        return _halves(b[:, 2:], 4, 16) - 8, d, None
    if f == "Q4_1":
        return _halves(b[:, 4:], 4, 16), d, dmin
    if f in ("Q5_0", "Q5_1"):
        at = 2 if f == "Q5_0" else 4
        fifth = _flat(_bits(b[:, at : at + 4], 8, 1).transpose(0, 2, 1))
        q = _halves(b[:, at + 4 :], 4, 16) | fifth << 4
        return (q - 16, d, None) if f == "Q5_0" else (q, d, dmin)
    if f == "Q8_0":
        return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.int64), d, None
    if f == "IQ4_NL":
        return _STEPS[_halves(b[:, 2:], 4, 16)], d, None
    if f == "MXFP4":
        scale = np.ldexp(np.float32(1), b[:, :1] - 128).astype(np.float32)
        return _FLOATS[_halves(b[:, 1:], 4, 16)], scale, None
    if f == "IQ4_XS":
        above = _flat(_bits(b[:, 2:4], 4, 2).transpose(0, 2, 1))
        below = _flat(_bits(b[:, 4:8], 2, 4).transpose(0, 2, 1))
        scale = d * (below + 16 * above - 32).astype(np.float32)
        return _STEPS[_halves(b[:, 8:], 4, 16)], scale, None
    if f == "Q2_K":
        scale, min_ = (d * (b[:, :16] & 15)), dmin * (b[:, :16] >> 4)
        return _halves(b[:, 16:80], 2, 32), scale.astype(np.float32), min_.astype(np.float32)
    if f == "Q3_K":
        q = _halves(b[:, 32:96], 2, 32) | _halves(b[:, :32], 1, 32) << 2
        below = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], 1)
        above = _flat(_bits(b[:, 104:108], 4, 2))
        return q - 4, (d * (below + 16 * above - 32)).astype(np.float32), None
    if f in ("Q4_K", "Q5_K"):
        scale, min_ = _six_bits(b[:, 4:16])
        q = _halves(b[:, 16:] if f == "Q4_K" else b[:, 48:], 4, 32)
        if f == "Q5_K":
            q = q | _halves(b[:, 16:48], 1, 32) << 4
        return q, (d * scale).astype(np.float32), (dmin * min_).astype(np.float32)
    assert f == "Q6_K"
    q = _halves(b[:, :128], 4, 64) | _halves(b[:, 128:192], 2, 32) << 4
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return q - 32, (d * scale).astype(np.float32), None


def decoded(f, raw):
    """Of a file's rows, uint8 `[N, bytes]`: integers `[N, K]`, scales and minima `[N, parts]`."""
    with np.errstate(all="ignore"):
        q, scale, min_ = _decode_block(f, raw.reshape(-1, FORMATS[f].bytes))
    rows = len(raw)
    return q.reshape(rows, -1), scale.reshape(rows, -1), min_ is not None and min_.reshape(rows, -1)


def dequantized(f, raw):
    """float32 `[N, K]`."""
    q, scale, min_ = decoded(f, raw)
    with np.errstate(all="ignore"):
        parts = q.reshape(*scale.shape, -1).astype(np.float32) * scale[..., None]
        if min_ is not False:
            parts = parts - min_[..., None] if f in SUBTRACTED else parts + min_[..., None]
    return parts.reshape(q.shape)


def rounded(x, digits=2):
    """x float32 `[M, K]` in 16 or 8 bits: integers `[M, K]` and d, float32 `[M, K / 32]`."""
    runs = x.reshape(len(x), -1, 32)
    most = np.abs(runs).max(-1)
    finite, used = np.isfinite(runs).all(-1), most >= np.float32(2.0**-109)
    with np.errstate(all="ignore"):
        inverse = np.where(finite & used, np.float32(127) / most, np.float32(0))
        d = np.where(used, most / np.float32(127), np.float32(0))
        d = np.where(finite, d, np.float32(np.nan)).astype(np.float32)
    scaled = np.where(finite[..., None], runs, np.float32(0)) * inverse[..., None]
    q = np.rint(scaled)
    assert q.dtype == d.dtype == np.float32
    assert np.abs(q).max(initial=0) <= 127
    if digits == 2:
        low = np.rint((scaled - q) * np.float32(256)).clip(-127, 127)
        q, d = q * np.float32(256) + low, d / np.float32(256)
    return q.astype(np.int64).reshape(x.shape), d


def seen(x, digits=2):
    """x as the kernels read it, float32."""
    q, d = rounded(x, digits)
    with np.errstate(all="ignore"):
        return (q.reshape(*d.shape, 32).astype(np.float32) * d[..., None]).reshape(x.shape)


def product(f, raw, x, digits=2):
    """float32 `[M, N]`, bit for bit."""
    w, scale, min_ = decoded(f, raw)
    q, d = rounded(x, digits)
    out = np.zeros((len(x), len(raw)), np.float32)
    width = w.shape[1] // scale.shape[1]
    with np.errstate(all="ignore"):
        for part in range(scale.shape[1]):
            at = slice(part * width, (part + 1) * width)
            dot = (q[:, at] @ w[:, at].T).astype(np.float32)
            of_run = d[:, part * width // 32]
            out = out + dot * (scale[None, :, part] * of_run[:, None])
            if min_ is not False:
                sums = q[:, at].sum(1).astype(np.float32)
                added = min_[None, :, part] * (of_run * sums)[:, None]
                out = out - added if f in SUBTRACTED else out + added
    assert out.dtype == np.float32
    return out
