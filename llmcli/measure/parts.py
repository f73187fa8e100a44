"""Large tensors as parts in C order, small enough to be copied and looked at one by one.

Axes: B batch (1), H heads, K key/value heads, T rows, t some of them, S keys, d size of a query
and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from llmcli.measure.statistics import Statistics

AT_ONCE = 1 << 22  # numbers of a part, 32 MiB of float64

# (q_BHtd, k_BKSd, first position) → [B, H, t, S]
Rows = Callable[[Tensor, Tensor, int], Tensor]


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


def squares(rows: Rows, q_BHTd: Tensor, k_BKSd: Tensor) -> Iterator[Tensor]:
    """`[H, T, S]` of the rows that `rows` computes, some rows of one head at a time."""
    heads, queries = q_BHTd.shape[1:3]
    group = heads // k_BKSd.shape[1]
    most = max(1, AT_ONCE // k_BKSd.shape[2])
    for head in range(heads):
        k_B1Sd = k_BKSd[:, head // group : head // group + 1]
        for first in range(0, queries, most):
            q_B1td = q_BHTd[:, head : head + 1, first : first + most]
            yield rows(q_B1td, k_B1Sd, first)[0, 0]


def arrays_of(numbers: Iterable[Tensor], statistics: Statistics) -> Iterator[np.ndarray]:
    """The parts for a file, each added to `statistics` on its way; bfloat16 as its uint16 bits."""
    for part in numbers:
        ours = part.detach().to("cpu").contiguous()
        statistics.add(ours)
        if ours.dtype == torch.bfloat16:
            yield ours.view(torch.int16).numpy().view(np.uint16)
        else:
            yield ours.numpy()
