"""Large tensors as parts in C order, small enough to be copied and looked at one by one.

Axes: H heads, T rows, t some of them, S keys, d size of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from llmcli.inspect.statistics import Statistics

AT_ONCE = 1 << 22  # numbers of a part, 32 MiB of float64

# (head, first row, last row + 1) → [t, S]
Rows = Callable[[int, int, int], Tensor]


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Rows of it, of a `[H, T, d]` head by head; a view in another order is not copied whole."""
    if tensor.ndim > 2:
        for one in tensor:
            yield from parts(one)
    elif tensor.ndim == 2:
        rows = max(1, AT_ONCE // max(1, tensor.shape[1]))
        yield from (tensor[first : first + rows] for first in range(0, len(tensor), rows))
    else:
        yield tensor


def in_rows(rows: Rows, shape: tuple[int, int, int]) -> Iterator[Tensor]:
    """`[H, T, S]`, that `shape`, of the rows that `rows` computes, some of one head at a time."""
    heads, tokens, columns = shape
    most = max(1, AT_ONCE // columns)
    for head in range(heads):
        for first in range(0, tokens, most):
            yield rows(head, first, min(first + most, tokens))


def arrays_of(numbers: Iterable[Tensor], statistics: Statistics) -> Iterator[np.ndarray]:
    """The parts for a file, each added to `statistics` on its way; bfloat16 as its uint16 bits."""
    for part in numbers:
        ours = part.detach().to("cpu").contiguous()
        statistics.add(ours)
        if ours.dtype == torch.bfloat16:
            yield ours.view(torch.int16).numpy().view(np.uint16)
        else:
            yield ours.numpy()
