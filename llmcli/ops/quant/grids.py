"""Tables of the IQ formats: an index gives eight (or four) values at once.

The grids are ggml's (`ggml-common.h`); the gguf package carries them packed. A table holds
eight (four) signed bytes per entry in an int64 (int32), on the requested device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def grid(format: str, device: torch.device) -> Tensor:
    """The magnitudes of an IQ2 or IQ3 format by index: int64 `[entries]`, int32 for IQ3."""
    values = _values(format)
    return values.view(torch.int64 if values.shape[1] == 8 else torch.int32).view(-1).to(device)


@cache
def signed_grid(format: str, device: torch.device) -> Tensor:
    """int64 `[128 · entries]`: entry `index + entries · signs`, the eighth sign by parity."""
    one, sign = grid(format, torch.device("cpu")), parity_signs(torch.device("cpu"))
    return negate(one, sign[:, None]).view(-1).to(device)


@cache
def shifted_grid(device: torch.device) -> Tensor:
    """IQ1's int64 `[2 · 2048]` of 8·(g ± 1/8): the second half with minus."""
    values = _values("IQ1_S") * 8
    both = torch.cat((values + 1, values - 1))
    return both.view(torch.int64).view(-1).to(device)


@cache
def signs(device: torch.device) -> Tensor:
    """int64 `[256]`: byte j is all ones where bit j of the index is set."""
    bit = torch.arange(256)[:, None] >> torch.arange(8)
    return (bit & 1).neg().to(torch.int8).view(torch.int64).view(-1).to(device)


@cache
def parity_signs(device: torch.device) -> Tensor:
    """int64 `[128]`: `signs` of seven bits and a parity bit."""
    even = [x | (x.bit_count() & 1) << 7 for x in range(128)]
    return signs(device)[torch.tensor(even, device=device)]


def negate(values: Tensor, sign: Tensor) -> Tensor:
    """Apply `signs` to bytes that are not 0; both int64.

    -x is ~x + 1, which stays within its byte since x is not 0.
    """
    return (values ^ sign).add_(sign & 0x0101010101010101)


def _values(format: str) -> Tensor:
    """A grid of the gguf package as int8 `[entries, 8 or 4]`."""
    from gguf import quants

    formats = (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S)
    (found,) = (one for one in (*formats, quants.IQ1_S) if one.qtype.name == format)
    found.init_grid()  # type: ignore[no-untyped-call]
    assert found.grid is not None
    return torch.from_numpy(found.grid).to(torch.int8).reshape(found.grid_shape)
