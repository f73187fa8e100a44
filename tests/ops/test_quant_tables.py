"""The tables of the IQ formats and of 4-bit codes, entry by entry, and that nothing writes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quant_twin import FP4, NL, parity, table

from llmcli.ops import quant
from llmcli.ops.quant import codes, grids

CPU = torch.device("cpu")


def as_bytes(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int8).view(len(values), -1).numpy()


@pytest.mark.parametrize("format", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_are_ggufs(format: str) -> None:
    got = as_bytes(grids.grid(format, CPU))
    assert np.array_equal(got, table(format))
    assert got.min() > 0  # what `negate` needs


@pytest.mark.parametrize("format", ["IQ2_XXS", "IQ2_XS"])
def test_signed_grids_hold_every_index_with_every_sign(format: str) -> None:
    entries = table(format)
    sign = np.array([parity(x) for x in range(128)])[:, None] >> np.arange(8) & 1
    expected = np.where(sign[:, None], -entries, entries).reshape(-1, 8)
    assert np.array_equal(as_bytes(grids.signed_grid(format, CPU)), expected)


def test_shifted_grid_is_eight_times_a_value_and_an_eighth() -> None:
    expected = np.concatenate([table("IQ1_S") + 0.125, table("IQ1_S") - 0.125])
    assert np.array_equal(as_bytes(grids.shifted_grid(CPU)) / 8, expected)


def test_signs_are_the_bits() -> None:
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    assert np.array_equal(as_bytes(grids.signs(CPU)), -bits)
    assert [x & 127 for x in range(128)] == [parity(x) & 127 for x in range(128)]
    assert np.array_equal(
        grids.parity_signs(CPU).numpy(), grids.signs(CPU).numpy()[[parity(x) for x in range(128)]]
    )


@pytest.mark.parametrize("values", [FP4, tuple(NL)])
def test_pairs_hold_both_codes_in_order(values: tuple[int, ...]) -> None:
    index = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    packed = torch.cat((index & 15, index >> 4) * 4, 1).contiguous().view(torch.int64)
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    expected = np.array(values)[np.stack((low, high) * 4, 1)]
    assert np.array_equal(codes._values(packed, values).numpy(), expected)


@pytest.mark.parametrize("format", [x for x in quant.DECODERS if x.startswith("IQ") or "FP4" in x])
def test_decoding_leaves_the_tables_as_they_were(format: str) -> None:
    size = quant.FORMATS[format][1]
    raw = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (40, size), dtype=np.uint8))
    first = quant.dequantize(raw, format, dtype=torch.float64)
    quant.dequantize(raw.flip(0), format, dtype=torch.float64).zero_()
    again = quant.dequantize(raw, format, dtype=torch.float64)
    assert torch.equal(first.nan_to_num(7.0), again.nan_to_num(7.0))
