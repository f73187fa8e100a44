"""Block formats with kernels, and the size of a packed matrix.

No torch. See `kernels/formats.h`: 16 rows are interleaved, and 6-bit scales are stored as bytes.
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
class PackedFormat:
    """A packed format: its `number` in the library; `block` columns share a scale.

    `run` and `top`: bytes of 16 rows × 32 and × 256 columns. `sums`: numbers that 32 columns add to
    the float32 sum of a product: one per scale and per minimum.
    """

    number: int
    block: int
    run: int
    top: int = 0
    sums: int = 1


# Codes, high bits, scales, minima of 16 rows × 32 columns; float16 factors of 16 rows × 256.
PACKED = {
    "Q4_0": PackedFormat(0, 32, 256 + 32),
    "Q4_1": PackedFormat(1, 32, 256 + 32 + 32, sums=2),
    "Q5_0": PackedFormat(2, 32, 256 + 64 + 32),
    "Q5_1": PackedFormat(3, 32, 256 + 64 + 32 + 32, sums=2),
    "Q8_0": PackedFormat(4, 32, 512 + 32),
    "Q2_K": PackedFormat(5, 256, 128 + 32 + 32, 64, sums=4),
    "Q3_K": PackedFormat(6, 256, 128 + 64 + 32, 32, sums=2),
    "Q4_K": PackedFormat(7, 256, 256 + 16 + 16, 64, sums=2),
    "Q5_K": PackedFormat(8, 256, 256 + 64 + 16 + 16, 64, sums=2),
    "Q6_K": PackedFormat(9, 256, 256 + 128 + 32, 32, sums=2),
    "IQ4_NL": PackedFormat(10, 32, 256 + 32),
    "IQ4_XS": PackedFormat(11, 256, 256 + 16, 32),
    "MXFP4": PackedFormat(12, 32, 256 + 16),
}


# Formats with GPU kernels: (columns, bytes) of a block in the file's layout.
ON_CARD = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# Numbers of a matrix dequantized at a time on a GPU, for a product of many rows: 128 MiB in 16 bits
# plus 32 MiB of float32, so that a large embedding is never expanded as a whole.
DEQUANTIZED_AT_ONCE = 1 << 26
DECODED_AT_ONCE = 1 << 22


def stored_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in a format of `ON_CARD`, in the file's layout."""
    block, size = ON_CARD[format]
    return rows * (columns // block) * size


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix, including padding rows of the last group."""
    size = PACKED[format]
    group = columns // RUN * size.run + columns // 256 * size.top
    return -(-rows // ROWS) * (-(-group // 64) * 64)
