"""Scaling of 8-bit numbers. Axes: r rows and c columns of a stored matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_rows(
    values_rc: Tensor,
    scales: Tensor,
    *,
    first: int = 0,
    rows: int | None = None,
    columns: int | None = None,
    divisor: int = 1,
) -> Tensor:
    """Multiply each number, in place, by the scale of its block over `divisor`.

    `values_rc`: rows `first`, `first + 1`, … of a matrix with blocks of `rows` × `columns` (None:
    all; the last block may be smaller). `scales` `[down, across]` begins with the block row of row
    `first`. Products are in the dtype of `values_rc`, without a copy. Source: the dequantization of
    DeepSeek-V3 (section 3.3.2) for blocks, LLM.int8() (Dettmers et al. 2022, section 2) for rows
    over 127.
    """
    scales = scales.to(values_rc.dtype)
    if divisor != 1:
        scales = scales / divisor
    down = torch.arange(first, first + len(values_rc), device=scales.device)
    down = torch.zeros_like(down) if rows is None else down // rows - first // rows
    per_row = scales[down]
    if columns is None:
        return values_rc.mul_(per_row)
    whole = values_rc.shape[1] // columns
    blocks = values_rc[:, : whole * columns].view(len(values_rc), whole, columns)
    blocks.mul_(per_row[:, :whole, None])
    values_rc[:, whole * columns :].mul_(per_row[:, whole:])
    return values_rc
