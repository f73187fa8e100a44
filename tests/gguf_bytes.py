"""Writes GGUF files byte by byte, right or wrong, for tests."""

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
           U64: "Q", I64: "q", F64: "d"}  # fmt: skip


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + LETTERS[kind], value)


def pair(key: str | bytes, kind: int, value) -> bytes:
    """One metadata pair; an array is `pair(key, ARRAY, (kind, values))`."""
    head = text(key) + struct.pack("<I", kind)
    if kind != ARRAY:
        return head + scalar(kind, value)
    inner, values = value
    body = b"".join(scalar(inner, each) for each in values)
    return head + struct.pack("<IQ", inner, len(values)) + body


def tensor(name: str | bytes, dims, kind: int, offset: int, *, rank: int | None = None) -> bytes:
    """One row of the tensor table; `dims` in GGUF's order (the row's length first)."""
    rank = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def gguf(
    pairs=(), tensors=(), data: bytes = b"", *, version: int = 3, keys: int | None = None,
    count: int | None = None, alignment: int = 32, magic: bytes = b"GGUF",
) -> bytes:  # fmt: skip
    """A whole file; `keys` and `count` lie about how many pairs and tensors there are."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if count is None else count,
        len(pairs) if keys is None else keys,
    )
    table = head + b"".join(pairs) + b"".join(tensors)
    return table + b"\0" * (-len(table) % alignment) + data
