"""E4M3 by a table, against PyTorch's own conversion and against the definition."""

import math

import pytest
import torch

from llmcli.ops.quant import dequantize


def twin(byte):
    """The number that a byte is: sign, four bits of exponent, three of mantissa."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_of_the_256_numbers(dtype):
    raw = torch.arange(256, dtype=torch.uint8).view(4, 64)
    found = dequantize(raw, "F8_E4M3", dtype=dtype)
    for value, byte in zip(found.view(-1).tolist(), range(256), strict=True):
        right = twin(byte)
        assert value == right or (math.isnan(value) and math.isnan(right)), byte
        assert math.copysign(1, value) == math.copysign(1, right) or math.isnan(right), byte
    torch.testing.assert_close(
        found, raw.view(torch.float8_e4m3fn).to(dtype), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1100, 1000), (0, 5)])
@pytest.mark.parametrize("apart", [False, True])
def test_any_shape_and_place_in_memory(shape, apart):
    """More than one chunk, odd lengths and addresses, and a result whose memory has gaps."""
    g = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (shape[0], shape[1] + 1), dtype=torch.uint8, generator=g)[:, 1:]
    raw = raw if apart else raw.contiguous()
    wide = torch.full((shape[0], shape[1] + 2), 7.0)
    out = wide[:, 1:-1] if apart else None
    found = dequantize(raw, "F8_E4M3", dtype=torch.float32, out=out)
    right = raw.contiguous().view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    if apart:
        assert found is out
        assert (wide[:, [0, -1]] == 7).all()
