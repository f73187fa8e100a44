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
from llmcli.formats.dense import Dense
from llmcli.formats.weight import Weight


class Parameters:
    """Creates weights by spec on `device`; `weights` maps each name to its own.

    Each in its spec's dtype, where it has one, else in `dtype`. The contents are not initialized:
    a loader fills every weight. On the meta device nothing is allocated.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.weights: dict[str, Weight] = {}
        self._shapes = {spec.name: spec.stored_shape or spec.shape for spec in specs}
        self._dtypes = {spec.name: DTYPES[spec.dtype] if spec.dtype else dtype for spec in specs}

    def vector(self, names: Sequence[str]) -> Tensor:
        """Vectors one after the other in one tensor: norm weights, biases.

        They are always dense: whoever adds them or multiplies by them has the tensor itself.
        Raises ValueError where they have not one dtype.
        """
        return self._stacked(names).tensor

    def table(self, name: str) -> Weight:
        """A matrix `[rows, columns]` whose rows are looked up, and no more."""
        return self._stacked((name,))

    def matrix(self, names: Sequence[str]) -> Weight:
        """Matrices of equal width as one `[rows, columns]` that is multiplied with.

        Row after row in the order given. Raises ValueError where they have not one dtype.
        """
        rows, columns = self._stacked_shape(names)
        whole = Dense.for_products(rows, columns, device=self.device, dtype=self._dtype(names))
        return self._claim(names, whole)

    def _stacked(self, names: Sequence[str]) -> Dense:
        shape = self._stacked_shape(names)
        tensor = torch.empty(shape, device=self.device, dtype=self._dtype(names))
        return self._claim(names, Dense(tensor))

    def _dtype(self, names: Sequence[str]) -> torch.dtype:
        found = {self._dtypes[name] for name in names}
        if len(found) > 1:
            raise ValueError(f"{', '.join(names)} lie in one tensor and have several dtypes")
        return found.pop()

    def _stacked_shape(self, names: Sequence[str]) -> tuple[int, ...]:
        shapes = [self._shapes[name] for name in names]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _claim(self, names: Sequence[str], whole: Dense) -> Dense:
        rows = [self._shapes[name][0] for name in names]
        parts = [whole] if len(names) == 1 else whole.split(rows)
        self.weights.update(zip(names, parts, strict=True))
        return whole

    def unclaimed(self) -> list[str]:
        """Names of specs for which no part has created a weight (none, in a complete model)."""
        return [name for name in self._shapes if name not in self.weights]
