"""Float32 rows to blocks, against the `gguf` package."""

import warnings

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcli.ops.quant import quantize

FORMATS = ("Q8_0", "Q4_1")
LARGEST = float(np.finfo(np.float32).max)


def check(values):
    for name in FORMATS:
        found = quantize(torch.from_numpy(values), name).numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, of scales beyond float16
            right = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
        assert np.array_equal(found, right), name


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 4), st.integers(-44, 37))
def test_random_rows_of_every_magnitude_are_equal_bit_for_bit(seed, rows, blocks, exponent):
    draw = np.random.default_rng(seed)
    values = draw.normal(0.0, 1.0, (rows, 32 * blocks)) * 10.0**exponent
    check(values.astype(np.float32))


@pytest.mark.parametrize(
    "row",
    [
        np.zeros(32),
        np.full(32, 3.5),
        np.arange(-16, 16) / 2,  # halves between two steps
        np.r_[127.0, np.arange(31) - 15.5],  # halves of a step of Q8_0
        np.arange(32) * 1e-45,  # subnormal
        np.where(np.arange(32) == 7, -127.5, 0.25),
        np.full(32, LARGEST),
        np.tile([LARGEST, -LARGEST], 16),  # the distance is infinite
        10.0 ** np.linspace(-45, 38, 32),
    ],
    ids=[
        "zeros", "equal", "halves", "halves of Q8_0", "subnormal", "outlier", "largest", "both",
        "all",
    ],
)  # fmt: skip
def test_extreme_rows_are_equal_bit_for_bit(row):
    check(np.stack([row, -row, row[::-1]]).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_is_not_finite_spoils_its_own_block_alone(name, bad):
    values = torch.ones(2, 64)
    right = quantize(values, name)
    values[1, 40] = bad
    found = quantize(values, name)
    half = right.shape[1] // 2
    assert torch.equal(found[0], right[0])
    assert torch.equal(found[1, :half], right[1, :half])
    assert not found[1, half : half + 4].view(torch.float16).isfinite().all()


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="unsupported format Q4_K"):
        quantize(torch.zeros(1, 256), "Q4_K")
