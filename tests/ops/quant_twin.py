"""A slow obvious twin of the decoders: one block, element by element, in Python's doubles.

Written from ggml's C (`dequantize_row_*` in ggml-quants.c), not from the code under test. The
grids of the IQ formats are gguf's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from gguf import quants

FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NL = quants.IQ4_NL.kvalues


def twin(block: bytes, format: str) -> list[float]:
    """The values of one block."""
    return list(TWINS[format](block))


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def word(block: bytes, at: int, size: int = 2) -> int:
    return int.from_bytes(block[at : at + size], "little")


def nibble(block: bytes, at: int, i: int) -> int:
    """Nibble i of the bytes from `at`, low before high."""
    return block[at + i // 2] >> 4 * (i % 2) & 15


def signed(byte: int) -> int:
    return byte - 256 if byte >= 128 else byte


def split_nibbles(block: bytes, at: int, count: int) -> list[int]:
    """`count` low nibbles, then the `count` high ones of the same bytes."""
    return [x & 15 for x in block[at : at + count]] + [x >> 4 for x in block[at : at + count]]


def simple(block: bytes, *, five: bool, minimum: bool) -> Iterator[float]:
    at = 4 if minimum else 2
    high = 0
    if five:
        high, at = word(block, at, 4), at + 4
    for j, x in enumerate(split_nibbles(block, at, 16)):
        q = x | (high >> j & 1) << 4
        if minimum:
            yield half(block, 0) * q + half(block, 2)
        else:
            yield half(block, 0) * (q - (16 if five else 8))


def q8_0(block: bytes) -> Iterator[float]:
    yield from (half(block, 0) * signed(x) for x in block[2:])


def q2_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        q = block[16 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        s = block[i // 16]
        yield half(block, 80) * (s & 15) * q - half(block, 82) * (s >> 4)


def q3_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        q = block[32 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        if not block[i % 32] >> i // 32 & 1:
            q -= 4
        run = i // 16
        s = block[96 + run % 8] >> 4 * (run // 8) & 15
        s |= (block[104 + run % 4] >> 2 * (run // 4) & 3) << 4
        yield half(block, 108) * (s - 32) * q


def k_scale_min(j: int, q: bytes) -> tuple[int, int]:
    """`get_scale_min_k4` of ggml-quants.c."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def q4_q5_k(block: bytes, *, five: bool) -> Iterator[float]:
    for i in range(256):
        run, j = i // 32, i % 32
        q = block[(48 if five else 16) + run // 2 * 32 + j] >> 4 * (run % 2) & 15
        if five:
            q |= (block[16 + j] >> run & 1) << 4
        s, m = k_scale_min(run, block[4:16])
        yield half(block, 0) * s * q - half(block, 2) * m


def q6_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        h, run, j = i // 128, i % 128 // 32, i % 32
        q = block[h * 64 + run % 2 * 32 + j] >> 4 * (run // 2) & 15
        q |= (block[128 + h * 32 + j] >> 2 * run & 3) << 4
        yield half(block, 208) * signed(block[192 + i // 16]) * (q - 32)


def tq1_0(block: bytes) -> Iterator[float]:
    for at, width, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        for digit in range(digits):
            for byte in block[at : at + width]:
                yield half(block, 52) * ((byte * 3**digit % 256 * 3 >> 8) - 1)


def tq2_0(block: bytes) -> Iterator[float]:
    for i in range(256):
        q = block[i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        yield half(block, 64) * (q - 1)


def mxfp4(block: bytes) -> Iterator[float]:
    yield from (2.0 ** (block[0] - 128) * FP4[x] for x in split_nibbles(block, 1, 16))


def nvfp4(block: bytes) -> Iterator[float]:
    for run in range(4):
        exponent, mantissa = block[run] >> 3 & 15, block[run] & 7
        d = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
        d = 0.0 if block[run] == 0x7F else d / 2
        yield from (d * FP4[x] for x in split_nibbles(block, 4 + 8 * run, 8))


def iq4_nl(block: bytes) -> Iterator[float]:
    yield from (half(block, 0) * NL[x] for x in split_nibbles(block, 2, 16))


def iq4_xs(block: bytes) -> Iterator[float]:
    for run in range(8):
        s = nibble(block, 4, run) | (word(block, 2) >> 2 * run & 3) << 4
        for x in split_nibbles(block, 8 + 16 * run, 16):
            yield half(block, 0) * (s - 32) * NL[x]


def table(format: str) -> np.ndarray:
    """The entries of a grid, each of 8 or 4 values."""
    found = vars(quants)[format]
    found.init_grid()
    return np.asarray(found.grid).reshape(found.grid_shape)


def parity(seven: int) -> int:
    """`ksigns_iq2xs`: seven signs and an eighth."""
    return quants.IQ2_XXS.ksigns[seven]


def grids(block: bytes, format: str) -> Iterator[tuple[float, int, int]]:
    """The scale before d, the index and the signs of each entry of a block's grid."""
    for i in range(64 if "IQ3" in format else 32):  # entries in order
        if format == "IQ2_XXS":
            tail = word(block, 2 + 8 * (i // 4) + 4, 4)
            index, sign = block[2 + 8 * (i // 4) + i % 4], parity(tail >> 7 * (i % 4) & 127)
            yield (tail >> 28) / 4 + 0.125, index, sign
        elif format == "IQ2_XS":
            x = word(block, 2 + 2 * i)
            yield nibble(block, 66, i // 2) / 4 + 0.125, x & 511, parity(x >> 9)
        elif format == "IQ2_S":
            index = block[2 + i] | (block[66 + i // 4] >> 2 * (i % 4) & 3) << 8
            yield nibble(block, 74, i // 2) / 4 + 0.125, index, block[34 + i]
        elif format == "IQ3_XXS":
            tail = word(block, 66 + 4 * (i // 8), 4)
            sign = parity(tail >> 7 * (i % 8 // 2) & 127)
            yield (tail >> 28) / 2 + 0.25, block[2 + i], sign >> 4 * (i % 2)
        else:
            index = block[2 + i] | (block[66 + i // 8] >> i % 8 & 1) << 8
            yield 2 * nibble(block, 106, i // 8) + 1, index, block[74 + i // 2] >> 4 * (i % 2)


def iq2_iq3(block: bytes, format: str) -> Iterator[float]:
    entries = table(format)
    for scale, index, sign in grids(block, format):
        for j, value in enumerate(entries[index].tolist()):
            yield half(block, 0) * scale * (-value if sign >> j & 1 else value)


def iq1_s(block: bytes) -> Iterator[float]:
    entries = table("IQ1_S")
    for i in range(32):
        tail = word(block, 34 + 2 * (i // 4))
        delta = -0.125 if tail >> 15 else 0.125
        index = block[2 + i] | (tail >> 3 * (i % 4) & 7) << 8
        for value in entries[index].tolist():
            yield half(block, 0) * (2 * (tail >> 12 & 7) + 1) * (value + delta)


def iq1_m(block: bytes) -> Iterator[float]:
    entries = table("IQ1_S")
    tail = [word(block, 48 + 2 * k) for k in range(4)]
    bits = sum((x >> 12) << 4 * k for k, x in enumerate(tail))
    d = half(bits.to_bytes(2, "little"), 0)
    for i in range(32):
        high = nibble(block, 32, i)
        s = tail[i // 8] >> 3 * (i // 2 % 4) & 7
        for value in entries[block[i] | (high & 7) << 8].tolist():
            yield d * (2 * s + 1) * (value + (-0.125 if high & 8 else 0.125))


TWINS: dict[str, Callable[[bytes], Iterator[float]]] = {
    "Q4_0": lambda b: simple(b, five=False, minimum=False),
    "Q4_1": lambda b: simple(b, five=False, minimum=True),
    "Q5_0": lambda b: simple(b, five=True, minimum=False),
    "Q5_1": lambda b: simple(b, five=True, minimum=True),
    "Q4_K": lambda b: q4_q5_k(b, five=False),
    "Q5_K": lambda b: q4_q5_k(b, five=True),
    **{one.__name__.upper(): one for one in
       (q8_0, q2_k, q3_k, q6_k, tq1_0, tq2_0, mxfp4, nvfp4, iq4_nl, iq4_xs, iq1_s, iq1_m)},
    **{name: lambda b, name=name: iq2_iq3(b, name)
       for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}  # fmt: skip
