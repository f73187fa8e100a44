"""The storage of every parameter, created from the anatomy's specs.

Parameters that one product uses together lie one after the other in one tensor; each keeps
its own name as a view of its rows, so that a loader, a tap or a table still speaks of `W_k`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.anatomy import TensorSpec
from llmcli.devices import DTYPES
from llmcli.ops.linear import lies_by_columns


class Parameters:
    """Creates tensors by spec on `device`; `slots` maps each name to its tensor.

    Each in its spec's dtype, where it has one, else in `dtype`. The contents are not initialized:
    a loader fills every slot. On the meta device nothing is allocated.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.slots: dict[str, Tensor] = {}
        self._shapes = {spec.name: spec.stored_shape or spec.shape for spec in specs}
        self._dtypes = {spec.name: DTYPES[spec.dtype] if spec.dtype else dtype for spec in specs}

    def one(self, name: str) -> Tensor:
        """The parameter `name` in a tensor of its own, of the spec's stored shape."""
        return self.stacked((name,))

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Parameters of equal width in one tensor, row after row in the order given.

        Raises ValueError where they have not one dtype.
        """
        rows, *rest = self._stacked_shape(names)
        return self._claim(
            names, torch.empty(rows, *rest, device=self.device, dtype=self._dtype(names))
        )

    def matrix(self, names: Sequence[str]) -> Tensor:
        """The same `[rows, columns]` for a matrix that is multiplied with: see `ops.linear`."""
        rows, columns = self._stacked_shape(names)
        dtype = self._dtype(names)
        if not lies_by_columns(rows, self.device, dtype):
            return self.stacked(names)
        lying = torch.empty(columns, rows, device=self.device, dtype=dtype)
        return self._claim(names, lying.t())

    def _dtype(self, names: Sequence[str]) -> torch.dtype:
        found = {self._dtypes[name] for name in names}
        if len(found) > 1:
            raise ValueError(f"{', '.join(names)} lie in one tensor and have several dtypes")
        return found.pop()

    def _stacked_shape(self, names: Sequence[str]) -> tuple[int, ...]:
        shapes = [self._shapes[name] for name in names]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _claim(self, names: Sequence[str], tensor: Tensor) -> Tensor:
        rows = [self._shapes[name][0] for name in names]
        for name, part in zip(names, tensor.split_with_sizes(rows), strict=True):
            self.slots[name] = part
        return tensor

    def unclaimed(self) -> list[str]:
        """Names of specs for which no part has created a tensor (none, in a complete model)."""
        return [name for name in self._shapes if name not in self.slots]
