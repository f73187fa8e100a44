"""The safetensors header parser; most headers are in tests/fuzz/corpus/safetensors."""

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


def file_bytes(header: str | bytes, data: bytes = bytes(4)) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def one(dtype="F32", shape="[1]", span="[0,4]") -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}}}}}'


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
    path.write_bytes(file_bytes(one().ljust(0x280)))
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
