"""The safetensors header parser: accepts and refuses what the library does."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from fuzz_safetensors import check, library

from llmcli.checkpoints import SAFETENSORS_BITS, read_safetensors
from llmcli.errors import CheckpointError, ModelNotFound, OutOfMemory

A = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def file_bytes(header: str | bytes, data: bytes = bytes(4)) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def one(dtype="F32", shape="[1]", span="[0,4]", extra="") -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}{extra}}}}}'


BOTH = {
    "plain": (f"{{{A}}}", bytes(4)),
    "spaces around": (f"  {{{A}}}  ", bytes(4)),
    "no tensors": ("{}", b""),
    "metadata null": (f'{{"__metadata__":null,{A}}}', bytes(4)),
    "metadata": (f'{{"__metadata__":{{"x":"y"}},{A}}}', bytes(4)),
    "unknown key": (one(extra=',"x":[1,{"y":2}]'), bytes(4)),
    "unknown key, deep": (one(extra=',"x":' + "[" * 120 + "]" * 120), bytes(4)),
    "empty shape": (one(shape="[]"), bytes(4)),
    "zero dim": (one(shape="[0]", span="[0,0]"), b""),
    "zero and huge dim": (one(shape="[0,18446744073709551615]", span="[0,0]"), b""),
    "two empty at the end": (
        f'{{{A},"b":{{"dtype":"U8","shape":[0],"data_offsets":[4,4]}},'
        '"c":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}',
        bytes(4),
    ),
    "other order": (
        '{"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},'
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"abc",
    ),
    "empty name": (A.replace('"a"', '""').join("{}"), bytes(4)),
    "NUL in a name": ('{"a\\u0000":' + A[4:] + "}", bytes(4)),
    "half bytes": (one("F4", "[8]"), bytes(4)),
    "name twice": (f"{{{A},{A}}}", bytes(4)),
    "name twice, the first too large": (
        f'{{"a":{{"dtype":"U8","shape":[9],"data_offsets":[7,1]}},{A}}}', bytes(4)
    ),
    "metadata key twice": (f'{{"__metadata__":{{"x":"1","x":"2"}},{A}}}', bytes(4)),
    "unknown key twice": (one(extra=',"x":1,"x":2'), bytes(4)),
    "a tensor that is called as a field, twice": (f'{{"dtype":{A[4:]},"dtype":{A[4:]}}}', bytes(4)),
    "an array as an entry": ('{"a":["F32",[1],[0,4]]}', bytes(4)),
    "dtype as an object": (one().replace('"F32"', '{"F32":null}'), bytes(4)),
    "unknown key, as deep as can be": (one(extra=',"x":' + "[" * 125 + "]" * 125), bytes(4)),
    "a pair of surrogates": (f'{{"__metadata__":{{"\\ud83d\\ude00":"\\\\ud800"}},{A}}}', bytes(4)),
    "the largest number": (one(extra=',"x":[1.7e308,-1.7e308,1' + "0" * 308 + "]"), bytes(4)),
}
NEITHER = {
    "metadata of numbers": (f'{{"__metadata__":{{"x":1}},{A}}}', bytes(4)),
    "metadata a list": (f'{{"__metadata__":[],{A}}}', bytes(4)),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},{A}}}', bytes(4)),
    "a list": ("[]", b""),
    "null": ("null", b""),
    "nothing": ("", b""),
    "trailing text": (f"{{{A}}}x", bytes(4)),
    "trailing NUL": (f"{{{A}}}\0", bytes(4)),
    "byte order mark": ("\ufeff" + f"{{{A}}}", bytes(4)),
    "not utf-8": (b'{"\xff":' + A[4:].encode() + b"}", bytes(4)),
    "lone surrogate": ('{"\\ud800":' + A[4:] + "}", bytes(4)),
    "NaN": (one(extra=',"x":NaN'), bytes(4)),
    "deep": (one(extra=',"x":' + "[" * 100_000), bytes(4)),
    "minus zero": (one(shape="[-0]", span="[0,0]"), b""),
    "negative": (one(shape="[-1]"), bytes(4)),
    "float dim": (one(shape="[1.0]"), bytes(4)),
    "exponent dim": (one(shape="[1e0]"), bytes(4)),
    "bool dim": (one(shape="[true]"), bytes(4)),
    "text dim": (one(shape='["1"]'), bytes(4)),
    "dim of 2^64": (one(shape="[18446744073709551616,0]", span="[0,0]"), b""),
    "a dim with 5000 digits": (one(shape="[" + "9" * 5000 + "]"), bytes(4)),
    "overflow before zero": (one(shape="[18446744073709551615,2,0]", span="[0,0]"), b""),
    "overflow wraps": (one(shape="[4611686018427387904,4]", span="[0,0]"), b""),
    "shape missing": ('{"a":{"dtype":"F32","data_offsets":[0,4]}}', bytes(4)),
    "shape null": (one(shape="null"), bytes(4)),
    "shape twice": (one(extra=',"shape":[1]'), bytes(4)),
    "name twice, the first no entry": (f'{{"a":1,{A}}}', bytes(4)),
    "metadata key twice, the first a number": (
        f'{{"__metadata__":{{"x":1,"x":"2"}},{A}}}', bytes(4)
    ),
    "metadata null and again": (f'{{"__metadata__":null,"__metadata__":{{}},{A}}}', bytes(4)),
    "an array of four as an entry": ('{"a":["F32",[1],[0,4],0]}', bytes(4)),
    "dtype as an object with a value": (one().replace('"F32"', '{"F32":{}}'), bytes(4)),
    "dtype as an object, twice": (one().replace('"F32"', '{"F32":null,"F32":null}'), bytes(4)),
    "unknown key, too deep": (one(extra=',"x":' + "[" * 126 + "]" * 126), bytes(4)),
    "unknown key twice, the first too deep": (
        one(extra=',"x":' + "[" * 126 + "]" * 126 + ',"x":1'), bytes(4)
    ),
    "an object within, its name twice, the first too deep": (
        one(extra=',"x":{"y":' + "[" * 125 + "]" * 125 + ',"y":1}'), bytes(4)
    ),
    "half a pair of surrogates": (one(extra=',"x":["\\ud83d\\\\ude00"]'), bytes(4)),
    "a number out of range": (one(extra=',"x":1e309'), bytes(4)),
    "a whole number out of range": (one(extra=',"x":1' + "0" * 309), bytes(4)),
    "dtype unknown": (one("F31"), bytes(4)),
    "dtype case": (one("f32"), bytes(4)),
    "tensor null": ('{"a":null}', b""),
    "tensor a number": ('{"a":1}', b""),
    "three offsets": (one(span="[0,4,4]"), bytes(4)),
    "offsets reversed": (one(span="[4,0]"), bytes(4)),
    "offsets huge": (one(span="[0,18446744073709551615]"), bytes(4)),
    "too few bytes": (one(shape="[2]"), bytes(4)),
    "too many bytes": (one(span="[0,8]"), bytes(8)),
    "half a byte": (one("F4", "[7]"), bytes(4)),
    "hole at the start": (one(span="[4,8]"), bytes(8)),
    "hole": (f'{{{A},"b":{{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}}}', bytes(6)),
    "overlap": (f'{{{A},"b":{{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}}}', bytes(4)),
    "empty in the middle": (
        f'{{{A},"b":{{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}}}', bytes(4)
    ),
    "truncated data": (one(), bytes(3)),
    "data left over": (one(), bytes(5)),
    "data without tensors": ("{}", bytes(1)),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH | NEITHER)
def test_the_verdict_is_the_librarys(case, tmp_path):
    content = file_bytes(*(BOTH | NEITHER)[case])
    assert check(tmp_path / "a.safetensors", content) == (case in BOTH)


@pytest.mark.parametrize("dtype", [*SAFETENSORS_BITS, "F3", "C128", "I4"])
def test_dtypes_are_the_librarys(dtype, tmp_path):
    accepted = 0
    for nbytes in range(140):
        content = file_bytes(one(dtype, "[8]", f"[0,{nbytes}]"), bytes(nbytes))
        if nbytes % 8 == 0 or library(content) is not None:
            accepted += check(tmp_path / "a.safetensors", content)
    assert accepted == (dtype in SAFETENSORS_BITS)


@pytest.mark.parametrize("content", [
    b"\0", bytes(7), bytes(8), struct.pack("<Q", 100_000_001) + b"{}",
    struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2**64 - 1) + b"{}",
    struct.pack("<Q", 3) + b"{}",
])  # fmt: skip
def test_lengths_that_lie(content, tmp_path):
    assert not check(tmp_path / "a.safetensors", content)


def test_says_what_else_a_file_is(tmp_path):
    path = tmp_path / "a.safetensors"
    for content, cause in (
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        (b"PK\x03\x04" + bytes(30), "pickle"),
        (b"\x80\x02}q\x00.jj" + bytes(30), "pickle"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=cause):
            read_safetensors(path)


def test_a_header_whose_length_looks_like_a_pickle(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_bytes(f"{{{A}}}".ljust(0x280)))
    assert path.read_bytes().startswith(b"\x80\x02")
    assert list(read_safetensors(path)[1]) == ["a"]


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.array([1, 2, 3], dtype=np.int8),
        "h": np.ones((1, 1, 5), dtype=np.float16),
    }  # fmt: skip
    save_file(arrays, path, metadata={"format": "pt"})
    metadata, tensors, _ = read_safetensors(path)
    content = path.read_bytes()
    assert metadata == {"format": "pt"}
    assert set(tensors) == set(arrays)
    for name, info in tensors.items():
        assert info.file == path
        assert info.shape == arrays[name].shape
        assert content[info.offset : info.offset + info.nbytes] == arrays[name].tobytes()


def test_names_in_messages_are_escaped(tmp_path):
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}
    path.write_bytes(file_bytes(json.dumps({"\x1b[2J\n": entry})))
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert r"`\x1b[2J\n`" in caught.value.message


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFound):
        read_safetensors(tmp_path / "none.safetensors")


@pytest.mark.parametrize(("free", "fits"), [(None, True), (1 << 20, True), (1 << 10, False)])
def test_a_header_that_would_not_fit_into_memory_is_not_read(tmp_path, monkeypatch, free, fits):
    """One of 100 MB, all the library allows, takes 3 GiB as objects."""
    monkeypatch.setattr("llmcli.checkpoints.safetensors.free_memory", lambda: free)
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_bytes(one()))
    if fits:
        assert read_safetensors(path)[1].keys() == {"a"}
        return
    with pytest.raises(OutOfMemory, match=r"takes up to .* to read, but only"):
        read_safetensors(path)
