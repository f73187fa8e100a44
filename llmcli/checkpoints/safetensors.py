"""Reads the header of a safetensors file.

Source: the format's README and `safetensors` 0.8 (tensor.rs, `Metadata::validate`). That library
accepts what is accepted here, with the same meaning. It also accepts names that occur twice (the
last counts), entries as arrays or with nested unknown fields, and numbers that are not natural.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, TypeGuard

from llmcli.checkpoints.files import MAX_JSON_BYTES, open_regular, shown
from llmcli.checkpoints.tensors import SAFETENSORS_BITS, TensorInfo
from llmcli.errors import CheckpointError, OutOfMemory
from llmcli.limits import free_memory

_IN_MEMORY = 32  # bytes of memory per header byte with millions of tensors
_U64 = 1 << 64
_FIELDS = ("dtype", "shape", "data_offsets")


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, TensorInfo], int]:
    """Header of a safetensors file: (metadata, tensors by name, size of the file in bytes).

    Reads the header only. Raises CheckpointError for an inconsistent header, ModelNotFound for a
    missing file, OutOfMemory for a header that would not fit.
    """
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            length = _length(file.read(8), size)
            free = free_memory()
            if free is not None and _IN_MEMORY * length > free:
                raise OutOfMemory(
                    f"the header of `{shown(path)}` has {length:,} bytes and takes up to "
                    f"{_IN_MEMORY * length / 2**30:.3g} GiB to read, but only "
                    f"{free / 2**30:.3g} GiB are free",
                    hint="a model's header has some thousands of tensors: fetch the file again",
                )
            document = _json(file.read(length))
            metadata = _metadata(document.pop("__metadata__", None))
            tensors = _tensors(document, path, 8 + length, size)
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"`{shown(path)}` is not a usable safetensors file: {error}",
                hint="fetch or copy the file again",
            ) from None
    return metadata, tensors, size


def _length(prefix: bytes, size: int) -> int:
    """Length of the JSON header in bytes, from the first eight bytes of a file of `size`."""
    if len(prefix) < 8:
        raise ValueError("it is shorter than 8 bytes")
    length = int(struct.unpack("<Q", prefix)[0])
    if length <= min(MAX_JSON_BYTES, size - 8):
        return length
    if prefix == b"version ":  # checked last: these bytes may be a valid length
        raise ValueError("it is a git-lfs pointer")
    if prefix.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise ValueError("it is a pickle")
    if length > MAX_JSON_BYTES:
        raise ValueError(f"its header would be {length} bytes long")
    raise ValueError("it ends inside its header")


def _json(header: bytes) -> dict[str, Any]:
    """The header as an object of unicode text and natural numbers, without duplicate names."""
    try:
        numbers: Any = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), _natural)
        document = json.loads(header.decode("utf-8"), object_pairs_hook=_object, **numbers)
        json.dumps(document, ensure_ascii=False).encode()  # lone surrogates raise UnicodeError
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except UnicodeError:
        raise ValueError("its header is not unicode text") from None
    except ValueError as error:
        raise ValueError(f"its header is not valid json: {shown(error)}") from None
    if not isinstance(document, dict):
        raise ValueError("its header is not a json object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"`{twice}` occurs twice")
    return found


def _natural(digits: str) -> int:
    if not digits.isdecimal() or len(digits) > 20:  # of 2⁶⁴
        raise ValueError(f"the number {digits}")
    return int(digits)


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError("its `__metadata__` is not an object of strings")
    return found


def _tensors(document: dict[str, Any], path: Path, begin: int, size: int) -> dict[str, TensorInfo]:
    """The entries as tensors, which fill bytes `begin` to `size` without holes."""
    tensors = {name: _tensor(name, entry, path, begin) for name, entry in document.items()}
    end = begin
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise ValueError(
                f"`{shown(info.name)}` overlaps its neighbour or leaves a hole at {end - begin}"
            )
        end = info.offset + info.nbytes
    if end != size:
        cause = "is truncated" if end > size else "has bytes that no tensor owns"
        raise ValueError(f"it {cause}: {end} bytes expected, {size} found")
    return tensors


def _tensor(name: str, entry: Any, path: Path, begin: int) -> TensorInfo:
    """The tensor that `entry` describes; `begin`: the file's first byte after the header."""
    what = f"the tensor `{shown(name)}`"
    if not isinstance(entry, dict):
        raise ValueError(f"{what} is not described by an object")
    kind, shape, span = (entry.pop(field, None) for field in _FIELDS)
    if any(isinstance(value, dict | list) for value in entry.values()):
        raise ValueError(f"{what} has unknown fields: {shown(', '.join(entry))}")
    if not isinstance(kind, str) or kind not in SAFETENSORS_BITS:
        raise ValueError(f"{what} has the unknown dtype `{shown(kind)}`")
    elements = 1
    for product in accumulate(shape, mul) if _naturals(shape) else (_U64,):
        if product >= _U64:
            raise ValueError(f"{what} has the impossible shape {shown(shape)}")
        elements = product
    if not _naturals(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"{what} has the impossible offsets {shown(span)}")
    nbytes, bits = span[1] - span[0], elements * SAFETENSORS_BITS[kind]
    if bits != 8 * nbytes:
        takes = f"{kind} {shown(shape)} takes {-(-bits // 8)}"
        raise ValueError(f"{what} has {nbytes} bytes, but {takes}")
    form, at = tuple(shape), begin + span[0]
    return TensorInfo(name=name, shape=form, format=kind, file=path, offset=at, nbytes=nbytes)


def _naturals(values: Any) -> TypeGuard[list[int]]:
    """Whether `values` is a list of unsigned 64-bit integers."""
    return isinstance(values, list) and all(type(value) is int and value < _U64 for value in values)
