"""Reads the header of a safetensors file, with the checks of the reference.

Source: the format's README and `safetensors` 0.8 (tensor.rs, `Metadata::validate`): a file is
accepted exactly if that library accepts it, with the same meaning. This includes its JSON reader
(serde_json): of duplicate names the last counts, and an entry may be an array of its three fields.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from llmcli.checkpoints.files import MAX_JSON_BYTES, open_regular, shown
from llmcli.checkpoints.tensors import SAFETENSORS_BITS, TensorInfo
from llmcli.errors import CheckpointError, OutOfMemory
from llmcli.limits import free_memory

_U64 = 1 << 64
_IN_MEMORY = 32  # bytes of memory per header byte with millions of tensors


class _Refused(ValueError):
    """An invalid header; the caller adds the file's name."""


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
    if prefix == b"version ":  # checked last: these bytes may be a valid length
        raise _Refused("it is a git-lfs pointer")
    if prefix.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise _Refused("it is a pickle")
    if length > MAX_JSON_BYTES:
        raise _Refused(f"its header would be {length} bytes long")
    raise _Refused("it ends inside its header")


class _Object(dict[str, Any]):
    """A JSON object; `shadowed` has the earlier values of duplicate names."""

    shadowed: tuple[tuple[str, Any], ...] = ()

    def everything(self) -> list[tuple[str, Any]]:
        return [*self.items(), *self.shadowed]


def parse_header(
    header: bytes, path: Path, size: int
) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Parse the JSON `header` of a file of `size` bytes: (metadata, tensors by name).

    Raises ValueError with the cause.
    """
    document = _json(header)
    for name, entry in document.shadowed:  # only the form is checked
        if name == "__metadata__":
            raise _Refused("`__metadata__` occurs twice")
        _form(f"the tensor `{shown(name)}`", entry)
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


def _json(header: bytes) -> _Object:
    """The header as an object, in the dialect of serde_json.

    Rejects NaN, numbers beyond a double and lone surrogates; `-0` is not an integer.
    """
    try:
        text = header.decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=lambda digits: (
                -0.0 if digits == "-0" else int(digits if len(digits) < 300 else _finite(digits))
            ),
        )
    except RecursionError:
        raise _Refused("its header is nested too deeply") from None
    except _Refused:
        raise
    except UnicodeDecodeError:
        raise _Refused("its header is not utf-8 text") from None
    except ValueError as error:
        raise _Refused(f"its header is not valid json: {shown(error)}") from None
    if not isinstance(document, _Object):
        raise _Refused("its header is not a json object")
    if _lone_surrogate(text):
        raise _Refused("its header has a name that is not unicode text")
    return document


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) != len(pairs):
        last = {name: at for at, (name, _) in enumerate(pairs)}
        found.shadowed = tuple(pair for at, pair in enumerate(pairs) if last[pair[0]] != at)
    return found


def _no_constant(word: str) -> NoReturn:
    raise _Refused(f"its header is not valid json: {word}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Refused("its header is not valid json: a number out of range")
    return value


def _lone_surrogate(text: str) -> bool:
    r"""Whether there is an unpaired surrogate escape such as `\ud800`."""
    if "\\ud" not in text and "\\uD" not in text:
        return False
    rest = re.sub(r"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..", " ", text)
    return re.search(r"\\u[dD][89a-fA-F]", rest) is not None


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, _Object) or not all(
        isinstance(text, str) for _, text in found.everything()
    ):
        raise _Refused("its `__metadata__` is not an object of strings")
    return dict(found)


_FIELDS = ("dtype", "shape", "data_offsets")


def _form(what: str, entry: Any) -> tuple[str, list[int], list[int]]:
    """The three fields of an entry, each of its type: (dtype, shape, offsets)."""
    if isinstance(entry, list) and len(entry) == 3:
        kind, shape, span = entry
    elif not isinstance(entry, _Object):
        raise _Refused(f"{what} is not described by an object")
    else:
        twice = [name for name, _ in entry.shadowed if name in _FIELDS]
        if twice:
            raise _Refused(f"{what} has its `{twice[0]}` twice")
        if any(_deep(value) for name, value in entry.everything() if name not in _FIELDS):
            raise _Refused("its header is nested too deeply")
        kind, shape, span = (entry.get(name) for name in _FIELDS)
    if isinstance(kind, _Object) and len(kind) == 1 and not kind.shadowed:
        kind = next(name if value is None else None for name, value in kind.items())
    if not isinstance(kind, str) or kind not in SAFETENSORS_BITS:
        raise _Refused(f"{what} has the unknown dtype `{shown(kind)}`")
    if not _naturals(shape):
        raise _Refused(f"{what} has the impossible shape {shown(shape)}")
    if not _naturals(span) or len(span) != 2:
        raise _Refused(f"{what} has the impossible offsets {shown(span)}")
    return kind, shape, span


def _deep(value: Any, depth: int = 2) -> bool:
    """Whether an unknown field exceeds serde_json's limit of 127 levels."""
    if isinstance(value, _Object):
        below = [each for _, each in value.everything()]
    elif isinstance(value, list):
        below = value
    else:
        return False
    return depth >= 127 or any(_deep(each, depth + 1) for each in below)


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """One checked entry: (dtype, shape, start, stop) in bytes after the header."""
    what = f"the tensor `{shown(name)}`"
    kind, shape, span = _form(what, entry)
    if span[0] > span[1]:
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
    """Whether `values` is a list of unsigned 64-bit integers."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _U64 for value in values
    )
