"""Dequantization against the gguf package's numpy code, in float32 and in float64.

Every type of the gguf package is here: one that it learns to decode turns a test red.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants as gguf_quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import given
from hypothesis import strategies as st
from live_tensors import Live
from tensors import HALVES, same

from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.ops import quant

PLAIN = [*quant.PLAIN]
PACKED = [*quant.DECODERS]
NUMBERS = {
    "zero": 0x0000, "negative zero": 0x8000, "smallest": 0x0001, "denormal": 0x03FF,
    "negative denormal": 0x8200, "one": 0x3C00, "largest": 0x7BFF, "inf": 0x7C00,
    "negative inf": 0xFC00, "nan": 0x7E00, "signalling nan": 0x7C01, "all ones": 0xFFFF,
}  # fmt: skip


def eight_bits(mantissa: int, bias: int) -> np.ndarray:
    """The values of an 8-bit float by its bits, float32 `[256]`, without infinity and NaN."""
    x = np.arange(256)
    exponent, fraction = (x & 127) >> mantissa, (x & ((1 << mantissa) - 1)) / 2.0**mantissa
    size = np.where(exponent == 0, fraction * 2.0, 1 + fraction) * 2.0 ** (exponent - bias)
    return np.where(x >> 7, -size, size).astype(np.float32)


# Both formats of "FP8 Formats for Deep Learning" (2022): E4M3 has no infinity and one NaN.
EIGHT_BITS = {"F8_E4M3": eight_bits(3, 7), "F8_E5M2": eight_bits(2, 15)}
EIGHT_BITS["F8_E4M3"][[0x7F, 0xFF]] = np.nan
EIGHT_BITS["F8_E5M2"][[0x7C, 0xFC]] = np.inf, -np.inf
EIGHT_BITS["F8_E5M2"][[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan


def reference(raw: np.ndarray, format: str) -> np.ndarray:
    if format in PLAIN and format != "BF16":
        if format in EIGHT_BITS:
            return EIGHT_BITS[format][raw]
        kind = {"F": "float", "I": "int"}[format[0]] + format[1:]
        return raw.view(kind).astype(np.float64 if format == "F64" else np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inf · 0 and overflow are part of the test
        return gguf_dequantize(raw, GGMLQuantizationType[format])


def random_blocks(format: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    size = quant.FORMATS[format][1]
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)


@pytest.mark.parametrize("format", PACKED + PLAIN)
def test_random_bytes_equal_gguf(format: str) -> None:
    raw = random_blocks(format, rows=33, blocks=28)
    dtype = torch.float64 if format == "F64" else torch.float32
    same(quant.dequantize(torch.from_numpy(raw), format, dtype=dtype), reference(raw, format))


@pytest.mark.parametrize("format", EIGHT_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_of_the_256_numbers(format: str, dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8).view(4, 64)
    found = quant.dequantize(raw, format, dtype=dtype)
    if dtype in (torch.float32, torch.float64):
        kind = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
        same(found, EIGHT_BITS[format][raw].astype(kind))
    theirs = raw.view(torch.float8_e4m3fn if format == "F8_E4M3" else torch.float8_e5m2).to(dtype)
    torch.testing.assert_close(found, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.nan_to_num(7.0).signbit(), theirs.nan_to_num(7.0).signbit())


def set_scales(block: np.ndarray, format: str, halves: tuple[int, int]) -> None:
    """Writes two half-precision numbers where a block has its scales; not those of 8 bits."""
    for offset, half in zip(HALVES[format], halves, strict=False):
        block[offset : offset + 2] = (half & 0xFF, half >> 8)
    if format == "IQ1_M":  # four nibbles, each the highest of two bytes
        for k in range(4):
            at = 49 + 2 * k
            block[at] = (block[at] & 0x0F) | (halves[0] >> 4 * k & 15) << 4


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F, 0x55, None])
def test_adversarial_scales_equal_gguf(format: str, fill: int | None) -> None:
    raw = random_blocks(format, rows=len(NUMBERS) ** 2, blocks=2, seed=1)
    if fill is not None:
        raw[:] = fill
    size = quant.FORMATS[format][1]
    for row, halves in enumerate((a, b) for a in NUMBERS.values() for b in NUMBERS.values()):
        for block in range(2):
            set_scales(raw[row, block * size : (block + 1) * size], format, halves)
    got = quant.dequantize(torch.from_numpy(raw), format, dtype=torch.float32)
    same(got, reference(raw, format))


def test_every_type_of_the_gguf_package_is_decoded() -> None:
    known = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            gguf_dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        known.append(kind.name)
    assert {*known} - {"F32", "F16", "BF16"} == {*PACKED} == {*HALVES}


@pytest.mark.parametrize("format", ["MXFP4", "NVFP4"])
def test_every_scale_of_eight_bits_equals_gguf(format: str) -> None:
    raw = random_blocks(format, rows=256, blocks=1, seed=7)
    raw[:, : 4 if format == "NVFP4" else 1] = np.arange(256, dtype=np.uint8)[:, None]
    got = quant.dequantize(torch.from_numpy(raw), format, dtype=torch.float32)
    same(got, reference(raw, format))


class Wide:
    """NumPy, whose float32 is float64."""

    float32 = np.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.mark.parametrize("format", PACKED)
def test_float64_is_computed_in_float64(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the gguf package does it where its numbers are float64."""
    raw = random_blocks(format, rows=33, blocks=28)
    # finite scales: clear the exponent's top bit
    for offset in (54,) if format == "IQ1_M" else HALVES[format]:
        raw[:, offset + 1 :: quant.FORMATS[format][1]] &= 0xBF
    got = quant.dequantize(torch.from_numpy(raw), format, dtype=torch.float64)
    reference(raw, format)  # the package keeps a grid as float32, whoever asks first
    scales = gguf_quants.MXFP4.e8m0_to_fp32_half(np.arange(256, dtype=np.uint8))  # by their bits
    monkeypatch.setattr(gguf_quants.MXFP4, "e8m0_to_fp32_half", scales.astype(np.float64).take)
    monkeypatch.setattr(gguf_quants, "np", Wide())
    same(got, reference(raw, format))


@pytest.mark.parametrize("format", PACKED + PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_float32_rounded_once(format: str, dtype: torch.dtype) -> None:
    raw = torch.from_numpy(random_blocks(format, rows=5, blocks=3, seed=3))
    exact = quant.dequantize(raw, format, dtype=torch.float32)
    got = quant.dequantize(raw, format, dtype=dtype)
    assert got.dtype == dtype
    assert torch.equal(got.float().nan_to_num(7.0), exact.to(dtype).float().nan_to_num(7.0))


@pytest.mark.parametrize(
    "format", ["Q4_1", "Q6_K", "TQ1_0", "MXFP4", "IQ2_XS", "IQ1_M", "F16", "F64", "I8", "F8_E4M3"]
)
def test_any_memory_layout_gives_the_same(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks(format, rows=9, blocks=4, seed=4))
    dtype = torch.float64 if format == "F64" else torch.float32
    expected = quant.dequantize(raw, format, dtype=dtype).nan_to_num(7.0)
    monkeypatch.setattr(
        "llmcli.ops.quant.decode._CHUNK", 11 * quant.FORMATS[format][0]
    )  # several uneven chunks, of blocks or of two rows
    wide = torch.zeros(9, raw.shape[1] + 6, dtype=torch.uint8)
    wide[:, 3:-3] = raw
    odd = torch.empty(raw.numel() + 1, dtype=torch.uint8)[1:].view_as(raw)
    odd.copy_(raw)
    for source in (raw, wide[:, 3:-3], odd):
        got = quant.dequantize(source, format, dtype=dtype)
        assert torch.equal(got.nan_to_num(7.0), expected)
        frame = torch.full((9, expected.shape[1] + 2), -1.0, dtype=dtype)
        inner = frame[:, 1:-1]
        assert quant.dequantize(source, format, dtype=dtype, out=inner) is inner
        assert torch.equal(inner.nan_to_num(7.0), expected)
        assert (frame[:, 0] == -1).all()
        assert (frame[:, -1] == -1).all()


@pytest.mark.parametrize("format", PACKED)
def test_temporary_memory_is_bounded_whatever_the_size(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.ops.quant.decode._CHUNK", 1 << 14)
    most = []
    for rows in (64, 256):  # one chunk, and four
        raw = torch.from_numpy(random_blocks(format, rows, 256 // quant.FORMATS[format][0]))
        out = torch.empty(rows, 256, dtype=torch.bfloat16)
        quant.dequantize(raw, format, dtype=out.dtype, out=out)  # its tables are made and kept
        with Live() as live:
            quant.dequantize(raw, format, dtype=out.dtype, out=out)
        most.append(live.most - out.nbytes - raw.nbytes)
    assert most[1] == most[0]
    assert 4 << 14 < most[0] < 10 << 14  # the float32 that is rounded, and what is unpacked


def test_empty_and_meta() -> None:
    empty = torch.empty(0, 36, dtype=torch.uint8)
    assert quant.dequantize(empty, "Q4_0", dtype=torch.float32).shape == (0, 64)
    meta = torch.empty(5, 210, dtype=torch.uint8, device="meta")
    found = quant.dequantize(meta, "Q6_K", dtype=torch.bfloat16)
    assert (found.is_meta, found.shape, found.dtype) == (True, (5, 256), torch.bfloat16)


@pytest.mark.parametrize("format", ["Q8_1", "Q8_K", "Q1_0", "U8", "nonsense"])
def test_other_formats_are_refused_by_name(format: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"`{format}`") as caught:
        quant.dequantize(torch.zeros(1, 66, dtype=torch.uint8), format, dtype=torch.float32)
    assert "Q4_1" in (caught.value.hint or "")


def test_torn_rows_are_refused() -> None:
    raw, options = torch.zeros(2, 18, dtype=torch.uint8), {"dtype": torch.float32}
    with pytest.raises(CheckpointError, match="18 bytes"):
        quant.dequantize(torch.zeros(2, 19, dtype=torch.uint8), "Q4_0", **options)
    with pytest.raises(CheckpointError, match="int8"):
        quant.dequantize(raw.to(torch.int8), "Q4_0", **options)
    for out in (torch.empty(2, 31), torch.empty(2, 32, dtype=torch.float64)):
        with pytest.raises(ValueError, match="not"):
            quant.dequantize(raw, "Q4_0", **options, out=out)


@pytest.mark.parametrize("format", [x for x in PACKED if x.startswith("IQ") or "FP4" in x])
def test_decoding_leaves_the_tables_as_they_were(format: str) -> None:
    size = quant.FORMATS[format][1]
    raw = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (40, size), dtype=np.uint8))
    first = quant.dequantize(raw, format, dtype=torch.float64)
    quant.dequantize(raw.flip(0), format, dtype=torch.float64).zero_()
    again = quant.dequantize(raw, format, dtype=torch.float64)
    assert torch.equal(first.nan_to_num(7.0), again.nan_to_num(7.0))


# ---- float32 rows to blocks

ENCODED = ("Q8_0", "Q4_1")
LARGEST = float(np.finfo(np.float32).max)


def check_encoded(values):
    for name in ENCODED:
        found = quant.quantize(torch.from_numpy(values), name).numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, of scales beyond float16
            right = gguf_quants.quantize(values, GGMLQuantizationType[name])
        assert np.array_equal(found, right), name


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 4), st.integers(-44, 37))
def test_random_rows_of_every_magnitude_are_equal_bit_for_bit(seed, rows, blocks, exponent):
    draw = np.random.default_rng(seed)
    values = draw.normal(0.0, 1.0, (rows, 32 * blocks)) * 10.0**exponent
    check_encoded(values.astype(np.float32))


EXTREME = {
    "zeros": np.zeros(32), "equal": np.full(32, 3.5), "halves": np.arange(-16, 16) / 2,
    "halves of Q8_0": np.r_[127.0, np.arange(31) - 15.5], "subnormal": np.arange(32) * 1e-45,
    "outlier": np.where(np.arange(32) == 7, -127.5, 0.25), "largest": np.full(32, LARGEST),
    "both": np.tile([LARGEST, -LARGEST], 16),  # the distance is infinite
    "all": 10.0 ** np.linspace(-45, 38, 32),
}  # fmt: skip


@pytest.mark.parametrize("row", EXTREME.values(), ids=EXTREME)
def test_extreme_rows_are_equal_bit_for_bit(row):
    check_encoded(np.stack([row, -row, row[::-1]]).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ENCODED)
def test_a_number_that_is_not_finite_spoils_its_own_block_alone(name, bad):
    values = torch.ones(2, 64)
    right = quant.quantize(values, name)
    values[1, 40] = bad
    found = quant.quantize(values, name)
    half = right.shape[1] // 2
    assert torch.equal(found[0], right[0])
    assert torch.equal(found[1, :half], right[1, :half])
    assert not found[1, half : half + 4].view(torch.float16).isfinite().all()


def test_nothing_else_is_encoded():
    with pytest.raises(ValueError, match="unsupported format Q4_K"):
        quant.quantize(torch.zeros(1, 256), "Q4_K")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", PACKED + PLAIN)
def test_cuda_equals_cpu(format: str) -> None:
    raw = torch.from_numpy(random_blocks(format, rows=33, blocks=7))
    dtype = torch.float64 if format == "F64" else torch.float32
    expected = quant.dequantize(raw, format, dtype=dtype)
    same(quant.dequantize(raw.cuda(), format, dtype=dtype).cpu(), expected.numpy())
