"""The protobuf wire format, as far as SentencePiece's messages use it."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.errors import CheckpointError

Value = int | bytes
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(number: int) -> bytes:
    """Encode base 128, low digits first, the top bit set on all but the last."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def number(field: int, value: int) -> bytes:
    """Encode a field with a number or a flag."""
    return varint(field << 3) + varint(value)


def message(field: int, body: bytes) -> bytes:
    """Encode a field with a message, a string or bytes."""
    return varint(field << 3 | BYTES) + varint(len(body)) + body


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield (field, value) in order: a number, or the bytes of any other type.

    Raises CheckpointError for invalid data.
    """
    at, size = 0, len(data)
    while at < size:
        tag, at = _read(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _read(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            length, at = _read(data, at)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise CheckpointError(f"there is no field of wire type {kind}")
        if length > size - at:
            raise CheckpointError("a field is longer than what holds it")
        yield tag >> 3, data[at : at + length]
        at += length


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:  # ten bytes at most
        digit = data[at]
        at += 1
        value |= (digit & 127) << shift
        if digit < 128:
            return value, at
        shift += 7
    raise CheckpointError("a number has no end")
