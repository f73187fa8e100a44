"""Weights in GGUF blocks, used directly in products.

Kernels round activations to 16- or 8-bit integers, 32 columns at a time (`quantized_input`); sums
are float32 and bit-identical for any number of rows, threads and processor level. Inputs and
results are float32.

Axes: M rows of the input, K columns of it, N outputs; E experts, P pairs of a row and an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import prod

import torch
from torch import Tensor

from llmcli.config.formats import ACTIVATION_BYTES, PACKED, ROWS, RUN, packed_bytes
from llmcli.kernels import native, program
from llmcli.ops import compiled
from llmcli.weights.routes import ExpertAssignment
from llmcli.weights.weight import BlockQuantized, Weight

_Multiplies = Callable[[Tensor, Tensor | None], Tensor]


class Packed(BlockQuantized):
    """One matrix `[rows, columns]` in `format` with 16 interleaved rows; `write` fills it.

    `memory`: where to store it, if given. With `experts` the matrices are stacked, each in whole
    groups of 16 rows, with shape `[E, rows / E, columns]`. `digits`: number of 8-bit digits (1 or
    2) to which activations are rounded.
    """

    def __init__(
        self, format: str, rows: int, columns: int, *, device: torch.device,
        memory: memoryview | Tensor | None = None, experts: int | None = None, digits: int = 2,
    ) -> None:  # fmt: skip
        if rows % (ROWS * (experts or 1)) and experts:
            raise ValueError(f"{rows} rows of {experts} experts are not whole groups of {ROWS}")
        self.format = format
        self.shape = (rows, columns) if experts is None else (experts, rows // experts, columns)
        self.digits = digits
        size = packed_bytes(format, rows, columns)
        if isinstance(memory, Tensor):
            self.data = memory
        elif memory is not None:  # filled elsewhere
            self.data = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            if rows % ROWS and not self.data.is_meta:  # zero the padding rows of the last group
                self.data[size * (rows // ROWS) // -(-rows // ROWS) :].zero_()

    def expert(self, number: int) -> Packed:
        """The matrix of one expert, in the same memory."""
        _, rows, columns = self.shape
        size = self.nbytes // self.shape[0]
        memory = self.data[number * size : (number + 1) * size]
        return Packed(
            self.format, rows, columns, device=self.data.device, memory=memory, digits=self.digits
        )

    @property
    def additions(self) -> int:
        """Number of sequential float32 additions per output of a product."""
        return self.shape[-1] // RUN * PACKED[self.format].sums

    def write(self, rows: Tensor, raw: Tensor) -> None:
        """Those rows, int64 `[n]`, from blocks as a file has them, uint8 `[n, bytes]`."""
        native.function("llmcli_pack", "npnpnpnp")(
            PACKED[self.format].number, raw.data_ptr(), raw.stride(0), self.data.data_ptr(),
            self.shape[-1], rows.data_ptr(), len(rows), native.team(torch.get_num_threads()),
        )  # fmt: skip

    def memory(self) -> list[Tensor]:
        """Its blocks, with padding rows in the last group."""
        return [self.data]

    def matmul_routed(
        self,
        x_MK: Tensor,
        routes: ExpertAssignment,
        bias_EN: Tensor | None = None,
        *,
        wide: bool = False,
    ) -> Tensor:
        """See `Weight`; float32 → float32, bit-identical for a pair independent of others."""
        return self._routed(x_MK, routes, bias_EN)

    @cached_property
    def _product(self) -> _Product:
        if len(self.shape) == 3:
            raise TypeError("matrices of experts are multiplied with by `matmul_routed` alone")
        return _Product([self])

    @cached_property
    def _routed(self) -> RoutedProduct:
        return RoutedProduct([self])

    def matmul(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b`, float32 → float32, from unrounded sums."""
        return self._product(x, bias_N)

    matmul_fp32_out = matmul_float32 = matmul

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, dequantized to float32 as in `ops.quant`."""
        if self.data.is_meta:
            return torch.empty(*ids.shape, self.shape[-1], device="meta")
        number, rows = PACKED[self.format].number, prod(self.shape[:-1])
        return compiled.look_up(
            self.data, number, rows, self.shape[-1], ids, stored=self.stored
        )

    @property
    def stored(self) -> int:
        """The address of `struct stored` (formats.h) if `data` is not packed, else 0."""
        return 0

    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """Dequantized to float32, then converted to `dtype`: a copy, up to 16 times as large.

        For experts `rows` selects matrices.
        """
        if len(self.shape) == 3:
            numbers = range(self.shape[0])[rows]
            return torch.stack([self.expert(number).dense(dtype) for number in numbers])
        chosen = range(self.shape[0])[rows]
        ids = torch.arange(chosen.start, chosen.stop, chosen.step, device=self.data.device)
        return self.rows(ids).to(dtype or torch.float32)

    def quantized_input(self, x: Tensor) -> Tensor:
        """Round `x`: each 32 columns to multiples of their largest magnitude ÷ 127 (or ÷ 32512)."""
        x = x.to(torch.float32).contiguous()
        out = torch.empty_like(x)
        if not x.is_meta:
            numbers = x.data_ptr(), out.data_ptr(), x.numel(), self.digits
            native.function("llmcli_seen", "ppnn")(*numbers)
        return out


class MappedWeight(Packed):
    """A packed weight in a mapped file: rows of blocks, packed again for each product.

    For weights that do not fit into memory: the system loads and evicts pages of the file. `data`:
    the stored rows, uint8 `[rows, bytes]`; row r of the weight is stored row `order[r]`.
    """

    in_file = True

    def __init__(
        self, format: str, columns: int, data: Tensor, order: Tensor | None,
        experts: int | None = None, digits: int = 2,
    ) -> None:  # fmt: skip
        rows = len(data) if order is None else len(order)
        self.format = format
        self.shape = (rows, columns) if experts is None else (experts, rows // experts, columns)
        self.digits = digits
        self.data = data
        self._order = order
        address = 0 if order is None else order.data_ptr()
        self._numbers = (ctypes.c_int64 * 3)(data.data_ptr(), data.stride(0), address)

    def expert(self, number: int) -> MappedWeight:
        """The matrix of one expert, in the same memory."""
        _, rows, columns = self.shape
        own = slice(number * rows, (number + 1) * rows)
        if self._order is None:
            return MappedWeight(self.format, columns, self.data[own], None, digits=self.digits)
        return MappedWeight(self.format, columns, self.data, self._order[own], digits=self.digits)

    @property
    def stored(self) -> int:
        """The address of `struct stored` (formats.h)."""
        return ctypes.addressof(self._numbers)

    def write(self, rows: Tensor, raw: Tensor) -> None:
        """Raise TypeError: mapped weights are read-only."""
        raise TypeError("a mapped weight is not written")


class FusedWeight(Weight):
    """Matrices of one width in a fused product: q, k and v, each in its format.

    Packed ones share a call and the rounded activations; others have separate products. `format`:
    the distinct ones, `Q4_K + Q6_K`; `shape`: of all rows together.
    """

    def __init__(self, pieces: Sequence[Weight]) -> None:
        self._pieces = tuple(pieces)
        self.format = " + ".join(dict.fromkeys(piece.format for piece in pieces))
        *experts, _, columns = pieces[0].shape
        self.shape = *experts, sum(piece.shape[-2] for piece in pieces), columns
        packed = [piece for piece in pieces if isinstance(piece, Packed)]
        routed = len(pieces[0].shape) == 3
        self._product = _Product(packed) if len(packed) == len(pieces) and not routed else None
        self._routed = RoutedProduct(packed) if routed and len(packed) == len(pieces) else None

    def memory(self) -> list[Tensor]:
        """The tensors of all pieces."""
        return [one for piece in self._pieces for one in piece.memory()]

    def matmul_routed(
        self,
        x_MK: Tensor,
        routes: ExpertAssignment,
        bias_EN: Tensor | None = None,
        *,
        wide: bool = False,
    ) -> Tensor:
        """See `Packed`."""
        if self._routed is not None:
            return self._routed(x_MK, routes, bias_EN)
        rows = [piece.shape[-2] for piece in self._pieces]
        biases = [None] * len(rows) if bias_EN is None else bias_EN.split_with_sizes(rows, 1)
        each = zip(self._pieces, biases, strict=True)
        return torch.cat(
            [piece.matmul_routed(x_MK, routes, bias, wide=wide) for piece, bias in each], -1
        )

    def matmul(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b`: float32 → float32 if packed, else in the dtype of `x`."""
        return self._each(lambda piece: piece.matmul, x, bias_N)

    def matmul_fp32_out(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b` in at least float32."""
        return self._each(lambda piece: piece.matmul_fp32_out, x, bias_N)

    def matmul_float32(self, x: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`X Wᵀ + b` in at least float32, from unrounded sums."""
        return self._each(lambda piece: piece.matmul_float32, x, bias_N)

    def _each(
        self, product_of: Callable[[Weight], _Multiplies], x: Tensor, bias_N: Tensor | None
    ) -> Tensor:
        if self._product is not None:
            return self._product(x, bias_N)
        rows = [piece.shape[0] for piece in self._pieces]
        biases = [None] * len(rows) if bias_N is None else bias_N.split_with_sizes(rows)
        each = zip(self._pieces, biases, strict=True)
        return torch.cat([product_of(piece)(x, bias) for piece, bias in each], -1)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` of the concatenated matrices."""
        return self.dense(torch.float32)[ids]

    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """The concatenated matrices, dequantized: a copy."""
        return torch.cat([piece.dense(dtype or torch.float32) for piece in self._pieces], -2)[rows]

    def quantized_input(self, x: Tensor) -> Tensor:
        """As rounded by the first matrix; others may differ."""
        return self._pieces[0].quantized_input(x)


class _Pieces:
    """Packed matrices of one width, for products with concatenated outputs."""

    def __init__(self, pieces: Sequence[Packed]) -> None:
        self._pieces = tuple(pieces)
        self._columns = pieces[0].shape[-1]
        self._outputs = sum(piece.shape[-2] for piece in pieces)

    def _run(
        self, x_MK: Tensor, kind: int, out: Tensor, *arguments: program.Argument, own: bool = False
    ) -> Tensor:
        """Multiply float32 rows by an operation of packed.c; returns `out`.

        `arguments`: between the number of `out`'s columns and that of digits. `own`: each row is
        rounded separately, for MULTIPLY_EXPERTS.
        """
        digits = self._pieces[0].digits
        room = torch.empty(x_MK.numel() // RUN * ACTIVATION_BYTES[digits], dtype=torch.uint8)
        segments, count = ctypes.addressof(self._segments), len(self._pieces)
        program.run(
            (program.QUANTIZE, x_MK, x_MK.stride(0), room, *x_MK.shape, digits, own),
            (kind, room, segments, count, out, self._outputs, *arguments, digits),
            writes=(room, out), reads=[piece.data for piece in self._pieces],
        )  # fmt: skip
        return out

    @cached_property
    def _segments(self) -> ctypes.Array[ctypes.c_int64]:
        """`struct segment`s (packed.c), of one expert each."""
        numbers, column = [], 0
        for piece in self._pieces:
            number, rows = PACKED[piece.format].number, piece.shape[-2]
            numbers += [piece.data.data_ptr(), number, rows, column, piece.stored]
            column += rows
        return (ctypes.c_int64 * len(numbers))(*numbers)


class _Product(_Pieces):
    """Products with all rows of packed matrices in one call."""

    def __call__(self, x: Tensor, bias_N: Tensor | None) -> Tensor:
        """`X Wᵀ + b`: `[…, K]` → `[…, N]`."""
        x_MK = x.reshape(-1, self._columns)
        if x_MK.dtype != torch.float32 or x_MK.stride(1) != 1:
            x_MK = x_MK.to(torch.float32).contiguous()
        out_MN = x_MK.new_empty(len(x_MK), self._outputs)
        if not x_MK.is_meta:
            if bias_N is not None:
                bias_N = bias_N.to(torch.float32).contiguous()
            self._run(x_MK, program.MULTIPLY, out_MN, *x_MK.shape, bias_N)
        return out_MN.view(*x.shape[:-1], self._outputs)


class RoutedProduct(_Pieces):
    """Products of rows with their chosen experts' matrices.

    Few rows use one call, which reads their experts without synchronization; many rows are grouped
    by expert.
    """

    def __init__(self, pieces: Sequence[Packed]) -> None:
        super().__init__(pieces)
        self._experts = pieces[0].shape[0]
        self._product = cache(lambda e: _Product([piece.expert(e) for piece in pieces]))
        self._mapped = any(piece.stored for piece in pieces)

    def __call__(
        self, x_MK: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None = None
    ) -> Tensor:
        """`[M, K]` → `[P, N]`."""
        pairs = len(routes.expert_N)
        many = self._mapped or (pairs > self._experts and not routes.static)
        if many and not x_MK.is_meta:
            return routes.by_expert(x_MK, bias_EN, lambda e, x, b: self._product(e)(x, b))
        out_PN = x_MK.new_empty(pairs, self._outputs, dtype=torch.float32)
        if x_MK.is_meta:
            return out_PN
        x_MK = x_MK.to(torch.float32).contiguous()
        expert_N = routes.expert_N.contiguous()
        row_N = None if routes.row_N is None else routes.row_N.contiguous()
        bias_EN = None if bias_EN is None else bias_EN.to(torch.float32)
        return self._run(
            x_MK, program.MULTIPLY_EXPERTS, out_PN, pairs, self._columns, expert_N, row_N,
            routes.experts_per_row, bias_EN, 0 if bias_EN is None else bias_EN.stride(0), own=True,
        )  # fmt: skip
