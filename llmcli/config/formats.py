"""Formats of GGUF files, their kernels, and the size of a packed matrix.

No torch. See `kernels/formats.h`: 16 rows of a packed matrix are interleaved, and 6-bit scales are
stored as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

# Stored formats kept unchanged → dtype.
IN_16_BITS = {"BF16": "bfloat16", "F16": "float16"}

ROWS = 16  # interleaved
RUN = 32  # columns
DEEP = 256  # contiguous columns of the input for products of pairs (bfloat16_pairs.h)
# Size of `struct activation` (packed.h) by its digits: a run of the input in 8 or 16 bits.
ACTIVATION_BYTES = {1: 48, 2: 80}


@dataclass(frozen=True)
class Format:
    """A format of GGUF files: `type` is its number there; `block` elements take `bytes` bytes.

    With CPU kernels: its `number` in the library, and `run` and `top`, bytes of 16 rows × 32 and
    × 256 columns of a packed matrix. `sums`: numbers that 32 columns add to the float32 sum of a
    product: one per scale and per minimum. `on_card`: whether there are GPU kernels.
    """

    type: int
    block: int
    bytes: int
    number: int = -1
    run: int = 0
    top: int = 0
    sums: int = 1
    on_card: bool = False


# Types, blocks and bytes: ggml's type traits, the same facts as gguf's GGML_QUANT_SIZES; missing
# types were withdrawn. `run`: codes, high bits, scales and minima; `top`: float16 factors.
FORMATS = {
    "F32": Format(0, 1, 4), "F16": Format(1, 1, 2), "BF16": Format(30, 1, 2),
    "F64": Format(28, 1, 8), "I8": Format(24, 1, 1), "I16": Format(25, 1, 2),
    "I32": Format(26, 1, 4), "I64": Format(27, 1, 8),
    "Q4_0": Format(2, 32, 18, number=0, run=256 + 32, on_card=True),
    "Q4_1": Format(3, 32, 20, number=1, run=256 + 32 + 32, sums=2, on_card=True),
    "Q5_0": Format(6, 32, 22, number=2, run=256 + 64 + 32, on_card=True),
    "Q5_1": Format(7, 32, 24, number=3, run=256 + 64 + 32 + 32, sums=2),
    "Q8_0": Format(8, 32, 34, number=4, run=512 + 32, on_card=True),
    "Q2_K": Format(10, 256, 84, number=5, run=128 + 32 + 32, top=64, sums=4),
    "Q3_K": Format(11, 256, 110, number=6, run=128 + 64 + 32, top=32, sums=2),
    "Q4_K": Format(12, 256, 144, number=7, run=256 + 16 + 16, top=64, sums=2, on_card=True),
    "Q5_K": Format(13, 256, 176, number=8, run=256 + 64 + 16 + 16, top=64, sums=2, on_card=True),
    "Q6_K": Format(14, 256, 210, number=9, run=256 + 128 + 32, top=32, sums=2, on_card=True),
    "IQ4_NL": Format(20, 32, 18, number=10, run=256 + 32),
    "IQ4_XS": Format(23, 256, 136, number=11, run=256 + 16, top=32),
    "MXFP4": Format(39, 32, 17, number=12, run=256 + 16),
    "Q8_1": Format(9, 32, 40), "Q8_K": Format(15, 256, 292), "Q1_0": Format(41, 128, 18),
    "IQ2_XXS": Format(16, 256, 66), "IQ2_XS": Format(17, 256, 74), "IQ2_S": Format(22, 256, 82),
    "IQ3_XXS": Format(18, 256, 98), "IQ3_S": Format(21, 256, 110), "IQ1_S": Format(19, 256, 50),
    "IQ1_M": Format(29, 256, 56), "TQ1_0": Format(34, 256, 54), "TQ2_0": Format(35, 256, 66),
    "NVFP4": Format(40, 64, 36),
}  # fmt: skip
PACKED = {name: one for name, one in FORMATS.items() if one.run}
ON_CARD = tuple(name for name, one in FORMATS.items() if one.on_card)
# Numbers of a matrix dequantized at a time on a GPU, for a product of many rows: 128 MiB in 16 bits
# plus 32 MiB of float32, so that a large embedding is never expanded as a whole.
DEQUANTIZED_AT_ONCE = 1 << 26
DECODED_AT_ONCE = 1 << 22


def stored_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in the file's layout."""
    return rows * (columns // FORMATS[format].block) * FORMATS[format].bytes


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix, including padding rows of the last group."""
    size = PACKED[format]
    group = columns // RUN * size.run + columns // 256 * size.top
    return -(-rows // ROWS) * (-(-group // 64) * 64)
