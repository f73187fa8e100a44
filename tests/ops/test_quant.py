"""Dequantization against the gguf package's numpy code and against loops read from ggml's C."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.ops import quant

PACKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
PLAIN = ["F32", "F16", "BF16", "F64"]
# byte offsets of the half-precision scales in a block
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip
HALVES = {
    "zero": 0x0000, "negative zero": 0x8000, "smallest": 0x0001, "denormal": 0x03FF,
    "negative denormal": 0x8200, "one": 0x3C00, "largest": 0x7BFF, "inf": 0x7C00,
    "negative inf": 0xFC00, "nan": 0x7E00, "signalling nan": 0x7C01, "all ones": 0xFFFF,
}  # fmt: skip


def reference(raw: np.ndarray, format: str) -> np.ndarray:
    if format == "F64":
        return raw.view(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inf · 0 and overflow are part of the test
        return gguf_dequantize(raw, GGMLQuantizationType[format])


def random_blocks(format: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    size = quant.FORMATS[format][1]
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)


def assert_bit_equal(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal bit for bit, the sign of zero included, and NaN in the same places."""
    values = got.numpy()
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    bits = np.uint64 if values.dtype == np.float64 else np.uint32
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    wanted = np.ascontiguousarray(expected)
    assert np.array_equal(np.where(nan, 0, values.view(bits)), np.where(nan, 0, wanted.view(bits)))


@pytest.mark.parametrize("format", PACKED + PLAIN)
def test_random_bytes_equal_gguf(format: str) -> None:
    raw = random_blocks(format, rows=33, blocks=7)
    dtype = torch.float64 if format == "F64" else torch.float32
    assert_bit_equal(
        quant.dequantize(torch.from_numpy(raw), format, dtype=dtype), reference(raw, format)
    )


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F, 0x55, None])
def test_adversarial_scales_equal_gguf(format: str, fill: int | None) -> None:
    raw = random_blocks(format, rows=len(HALVES) ** 2, blocks=2, seed=1)
    if fill is not None:
        raw[:] = fill
    size = quant.FORMATS[format][1]
    for row, (first, second) in enumerate((a, b) for a in HALVES.values() for b in HALVES.values()):
        for block in range(2):
            for offset, half in zip(SCALES[format], (first, second), strict=False):
                raw[row, block * size + offset : block * size + offset + 2] = (
                    half & 0xFF,
                    half >> 8,
                )
    got = quant.dequantize(torch.from_numpy(raw), format, dtype=torch.float32)
    assert_bit_equal(got, reference(raw, format))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), format=st.sampled_from(PACKED))
def test_any_block_equals_gguf(data: st.DataObject, format: str) -> None:
    size = quant.FORMATS[format][1]
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)[None].copy()
    got = quant.dequantize(torch.from_numpy(raw), format, dtype=torch.float32)
    assert_bit_equal(got, reference(raw, format))


def k_scale_min(j: int, q: bytes) -> tuple[int, int]:
    """`get_scale_min_k4` of ggml-quants.c."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def loops(block: bytes, format: str) -> list[float]:
    """One block in Python's doubles, element by element, as ggml's C reads it."""

    def half(at: int) -> float:
        return float(np.frombuffer(block, np.float16, 1, at)[0])

    if format == "Q8_0":
        return [half(0) * x for x in np.frombuffer(block, np.int8, 32, 2).tolist()]
    if format in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        at = 4 if format.endswith("1") else 2
        high = 0
        if format.startswith("Q5"):
            high, at = int.from_bytes(block[at : at + 4], "little"), at + 4
        q = [block[at + j] & 15 for j in range(16)] + [block[at + j] >> 4 for j in range(16)]
        q = [x | (high >> j & 1) << 4 for j, x in enumerate(q)]
        if format.endswith("1"):
            return [half(0) * x + half(2) for x in q]
        return [half(0) * (x - (8 if format == "Q4_0" else 16)) for x in q]
    values = []
    if format in ("Q4_K", "Q5_K"):
        for run in range(8):
            s, m = k_scale_min(run, block[4:16])
            for j in range(32):
                x = block[(16 if format == "Q4_K" else 48) + run // 2 * 32 + j]
                x = x >> 4 if run % 2 else x & 15
                if format == "Q5_K":
                    x |= (block[16 + j] >> run & 1) << 4
                values.append(half(0) * s * x - half(2) * m)
        return values
    scales = np.frombuffer(block, np.int8, 16, 192).tolist()
    for i in range(256):
        h, run, j = i // 128, i % 128 // 32, i % 32
        x = block[h * 64 + run % 2 * 32 + j]
        x = x >> 4 if run >= 2 else x & 15
        x |= (block[128 + h * 32 + j] >> (2 * run) & 3) << 4
        values.append(half(208) * scales[i // 16] * (x - 32))
    return values


@pytest.mark.parametrize("format", PACKED)
def test_float64_is_computed_in_float64(format: str) -> None:
    raw = random_blocks(format, rows=3, blocks=2, seed=2)
    for offset in SCALES[format]:  # finite scales: clear the exponent's top bit
        raw[:, offset + 1 :: quant.FORMATS[format][1]] &= 0xBF
    got = quant.dequantize(torch.from_numpy(raw), format, dtype=torch.float64)
    size = quant.FORMATS[format][1]
    blocks = raw.reshape(-1, size)
    expected = np.array([loops(block.tobytes(), format) for block in blocks])
    assert_bit_equal(got, expected.reshape(got.shape))


@pytest.mark.parametrize("format", PACKED + PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_float32_rounded_once(format: str, dtype: torch.dtype) -> None:
    raw = torch.from_numpy(random_blocks(format, rows=5, blocks=3, seed=3))
    exact = quant.dequantize(raw, format, dtype=torch.float32)
    got = quant.dequantize(raw, format, dtype=dtype)
    assert got.dtype == dtype
    assert torch.equal(got.float().nan_to_num(7.0), exact.to(dtype).float().nan_to_num(7.0))


@pytest.mark.parametrize("format", ["Q4_1", "Q6_K", "F16", "F64"])
def test_any_memory_layout_gives_the_same(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks(format, rows=9, blocks=4, seed=4))
    dtype = torch.float64 if format == "F64" else torch.float32
    expected = quant.dequantize(raw, format, dtype=dtype).nan_to_num(7.0)
    monkeypatch.setattr(
        "llmcli.ops.quant.decode._CHUNK", 3 * quant.FORMATS[format][0]
    )  # several uneven chunks
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded_by_the_chunk(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    decode = quant.DECODERS["Q4_0"]
    monkeypatch.setitem(
        quant.DECODERS, "Q4_0", lambda b, o: (seen.append(o.numel()), decode(b, o))[1]
    )
    monkeypatch.setattr("llmcli.ops.quant.decode._CHUNK", 4096)
    raw = torch.from_numpy(random_blocks("Q4_0", rows=100, blocks=4))
    quant.dequantize(raw, "Q4_0", dtype=dtype)
    assert max(seen) <= 4096
    assert sum(seen) == 100 * 4 * 32


def test_empty_and_meta() -> None:
    assert quant.dequantize(
        torch.empty(0, 36, dtype=torch.uint8), "Q4_0", dtype=torch.float32
    ).shape == (0, 64)
    meta = quant.dequantize(
        torch.empty(5, 210, dtype=torch.uint8, device="meta"), "Q6_K", dtype=torch.bfloat16
    )
    assert meta.is_meta
    assert meta.shape == (5, 256)
    assert meta.dtype == torch.bfloat16


@pytest.mark.parametrize("format", ["Q8_1", "Q8_K", "Q1_0", "U8", "nonsense"])
def test_other_formats_are_refused_by_name(format: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"`{format}`") as caught:
        quant.dequantize(torch.zeros(1, 66, dtype=torch.uint8), format, dtype=torch.float32)
    assert "Q4_1" in (caught.value.hint or "")


def test_torn_rows_are_refused() -> None:
    with pytest.raises(CheckpointError, match="18 bytes"):
        quant.dequantize(torch.zeros(2, 19, dtype=torch.uint8), "Q4_0", dtype=torch.float32)
    with pytest.raises(CheckpointError, match="int8"):
        quant.dequantize(torch.zeros(2, 18, dtype=torch.int8), "Q4_0", dtype=torch.float32)
    raw = torch.zeros(2, 18, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not"):
        quant.dequantize(raw, "Q4_0", dtype=torch.float32, out=torch.empty(2, 31))
    with pytest.raises(ValueError, match="not"):
        quant.dequantize(
            raw, "Q4_0", dtype=torch.float32, out=torch.empty(2, 32, dtype=torch.float64)
        )


@pytest.mark.parametrize("format", [*PACKED, "F32", "F16", "BF16"])
def test_block_sizes_are_ggmls(format: str) -> None:
    assert tuple(quant.FORMATS[format]) == tuple(GGML_QUANT_SIZES[GGMLQuantizationType[format]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", PACKED + PLAIN)
def test_cuda_equals_cpu(format: str) -> None:
    raw = torch.from_numpy(random_blocks(format, rows=33, blocks=7))
    dtype = torch.float64 if format == "F64" else torch.float32
    expected = quant.dequantize(raw, format, dtype=dtype)
    assert_bit_equal(quant.dequantize(raw.cuda(), format, dtype=dtype).cpu(), expected.numpy())
