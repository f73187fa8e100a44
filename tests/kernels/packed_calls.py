"""Calls of the kernels of packed blocks at any level, of any library, at any address."""

from __future__ import annotations

import ctypes

import numpy as np

from llmcli.config.formats import ACTIVATION_BYTES, PACKED
from llmcli.kernels import program


def copied(array, shift=0):
    """A copy whose first byte lies `shift` bytes beyond a multiple of 64."""
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + shift
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _number(argument):
    """Arrays are passed as their addresses."""
    return ctypes.c_int64(argument.ctypes.data if isinstance(argument, np.ndarray) else argument)


class Kernels:
    """A library's functions, for a team of `threads` that `parallel` (an address) starts."""

    def __init__(self, path, level, *, threads=1, parallel=None):
        self.library = ctypes.CDLL(str(path))
        self.library.llmcli_packed_size.restype = ctypes.c_int64
        self._team = np.array([level, parallel or 0, threads])

    def _call(self, name, *arguments):
        getattr(self.library, name)(*(_number(a) for a in arguments))

    def run(self, *ops):
        """Operations of `kernels.program`, with arrays where it has addresses."""
        numbers = np.zeros((len(ops), program.NUMBERS), np.int64)
        for row, op in zip(numbers, ops, strict=True):
            row[: len(op)] = [_number(a).value for a in op]
        counters = copied(np.full((len(ops), 8), -1))
        self._call("llmcli_run", numbers, len(ops), counters, self._team, 0)

    def size(self, f, rows, columns):
        return self.library.llmcli_packed_size(
            ctypes.c_int64(PACKED[f].number), ctypes.c_int64(rows), ctypes.c_int64(columns)
        )

    def pack(self, f, raw, columns, *, shift=0, ids=None):
        """Rows of a file, uint8 `[N, bytes]` of any stride, become rows `ids` of the matrix."""
        rows = len(raw)
        packed = copied(np.zeros(self.size(f, rows, columns), np.uint8), shift)
        ids = np.arange(rows) if ids is None else ids
        self._call(
            "llmcli_pack", PACKED[f].number, raw, raw.strides[0], packed, columns, ids, rows,
            self._team,
        )  # fmt: skip
        return packed

    def unpack(self, f, packed, columns, ids):
        out = np.full((len(ids), columns), np.nan, np.float32)
        rows = len(packed) // self.size(f, 16, columns) * 16
        self.run((program.LOOK_UP, PACKED[f].number, packed, columns, ids, len(ids), out, rows, 0))
        return out

    def product(self, x, segments, *, bias=None, frame=3, digits=2):
        """x `[M, K]` with segments (format, packed, rows): `[M, N]`, all of them side by side.

        Around the results is a frame, which must stay as it is.
        """
        places, column = [], 0
        for f, packed, rows in segments:
            places += [packed.ctypes.data, PACKED[f].number, rows, column, 0]
            column += rows
        rows, columns = x.shape
        out = np.full((rows + 2, column + 2 * frame), 5, np.float32)
        results = out[1:-1, frame : frame + column]
        seen = np.empty(rows * columns // 32 * ACTIVATION_BYTES[digits], np.uint8)
        self.run(
            (program.QUANTIZE, x, x.strides[0] // 4, seen, rows, columns, digits),
            (program.MULTIPLY, seen, np.array(places), len(segments), results,
             out.strides[0] // 4, rows, columns, 0 if bias is None else bias, digits),
        )  # fmt: skip
        copy = results.copy()
        results[...] = 5
        assert (out == 5).all()
        return copy

    def seen(self, x, digits=2):
        out = np.empty_like(x)
        self._call("llmcli_seen", x, out, x.size, digits)
        return out
