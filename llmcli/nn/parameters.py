"""The storage of all parameters, created from the graph's specs.

Parameters of one fused product are contiguous in one tensor; each is a named view of its rows (such
as `W_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from llmcli.config.formats import PACKED, packed_bytes
from llmcli.devices import DTYPES
from llmcli.graph.spec import TensorSpec
from llmcli.weights.blocks import FileLayoutWeight
from llmcli.weights.dense import Dense
from llmcli.weights.packed import Packed, fused
from llmcli.weights.weight import Weight

# (name, format, size) → memory of a packed parameter; None: allocate it.
Memory = Callable[[str, str, int], memoryview | None]


class Parameters:
    """Creates weights by spec on `device`; `weights` maps names to weights.

    Each has its spec's dtype or block format, by default `dtype`; `cache_dtype`: of keys and
    values. The contents are uninitialized for a loader to fill, except weights in `memory` or
    `in_file`. `bf16_dot`: round inputs of bfloat16 matrices to bfloat16; `digits`: number of 8-bit
    digits for inputs of packed ones. On the meta device nothing is allocated.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
        memory: Memory | None = None,
        in_file: Mapping[str, Weight] | None = None,
        bf16_dot: bool = False,
        digits: int = 2,
    ) -> None:
        self._memory = memory
        self._bf16_dot = bf16_dot
        self._digits = digits
        self._in_file = in_file or {}
        self.device = device
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.weights: dict[str, Weight] = {}
        self._shapes = {spec.name: spec.stored_shape or spec.shape for spec in specs}
        self._packed = {spec.name: spec.dtype for spec in specs if spec.dtype in PACKED}
        self._as_stored = any(spec.as_stored for spec in specs)
        self._dtypes = {
            spec.name: DTYPES[spec.dtype]
            for spec in specs
            if spec.dtype is not None and spec.dtype not in PACKED
        }

    def vector(self, names: Sequence[str]) -> Tensor:
        """Vectors concatenated in one tensor: norm weights, biases.

        They are always dense and used as tensors. Raises ValueError for different dtypes.
        """
        return self._stacked(names).tensor

    def table(self, name: str) -> Weight:
        """A matrix `[rows, columns]` used for row lookups only."""
        if self._is_apart(name):
            return self._pieces((name,), exact=True)[0]
        return self._stacked((name,))

    def matrix(self, names: Sequence[str], *, exact: bool = False) -> Weight:
        """Matrices of equal width as one `[rows, columns]` for products.

        Rows are concatenated in order; different formats give separate pieces. `exact`: inputs of
        dense matrices are not rounded.
        """
        dtypes = {self._dtypes.get(name, self.dtype) for name in names}
        if any(map(self._is_apart, names)) or len(dtypes) > 1:
            return fused(self._pieces(names, exact=exact))
        rows, columns = self._stacked_shape(names)
        dtype = self._dtype(names)
        whole = Dense.for_products(
            rows, columns, device=self.device, dtype=dtype, inputs=self.dtype,
            bf16_dot=self._has_bf16_dot(dtype, exact),
        )  # fmt: skip
        return self._claim(names, whole)

    def experts(self, names: Sequence[str]) -> list[Weight]:
        """Matrices of experts, `[experts, rows, columns]`, with a common input.

        Consecutive ones with the same dtype form one weight, with each expert's rows contiguous.
        """
        wholes: list[Weight] = []
        for dtype, group in groupby(names, self._experts_dtype):
            together = list(group)
            if dtype is None:
                wholes.append(fused(self._pieces(together)))
                continue
            rows = [self._shapes[name][1] for name in together]
            experts, _, columns = self._shapes[together[0]]
            tensor = torch.empty(experts, sum(rows), columns, device=self.device, dtype=dtype)
            whole = Dense(tensor, self.dtype, bf16_dot=self._has_bf16_dot(dtype, False))
            parts = [whole] if len(together) == 1 else whole.split(rows, axis=1)
            self.weights.update(zip(together, parts, strict=True))
            wholes.append(whole)
        return wholes

    def expert_vectors(self, names: Sequence[str]) -> Tensor:
        """Vectors of experts, concatenated per expert: `[experts, rows]`, always dense."""
        rows = [self._shapes[name][1] for name in names]
        shape = self._shapes[names[0]][0], sum(rows)
        whole = Dense(torch.empty(shape, device=self.device, dtype=self._dtype(names)))
        parts = [whole] if len(names) == 1 else whole.split(rows, axis=1)
        self.weights.update(zip(names, parts, strict=True))
        return whole.tensor

    def _is_apart(self, name: str) -> bool:
        """Whether it is packed or in a mapped file."""
        return name in self._packed or name in self._in_file

    def _experts_dtype(self, name: str) -> torch.dtype | None:
        """The dtype; None for packed parameters and those in a mapped file."""
        return None if self._is_apart(name) else self._dtypes.get(name, self.dtype)

    def _has_bf16_dot(self, dtype: torch.dtype, exact: bool) -> bool:
        return self._bf16_dot and not exact and dtype == torch.bfloat16

    def _pieces(self, names: Sequence[str], *, exact: bool = False) -> list[Weight]:
        """Separate weights, packed or dense."""
        pieces: list[Weight] = []
        for name in names:
            *experts, rows, columns = self._shapes[name]
            rows *= prod(experts)
            format = self._packed.get(name)
            if name in self._in_file:
                weight = self._in_file[name]
                if isinstance(weight, Dense) and self._has_bf16_dot(weight.tensor.dtype, exact):
                    weight = weight.with_bf16_dot()
                if isinstance(weight, Packed):
                    weight.digits = self._digits
                pieces.append(weight)
            elif format is None:
                dtype = self._dtypes.get(name, self.dtype)
                tensor = torch.empty(rows, columns, device=self.device, dtype=dtype)
                pieces.append(Dense(tensor, self.dtype, bf16_dot=self._has_bf16_dot(dtype, exact)))
            elif self._as_stored:
                pieces.append(FileLayoutWeight(
                    format, rows, columns, device=self.device, inputs=self.dtype,
                    experts=experts[0] if experts else None,
                ))  # fmt: skip
            else:
                memory = None
                if self._memory is not None:
                    memory = self._memory(name, format, packed_bytes(format, rows, columns))
                pieces.append(Packed(
                    format, rows, columns, device=self.device, memory=memory,
                    experts=experts[0] if experts else None, digits=self._digits,
                ))  # fmt: skip
        self.weights.update(zip(names, pieces, strict=True))
        return pieces

    def _stacked(self, names: Sequence[str]) -> Dense:
        shape = self._stacked_shape(names)
        tensor = torch.empty(shape, device=self.device, dtype=self._dtype(names))
        return self._claim(names, Dense(tensor))

    def _dtype(self, names: Sequence[str]) -> torch.dtype:
        found = {self._dtypes.get(name, self.dtype) for name in names}
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
        """Names of specs without a weight (empty for a complete model)."""
        return [name for name in self._shapes if name not in self.weights]
