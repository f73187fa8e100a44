"""Arrays in one file, written one at a time: `.safetensors` and `.npz`, readable everywhere.

Only what is being written is in memory. Both formats are written here by hand, since
their libraries want all arrays at once: safetensors is a length, a JSON header and the bytes; npz
is an uncompressed zip of `.npy` files.
"""

from __future__ import annotations

import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from llmcli.ui.theme import encodable

_COPIED = 1 << 24  # bytes that are moved at a time
_SPARE = 512  # bytes of the header that are kept free: an offset may turn out longer


@dataclass(frozen=True)
class ArrayPlan:
    """An array that is going to be written; `dtype` is numpy's name of it, or `bfloat16`.

    bfloat16 comes as uint16 bits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        number = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        return math.prod(self.shape) * number.itemsize


class ArrayWriter(ABC):
    """Writes named arrays into a file that stays open; `finish` makes it a whole one."""

    def write(self, name: str, array: np.ndarray, dtype: str = "") -> None:
        """An array as it is. `dtype="bfloat16"`: its uint16 are the bits of bfloat16 numbers."""
        self.write_parts(name, array.shape, dtype or array.dtype.name, [array])

    @abstractmethod
    def write_parts(
        self, name: str, shape: Sequence[int], dtype: str, parts: Iterable[np.ndarray]
    ) -> None:
        """An array of that shape whose numbers come in C order, a part at a time.

        Raises ValueError where they are not as many as the shape says.
        """

    @abstractmethod
    def finish(self, metadata: Mapping[str, str]) -> None:
        """Writes what goes last, the metadata too. Raises nothing but what the file raises."""


def array_writer(
    kind: str, file: BinaryIO, plan: Sequence[ArrayPlan], metadata: Mapping[str, str]
) -> ArrayWriter:
    """A writer of `kind`, `safetensors` or `npz`, into an open, empty, seekable file.

    `plan` and `metadata` say how much room the header may take: shapes that turn out smaller, or
    metadata that turns out longer (both happen when tokens are generated), are no error.
    """
    return NpzWriter(file) if kind == "npz" else SafetensorsWriter(file, plan, metadata)


def array_file_size(kind: str, plan: Sequence[ArrayPlan], metadata: Mapping[str, str]) -> int:
    """Bytes of the file that the writer would make, to within a few kilobytes."""
    if kind != "npz":
        return 8 + _room(plan, metadata) + sum(array.nbytes for array in plan)
    text = 4 * len(json.dumps(dict(metadata)))  # numpy keeps four bytes a character
    wide = [array.nbytes * (2 if array.dtype == "bfloat16" else 1) for array in plan]
    names = [*(array.name for array in plan), "metadata"]
    # an entry has its name twice, some fields of the zip (96 bytes) and npy's header
    return text + sum(wide) + sum(2 * len(name) + 8 + 96 + 128 for name in names)


class SafetensorsWriter(ArrayWriter):
    """The header comes first in the file and is known last: room is kept for it.

    Source: the format's description, github.com/huggingface/safetensors; spaces may end a header.
    """

    def __init__(
        self, file: BinaryIO, plan: Sequence[ArrayPlan], metadata: Mapping[str, str]
    ) -> None:
        self._file, self._room = file, _room(plan, metadata)
        self._header: dict[str, object] = {}
        self._size = 0
        file.seek(8 + self._room)

    def write_parts(
        self, name: str, shape: Sequence[int], dtype: str, parts: Iterable[np.ndarray]
    ) -> None:
        """See `ArrayWriter`."""
        whole = ArrayPlan(name, dtype, tuple(shape)).nbytes
        written = 0
        for part in parts:
            written += self._file.write(_bytes(part))
        _check_size(name, written, whole)
        self._header[name] = _entry(dtype, shape, self._size, whole)
        self._size += whole

    def finish(self, metadata: Mapping[str, str]) -> None:
        """See `ArrayWriter`."""
        header = _header_bytes(self._header, metadata)
        if len(header) > self._room:
            self._make_room(len(header))
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))

    def _make_room(self, room: int) -> None:
        """Moves the numbers to the end of a larger header, the last ones first."""
        for end in range(self._size, 0, -_COPIED):
            begin = max(0, end - _COPIED)
            self._file.seek(8 + self._room + begin)
            moved = self._file.read(end - begin)
            self._file.seek(8 + room + begin)
            self._file.write(moved)
        self._room = room


class _Zip(zipfile.ZipFile):
    """A zip file that is whole only where `close` was called.

    Python's own finishes what was left: after a run that failed it writes into a closed file.
    """

    def __del__(self) -> None:
        """Leaves an unfinished file as it is."""


class NpzWriter(ArrayWriter):
    """`numpy.load` reads it; the metadata is the array `metadata`, a string of JSON.

    numpy has no bfloat16: those numbers are written as float32, which has all of them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._zip = _Zip(file, "w", zipfile.ZIP_STORED)

    def write_parts(
        self, name: str, shape: Sequence[int], dtype: str, parts: Iterable[np.ndarray]
    ) -> None:
        """See `ArrayWriter`."""
        wide = dtype == "bfloat16"
        descr = np.lib.format.dtype_to_descr(np.dtype("float32" if wide else dtype))
        header = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
        whole = math.prod(shape) * np.dtype("float32" if wide else dtype).itemsize
        written = 0
        # zip64 from the start: how long an entry gets is known only when it is written
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as entry:
            np.lib.format.write_array_header_1_0(entry, header)
            for part in parts:
                if wide:  # the bits are the upper half of float32
                    part = (part.astype(np.uint32) << 16).view(np.float32)
                written += entry.write(_bytes(part))
        _check_size(name, written, whole)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """See `ArrayWriter`."""
        text = np.array(json.dumps(_encodable(metadata), ensure_ascii=True))
        with self._zip.open("metadata.npy", "w", force_zip64=True) as entry:
            np.lib.format.write_array(entry, text)
        self._zip.close()


def _room(plan: Sequence[ArrayPlan], metadata: Mapping[str, str]) -> int:
    """Bytes to keep for the header of a safetensors file, so that the numbers are aligned."""
    size = sum(array.nbytes for array in plan)
    entries = {a.name: _entry(a.dtype, a.shape, size, 0) for a in plan}
    return -(-(len(_header_bytes(entries, metadata)) + _SPARE) // 64) * 64


def _entry(dtype: str, shape: Sequence[int], begin: int, size: int) -> dict[str, object]:
    # as the format writes it: F32, BF16, I64, U8, BOOL
    name = dtype.replace("uint", "u").replace("int", "i").replace("float", "f").upper()
    return {"dtype": name, "shape": list(shape), "data_offsets": [begin, begin + size]}


def _header_bytes(entries: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    """The header, padded so that the numbers begin at a multiple of 8 bytes."""
    header = {"__metadata__": _encodable(metadata), **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def _encodable(metadata: Mapping[str, str]) -> dict[str, str]:
    """Texts that other readers of JSON take: theirs refuse half a surrogate pair."""
    return {name: encodable(text) for name, text in metadata.items()}


def _bytes(array: np.ndarray) -> memoryview:
    """The numbers in C order, little endian, without a copy where they lie so already."""
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return plain.reshape(-1).view(np.uint8).data


def _check_size(name: str, written: int, expected: int) -> None:
    if written != expected:
        raise ValueError(f"{name}: {written} bytes were written, but its shape has {expected}")
