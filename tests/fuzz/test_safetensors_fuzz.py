"""Hostile safetensors headers: none is accepted against the library, nor ends in another error."""

import json
import struct
from functools import partial
from pathlib import Path

import pytest
from fuzz_gguf import in_proportion
from fuzz_safetensors import check, mutate, whole
from hypothesis import example, given
from hypothesis import strategies as st

from llmcli.checkpoints import SAFETENSORS_BITS

SIZES = {name: bits // 8 for name, bits in SAFETENSORS_BITS.items() if bits >= 8}
EDGES = [-1, 0, 1, 2, 4, 8, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 12))
names = st.text(max_size=6)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "a.safetensors"


def agree(path: Path, content: bytes) -> bool:
    """As the fuzzer's `check`, in bounded memory; whether the file was accepted."""
    return in_proportion(partial(check, path), content)


def same(path: Path, header: bytes, data: bytes) -> bool:
    return agree(path, struct.pack("<Q", len(header)) + header + data)


@st.composite
def layouts(draw):
    """An honest header: (entries, bytes of data)."""
    entries, at = {}, 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = SIZES[dtype]
        for dim in shape:
            nbytes *= dim
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return entries, at


@given(layouts(), st.one_of(st.none(), st.dictionaries(names, names, max_size=2)), st.data())
def test_honest_files_are_accepted_in_any_order(path, layout, metadata, data):
    entries, size = layout
    if metadata is not None:
        entries = {**entries, "__metadata__": metadata}
    shuffled = dict(data.draw(st.permutations(list(entries.items()))))
    escaped = data.draw(st.booleans())
    header = json.dumps(shuffled, ensure_ascii=escaped).encode()
    assert same(path, header, bytes(i % 251 for i in range(size)))


@given(layouts(), st.data())
def test_one_lie_in_an_honest_header(path, layout, data):
    entries, size = layout
    if not entries:
        entries, size = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4
    entry = entries[data.draw(st.sampled_from(sorted(entries)))]
    how = data.draw(st.sampled_from(["dtype", "shape", "start", "stop", "size", "drop", "type"]))
    if how == "dtype":
        entry["dtype"] = data.draw(st.one_of(names, st.sampled_from(sorted(SAFETENSORS_BITS))))
    elif how == "shape":
        entry["shape"] = data.draw(st.lists(numbers, max_size=4))
    elif how in ("start", "stop"):
        entry["data_offsets"][how == "stop"] = data.draw(numbers)
    elif how == "size":
        size = max(0, size + data.draw(st.sampled_from([-8, -1, 1, 8])))
    elif how == "drop":
        del entry[data.draw(st.sampled_from(sorted(entry)))]
    else:
        key = data.draw(st.sampled_from(sorted(entry)))
        entry[key] = data.draw(
            st.one_of(st.none(), st.booleans(), st.floats(), names, st.just([[]]), st.just({}))
        )
    same(path, json.dumps(entries).encode(), bytes(size))


VALID = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"b\\u00e9":{"dtype":"I8","shape":[3],"data_offsets":[16,19],"x":null}}'
)


@given(st.integers(0, 2**32))
def test_mutations_of_the_bytes(path, seed):
    """Of that header, and of one that is mostly right, with data that mostly fit it."""
    agree(path, whole(mutate(VALID + bytes(19), 4000, seed)) or b"\0")


@given(st.binary(max_size=64), st.binary(max_size=64))
@example(b"", b"")
@example(b"[" * 64, b"")
def test_noise(path, header, data):
    same(path, header, data)
    agree(path, header + data or b"\0")  # without any form


@given(st.integers(0, 2**64 - 1) | st.sampled_from([2**63, 2**64 - 8, 2**64 - 1, 10**8, 10**8 + 1]))
def test_any_length(path, length):
    agree(path, struct.pack("<Q", length) + VALID + bytes(19))


@pytest.mark.parametrize("bracket", [b"[", b'{"a":', b'{"a":['])
def test_deep_nesting_neither_crashes_nor_hangs(path, bracket):
    header = bracket * (2_000_000 // len(bracket))
    assert not same(path, header, b"")
