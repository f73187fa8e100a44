"""Reads the header of a safetensors file, with the checks of the reference and two more.

Source: the format's README and `safetensors` 0.8 (tensor.rs, `Metadata::validate`): a file
is accepted where that library accepts it. Stricter in two points: a name that is there twice
(the library keeps the last), and entries written as arrays instead of objects, which are an
accident of its JSON reader and which no writer makes.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from llmcli.checkpoints.files import MAX_JSON_BYTES, open_regular, shown
from llmcli.checkpoints.tensors import SAFETENSORS_BITS, TensorInfo
from llmcli.errors import CheckpointError

_U64 = 1 << 64


class _Refused(ValueError):
    """What is wrong with a header; the caller adds the file's name."""


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, TensorInfo], int]:
    """Header of a safetensors file: (metadata, tensors by name, size of the file in bytes).

    Reads the header only. Raises CheckpointError for anything that does not add up,
    ModelNotFound where there is no file.
    """
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            length = _length(file.read(8), size)
            metadata, tensors = parse_header(file.read(length), path, size)
        except (_Refused, OSError) as error:
            raise CheckpointError(
                f"`{shown(path)}` is not a usable safetensors file: {error}",
                hint="fetch or copy the file again",
            ) from None
    return metadata, tensors, size


def _length(prefix: bytes, size: int) -> int:
    """Length of the JSON header in bytes, from the first eight bytes of a file of `size`."""
    if len(prefix) < 8:
        raise _Refused("it is shorter than 8 bytes")
    length = int(struct.unpack("<Q", prefix)[0])
    if length <= min(MAX_JSON_BYTES, size - 8):
        return length
    if prefix == b"version ":  # only now: these bytes may also be an honest length
        raise _Refused("it is a git-lfs pointer")
    if prefix.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise _Refused("it is a pickle")
    if length > MAX_JSON_BYTES:
        raise _Refused(f"its header would be {length} bytes long")
    raise _Refused("it ends inside its header")


def parse_header(
    header: bytes, path: Path, size: int
) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Parse the JSON `header` of a file of `size` bytes: (metadata, tensors by name).

    Raises ValueError with the cause.
    """
    document = _json(header)
    metadata = _metadata(document.pop("__metadata__", None))
    begin = 8 + len(header)
    entries = [(name, *_entry(name, entry)) for name, entry in document.items()]
    end = 0
    for name, _, _, start, stop in sorted(entries, key=lambda entry: entry[3:]):
        if start != end:
            raise _Refused(f"`{shown(name)}` overlaps its neighbour or leaves a hole at {end}")
        end = stop
    if begin + end != size:
        cause = "is truncated" if begin + end > size else "has bytes that no tensor owns"
        raise _Refused(f"it {cause}: {begin + end} bytes expected, {size} found")
    return metadata, {
        name: TensorInfo(
            name=name, shape=shape, format=kind, file=path, offset=begin + start,
            nbytes=stop - start,
        )
        for name, kind, shape, start, stop in entries
    }  # fmt: skip


def _json(header: bytes) -> dict[str, Any]:
    """The header as an object, in the dialect of serde_json: no NaN, no `-0` as an integer."""
    try:
        document = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=lambda digits: -0.0 if digits == "-0" else int(digits),
        )
    except RecursionError:
        raise _Refused("its header is nested too deeply") from None
    except _Refused:
        raise
    except UnicodeDecodeError:
        raise _Refused("its header is not utf-8 text") from None
    except ValueError as error:
        raise _Refused(f"its header is not valid json: {shown(error)}") from None
    if not isinstance(document, dict):
        raise _Refused("its header is not a json object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _Refused(f"`{shown(name)}` is there twice")
        seen.add(name)
    return found


def _no_constant(word: str) -> NoReturn:
    raise _Refused(f"its header is not valid json: {word}")


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise _Refused("its `__metadata__` is not an object of strings")
    return found


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """One checked entry: (dtype, shape, start, stop) in bytes after the header."""
    what = f"the tensor `{shown(name)}`"
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _Refused(f"{what} has a name that is not unicode text") from None
    if not isinstance(entry, dict):
        raise _Refused(f"{what} is not described by an object")
    kind, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in SAFETENSORS_BITS:
        raise _Refused(f"{what} has the unknown dtype `{shown(kind)}`")
    if not _naturals(shape):
        raise _Refused(f"{what} has the impossible shape {shown(shape)}")
    if not _naturals(span) or len(span) != 2 or span[0] > span[1]:
        raise _Refused(f"{what} has the impossible offsets {shown(span)}")
    elements = 1
    for dim in shape:
        elements *= dim
        if elements >= _U64:
            raise _Refused(f"{what} has the impossible shape {shown(shape)}")
    bits = elements * SAFETENSORS_BITS[kind]
    if bits != 8 * (span[1] - span[0]):
        raise _Refused(
            f"{what} has {span[1] - span[0]} bytes, but {kind} {shown(shape)} takes {-(-bits // 8)}"
        )
    return kind, tuple(shape), span[0], span[1]


def _naturals(values: Any) -> TypeGuard[list[int]]:
    """Whether `values` is a list of integers that fit 64 bits without a sign."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _U64 for value in values
    )
