"""Numbers that are probable of no tensor: found where a bit is wrong, and in no clean tensor."""

import math

import gguf
import pytest
import torch
from load_files import check, checked, write_gguf
from safetensors.torch import save_file

from llmcli.commands.load.measure.numbers import Outliers
from llmcli.ops.quant import FORMATS, dequantize, quantize


def found(x: torch.Tensor, piece: int = 1 << 20) -> list[int]:
    """The first number of each block that is an outlier."""
    outliers = Outliers(x.numel(), x.shape[-1])
    for part in x.reshape(-1).split(piece):
        outliers.add(part)
    return outliers.found()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int) -> torch.Tensor:
    """Student's t with 3 degrees of freedom."""
    return drawn(*shape) / (drawn(3, *shape, seed=1).square().sum(0) / 3).sqrt()


def with_number(value: float, *shape: int, others: float = 1.0) -> torch.Tensor:
    x = others * drawn(*shape)
    x.view(-1)[x.numel() // 3] = value
    return x


def with_row(row: torch.Tensor, rows: int = 512) -> torch.Tensor:
    x = drawn(rows, len(row))
    x[rows // 3] = row
    return x


POSITIONS = torch.arange(512.0)[:, None] * 10_000 ** -(torch.arange(256.0) / 256)
CLEAN = {
    "normal": drawn(1024, 1024),
    "in 16 bits": drawn(512, 512).bfloat16(),
    "heavy": heavy(512, 512),
    "a heavy vector": heavy(4096),
    "a super weight": with_number(100.0, 1024, 1024),
    "biases of thousands": with_number(1000.0, 576),
    "a norm with a large number": with_number(60.0, 2048, others=0.1),
    "a row of ones": with_row(torch.ones(576)),
    "a large row": with_row(30 * drawn(576, seed=1)),
    "a row of zeros": with_row(torch.zeros(576)),
    "a few rows of another part": torch.cat((drawn(512, 256), 20 * drawn(8, 256, seed=1))),
    "positions": torch.cat((POSITIONS.sin(), POSITIONS.cos())),
    "frequencies": 10_000 ** -(torch.arange(64.0) / 64),
    "decays": torch.arange(1.0, 65).log(),
    "ones": torch.ones(256, 256),
    "one number of zeros": with_number(1.0, 256, 256, others=0.0),
    "zeros": torch.zeros(256, 256),
    "scales of blocks": drawn(128, 96).abs() * 1e-3,
    "of rows of its own size each": drawn(512, 256) * drawn(512, 1, seed=1).exp(),
    "a single number": torch.ones(1),
    "nothing": torch.ones(0, 3),
}


@pytest.mark.parametrize("kind", CLEAN)
def test_none_in_what_tensors_are_like(kind):
    assert found(CLEAN[kind]) == []


WRITTEN = ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0")  # by gguf


@pytest.mark.parametrize("format", WRITTEN)
def test_none_in_blocks(format):
    kind = gguf.GGMLQuantizationType[format]
    raw = torch.from_numpy(gguf.quants.quantize(heavy(512, 512).numpy(), kind))
    assert found(dequantize(raw.view(torch.uint8), format, dtype=torch.float32)) == []


# Bits of the scale, then of the minimum, in half precision: the exponent begins at the tenth, the
# last is the sign. Each changes the scale at least 16-fold and the minimum at least 4-fold.
@pytest.mark.parametrize(("format", "bits"), [
    ("Q4_1", [14, 13, 12, 15]), ("Q4_1", [16 + 14, 16 + 11, 16 + 15]), ("Q8_0", [14]),
])
def test_a_wrong_bit_of_a_scale_is_found_in_its_block(format, bits):
    clean = quantize(0.1 * drawn(512, 576), format)
    size = FORMATS[format][1]
    for bit in bits:
        for block in (0, 1234, len(clean.view(-1)) // size - 1):
            raw = clean.clone()
            raw.view(-1)[block * size + bit // 8] ^= 1 << bit % 8
            assert found(dequantize(raw, format, dtype=torch.float32)) == [32 * block], bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_highest_bit_of_an_exponent_is_found_in_dense_numbers(dtype):
    x = (0.1 * drawn(512, 512)).to(dtype)
    size = dtype.itemsize
    x.view(-1).view(torch.uint8)[size * 77_777 + size - 1] ^= 1 << 6
    assert found(x) == [77_777 // 32 * 32]
    assert found(x.float().bfloat16() if size == 4 else x, piece=4096) == found(x)


def test_a_number_far_beyond_is_found_where_it_is_and_pieces_make_no_difference():
    assert found(with_number(1e9, 576)) == [192]
    x = with_number(1e6, 128, 512)
    x[100, :32] = -3.0
    assert found(x) == found(x, 32) == found(x, 32 * 77) == [x.numel() // 96 * 32, 100 * 512]


def test_the_place_is_told_as_the_file_has_it_where_all_numbers_are_finite(tmp_path):
    x = drawn(300, 64)
    x[7, 33] = 1e20
    save_file({"x": x, "whole": torch.full((300, 64), 2**60)}, tmp_path / "x.safetensors")
    report = checked(tmp_path / "x.safetensors")
    assert check(report, "outliers").where == "`x[7,32]`"
    assert not report.ok
    assert check(checked(write_gguf(tmp_path / "m.gguf")), "outliers").ok
    save_file({"x": with_number(math.inf, 300, 64)}, tmp_path / "x.safetensors")
    report = checked(tmp_path / "x.safetensors")
    assert report.not_finite
    assert check(report, "outliers").ok
