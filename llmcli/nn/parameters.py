"""The storage of all parameters, created from the graph's specs.

Parameters of one fused product are contiguous in one tensor; each is a named view of its rows (such
as `W_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from llmcli.config.formats import PACKED, packed_bytes
from llmcli.devices import DTYPES
from llmcli.graph.precision import Precision
from llmcli.graph.spec import TensorSpec
from llmcli.weights.blocks import FileLayoutWeight
from llmcli.weights.dense import Dense
from llmcli.weights.packed import Packed, fused
from llmcli.weights.weight import Weight

# (name, format, size) → memory of a packed parameter; None: allocate it.
Memory = Callable[[str, str, int], memoryview | None]


class Parameters:
    """Creates weights by spec on `device`; `weights` maps names to weights.

    Each has its spec's dtype or block format, by default `dtype` of the arithmetic; `cache_dtype`:
    of keys and values. The contents are uninitialized for a loader to fill, except weights in
    `memory` or `in_file`. On the meta device nothing is allocated.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        precision: Precision,
        *,
        device: torch.device,
        memory: Memory | None = None,
        in_file: Mapping[str, Weight] | None = None,
    ) -> None:
        self._memory = memory
        self._bf16_dot = precision.bf16_dot
        self._digits = precision.activations // 8  # of 8 bits, for inputs of packed matrices
        self._in_file = in_file or {}
        self.device = device
        self.dtype, self.cache_dtype = DTYPES[precision.dtype], DTYPES[precision.cache]
        self.weights: dict[str, Weight] = {}
        self._specs = {spec.name: spec for spec in specs}

    def on(self, device: torch.device) -> Parameters:
        """The same parameters, of which those claimed here are created on `device`."""
        there = copy(self)
        there.device = device
        return there

    def vector(self, names: Sequence[str]) -> Tensor:
        """Vectors concatenated in one tensor: norm weights, biases.

        They are always dense and used as tensors. Raises ValueError for different dtypes.
        """
        return self._claim(names, Dense(self._empty(names))).tensor

    def table(self, name: str) -> Weight:
        """A matrix `[rows, columns]` used for row lookups only."""
        if self._is_apart(name):
            return self._pieces((name,), exact=True)[0]
        return self._claim((name,), Dense(self._empty((name,))))

    def matrix(self, names: Sequence[str], *, exact: bool = False) -> Weight:
        """Matrices of equal width as one `[rows, columns]` for products.

        Rows are concatenated in order; different formats give separate pieces. `exact`: inputs of
        dense matrices are not rounded.
        """
        if any(map(self._is_apart, names)) or len(set(map(self._dtype, names))) > 1:
            return fused(self._pieces(names, exact=exact))
        dtype = self._dtype(names[0])
        narrow = self._has_bf16_dot(dtype, exact)
        whole = Dense.for_products(
            self._shape(names), self.device, dtype, inputs=self.dtype, bf16_dot=narrow
        )
        return self._claim(names, whole)

    def experts(self, names: Sequence[str]) -> list[Weight]:
        """Matrices of experts, `[experts, rows, columns]`, with a common input.

        Consecutive ones with the same dtype form one weight, with each expert's rows contiguous.
        """
        wholes: list[Weight] = []
        for dtype, group in groupby(names, lambda n: None if self._is_apart(n) else self._dtype(n)):
            together = list(group)
            if dtype is None:
                wholes.append(fused(self._pieces(together)))
                continue
            tensor = self._empty(together, axis=1)
            whole = Dense(tensor, self.dtype, bf16_dot=self._has_bf16_dot(dtype, False))
            wholes.append(self._claim(together, whole, axis=1))
        return wholes

    def expert_vectors(self, names: Sequence[str]) -> Tensor:
        """Vectors of experts, concatenated per expert: `[experts, rows]`, always dense."""
        return self._claim(names, Dense(self._empty(names, axis=1)), axis=1).tensor

    def _is_apart(self, name: str) -> bool:
        """Whether it is packed or in a mapped file."""
        return self._specs[name].dtype in PACKED or name in self._in_file

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype of a dense parameter."""
        dtype = self._specs[name].dtype
        return self.dtype if dtype is None or dtype in PACKED else DTYPES[dtype]

    def _has_bf16_dot(self, dtype: torch.dtype, exact: bool) -> bool:
        return self._bf16_dot and not exact and dtype == torch.bfloat16

    def _pieces(self, names: Sequence[str], *, exact: bool = False) -> list[Weight]:
        """Separate weights, packed or dense."""
        pieces: list[Weight] = []
        for name in names:
            spec, shape = self._specs[name], self._shape((name,))
            if name in self._in_file:
                weight = self._in_file[name]
                if isinstance(weight, Dense) and self._has_bf16_dot(weight.tensor.dtype, exact):
                    weight = weight.with_bf16_dot()
                if isinstance(weight, Packed):
                    weight.digits = self._digits
                pieces.append(weight)
            elif spec.dtype not in PACKED:
                narrow = self._has_bf16_dot(self._dtype(name), exact)
                pieces.append(Dense(self._empty((name,)), self.dtype, bf16_dot=narrow))
            elif spec.file_layout:
                pieces.append(
                    FileLayoutWeight(spec.dtype, shape, device=self.device, inputs=self.dtype)
                )
            else:
                memory = None
                if self._memory is not None:
                    size = packed_bytes(spec.dtype, prod(shape[:-1]), shape[-1])
                    memory = self._memory(name, spec.dtype, size)
                pieces.append(
                    Packed(spec.dtype, shape, self.device, memory=memory, digits=self._digits)
                )
        self.weights.update(zip(names, pieces, strict=True))
        return pieces

    def _shape(self, names: Sequence[str], axis: int = 0) -> tuple[int, ...]:
        """The stored shape, concatenated along `axis`."""
        shapes = [spec.stored_shape or spec.shape for spec in map(self._specs.__getitem__, names)]
        return *shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :]

    def _empty(self, names: Sequence[str], axis: int = 0) -> Tensor:
        """Memory of dense parameters, concatenated along `axis`."""
        dtypes = set(map(self._dtype, names))
        if len(dtypes) > 1:
            raise ValueError(f"{', '.join(names)} lie in one tensor and have several dtypes")
        return torch.empty(self._shape(names, axis), device=self.device, dtype=dtypes.pop())

    def _claim(self, names: Sequence[str], whole: Dense, axis: int = 0) -> Dense:
        """Name the parts of `whole`, concatenated along `axis`."""
        rows = [self._shape((name,))[axis] for name in names]
        parts = [whole] if len(names) == 1 else whole.split(rows, axis)
        self.weights.update(zip(names, parts, strict=True))
        return whole

    def unclaimed(self) -> list[str]:
        """Names of specs without a weight (empty for a complete model)."""
        return [name for name in self._specs if name not in self.weights]
