"""Weights in GGUF blocks, used directly in products.

Kernels round activations to 16- or 8-bit integers, 32 columns at a time (`quantized_input`); sums
are float32 and bit-identical for any number of rows, threads and processor level. Inputs and
results are float32.

Axes: M rows of the input, K columns of it, N outputs; E experts, P pairs of a row and an expert.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from llmcli.config.formats import ACTIVATION_BYTES, PACKED, ROWS, RUN, packed_bytes
from llmcli.kernels import native, program
from llmcli.ops import compiled
from llmcli.weights.routes import ExpertAssignment
from llmcli.weights.weight import BlockQuantized, Product, Weight


class InOneCall(Weight):
    """Packed matrices of one width, whose concatenated outputs are computed by one call.

    Few pairs of a row and an expert use one call, which reads their experts without
    synchronization; many are grouped by expert.
    """

    @property
    @abstractmethod
    def packed(self) -> tuple[Packed, ...]:
        """The matrices in the order of their outputs."""

    @abstractmethod
    def expert(self, number: int) -> InOneCall:
        """The matrices of one expert, in the same memory."""

    def _multiply(self, x: Tensor, bias_N: Tensor | None, product: Product) -> Tensor:
        """`X Wᵀ + b`, float32 → float32, from unrounded sums."""
        *experts, outputs, columns = self.shape
        if experts:
            raise TypeError("matrices of experts are multiplied with by `matmul_routed` alone")
        x_MK = x.reshape(-1, columns)
        if x_MK.dtype != torch.float32 or x_MK.stride(1) != 1:
            x_MK = x_MK.to(torch.float32).contiguous()
        out_MN = x_MK.new_empty(len(x_MK), outputs)
        if not x_MK.is_meta:
            if bias_N is not None:
                bias_N = bias_N.to(torch.float32).contiguous()
            self._run(x_MK, program.MULTIPLY, out_MN, *x_MK.shape, bias_N)
        return out_MN.view(*x.shape[:-1], outputs)

    def _multiply_routed(
        self, x_MK: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None, wide: bool
    ) -> Tensor:
        """Float32 → float32, bit-identical for a pair independent of others."""
        pairs, (experts, outputs, columns) = len(routes.expert_N), self.shape
        many = any(piece.stored for piece in self.packed)
        many |= pairs > experts and not routes.static
        if many and not x_MK.is_meta:
            return routes.by_expert(x_MK, bias_EN, lambda e, x, b: self._of(e).matmul(x, b))
        out_PN = x_MK.new_empty(pairs, outputs, dtype=torch.float32)
        if x_MK.is_meta:
            return out_PN
        x_MK = x_MK.to(torch.float32).contiguous()
        bias_EN = None if bias_EN is None else bias_EN.to(torch.float32)
        rest = (*routes.pairs, bias_EN, 0 if bias_EN is None else bias_EN.stride(0))
        return self._run(x_MK, program.MULTIPLY_EXPERTS, out_PN, pairs, columns, *rest, own=True)

    def _run(
        self, x_MK: Tensor, kind: int, out: Tensor, *arguments: program.Argument, own: bool = False
    ) -> Tensor:
        """Multiply float32 rows by an operation of packed.c; returns `out`.

        `arguments`: between the number of `out`'s columns and that of digits. `own`: each row is
        rounded separately, for MULTIPLY_EXPERTS.
        """
        segments, digits = self._segments
        address, count = ctypes.addressof(segments), len(segments) // 5
        room = torch.empty(x_MK.numel() // RUN * ACTIVATION_BYTES[digits], dtype=torch.uint8)
        program.run(
            (program.QUANTIZE, x_MK, x_MK.stride(0), room, *x_MK.shape, digits, own),
            (kind, room, address, count, out, out.shape[1], *arguments, digits),
            writes=(room, out),
            reads=self.memory(),
        )
        return out

    @cached_property
    def _segments(self) -> tuple[ctypes.Array[ctypes.c_int64], int]:
        """`struct segment`s (packed.c), of one expert each; and the number of digits."""
        numbers, column = [], 0
        for piece in self.packed:
            number, rows = PACKED[piece.format].number, piece.shape[-2]
            numbers += [piece.data.data_ptr(), number, rows, column, piece.stored]
            column += rows
        return (ctypes.c_int64 * len(numbers))(*numbers), self.packed[0].digits

    def _of(self, expert: int) -> InOneCall:
        """`expert`, made once."""
        if expert not in self._experts:
            self._experts[expert] = self.expert(expert)
        return self._experts[expert]

    @cached_property
    def _experts(self) -> dict[int, InOneCall]:
        return {}


class Packed(InOneCall, BlockQuantized):
    """One matrix `[N, K]` in `format` with 16 interleaved rows; `write` fills it.

    Matrices of experts, `[E, N, K]`, are stacked, each in whole groups of 16 rows. `memory`: where
    to store it, if given. `digits`: number of 8-bit digits (1 or 2) to which activations are
    rounded.
    """

    def __init__(
        self, format: str, shape: tuple[int, ...], device: torch.device, *,
        memory: memoryview | Tensor | None = None, digits: int = 2,
    ) -> None:  # fmt: skip
        self.format, self.shape, self.digits = format, shape, digits
        rows, own = prod(shape[:-1]), shape[-2]
        if own % ROWS and len(shape) == 3:
            raise ValueError(f"{own} rows of an expert are not whole groups of {ROWS}")
        size = packed_bytes(format, rows, shape[-1])
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
        size = self.nbytes // self.shape[0]
        own, device = self.data[number * size : (number + 1) * size], self.data.device
        return Packed(self.format, self.shape[1:], device, memory=own, digits=self.digits)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """Itself."""
        return (self,)

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

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids`, dequantized to float32 as in `ops.quant`."""
        if self.data.is_meta:
            return torch.empty(*ids.shape, self.shape[-1], device="meta")
        number, rows = PACKED[self.format].number, prod(self.shape[:-1])
        return compiled.look_up(self.data, number, rows, self.shape[-1], ids, stored=self.stored)

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

    Each has its own product. `format`: the distinct ones, `Q4_K + Q6_K`; `shape`: of all rows
    together.
    """

    def __init__(self, pieces: Sequence[Weight]) -> None:
        self._pieces = tuple(pieces)
        self.format = " + ".join(dict.fromkeys(piece.format for piece in pieces))
        *experts, _, columns = pieces[0].shape
        self._rows = [piece.shape[-2] for piece in pieces]
        self.shape = *experts, sum(self._rows), columns

    def memory(self) -> list[Tensor]:
        """The tensors of all pieces."""
        return [one for piece in self._pieces for one in piece.memory()]

    def _multiply(self, x: Tensor, bias_N: Tensor | None, product: Product) -> Tensor:
        each = zip(self._pieces, self._biases(bias_N), strict=True)
        return torch.cat([piece._multiply(x, bias, product) for piece, bias in each], -1)

    def _multiply_routed(
        self, x_MK: Tensor, routes: ExpertAssignment, bias_EN: Tensor | None, wide: bool
    ) -> Tensor:
        each = zip(self._pieces, self._biases(bias_EN), strict=True)
        return torch.cat(
            [piece._multiply_routed(x_MK, routes, bias, wide) for piece, bias in each], -1
        )

    def _biases(self, bias: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(self._rows) if bias is None else bias.split_with_sizes(self._rows, -1)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` of the concatenated matrices."""
        return self.dense(torch.float32)[ids]

    def dense(self, dtype: torch.dtype | None = None, *, rows: slice = slice(None)) -> Tensor:
        """The concatenated matrices, dequantized: a copy."""
        return torch.cat([piece.dense(dtype or torch.float32) for piece in self._pieces], -2)[rows]

    def quantized_input(self, x: Tensor) -> Tensor:
        """As rounded by the first matrix; others may differ."""
        return self._pieces[0].quantized_input(x)


class FusedPacked(InOneCall, FusedWeight):
    """Packed matrices in a fused product, which share a call and the rounded activations."""

    def __init__(self, pieces: Sequence[Packed]) -> None:
        super().__init__(pieces)
        self._packed = tuple(pieces)

    @property
    def packed(self) -> tuple[Packed, ...]:
        """See `InOneCall`."""
        return self._packed

    def expert(self, number: int) -> FusedPacked:
        """See `InOneCall`."""
        return FusedPacked([piece.expert(number) for piece in self._packed])


def fused(pieces: Sequence[Weight]) -> Weight:
    """The matrices as one weight."""
    packed = [piece for piece in pieces if isinstance(piece, Packed)]
    if len(pieces) == 1:
        return pieces[0]
    return FusedPacked(packed) if len(packed) == len(pieces) else FusedWeight(pieces)
