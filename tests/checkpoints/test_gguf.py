"""The GGUF header parser, against the reference's own writer and reader and hostile bytes."""

import os
import struct
import time
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from gguf_bytes import ARRAY, BOOL, F32, STRING, U32, U64, gguf, pair, tensor, text
from hypothesis import given
from hypothesis import strategies as st

from llmcli.checkpoints import GGML_TYPES, read_gguf
from llmcli.checkpoints import gguf as parser
from llmcli.checkpoints.gguf import parse_gguf
from llmcli.errors import CheckpointError

HERE = Path("model.gguf")


def refused(data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        parse_gguf(HERE, data)
    assert "`model.gguf`" in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def test_block_sizes_are_the_references():
    theirs = {
        kind.value: (kind.name, *sizes)
        for kind, sizes in reference.constants.GGML_QUANT_SIZES.items()
    }
    ours = {number: GGML_TYPES[number] for number in theirs if number in GGML_TYPES}
    assert len(ours) >= 30
    assert ours == {number: theirs[number] for number in ours}


def test_reads_what_the_reference_writes_as_the_reference_does(tmp_path):
    path = tmp_path / "a.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 4_000_000_000,
        "int32": -7, "float32": 0.5, "uint64": 1 << 63, "int64": -(1 << 62), "float64": 0.1,
        "bool": True, "string": "é\n",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    arrays = {
        "strings": ["a", "", "ünï", "x" * 1000], "numbers": [1, -2, 3], "floats": [0.25, -1.5],
        "flags": [True, False],
    }  # fmt: skip
    for key, array in arrays.items():
        writer.add_array(key, array)
    first = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = np.arange(3 * 2 * 34, dtype=np.uint8).reshape(3, 2 * 34)  # [3, 64] in Q8_0
    writer.add_tensor("first", first)
    writer.add_tensor("packed", packed, raw_dtype=reference.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata, tensors, size = read_gguf(path)
    assert size == path.stat().st_size
    assert {key: metadata[key] for key in values | arrays} == values | arrays
    assert type(metadata["bool"]) is bool
    assert type(metadata["flags"][0]) is bool
    content = path.read_bytes()
    for name, array in (("first", first), ("packed", packed)):
        at = tensors[name].offset
        assert at % 64 == 0
        assert content[at : at + tensors[name].nbytes] == array.tobytes()
    theirs = reference.GGUFReader(path)
    assert metadata == {
        key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key
    }
    assert [(t.name, t.shape, t.format, t.offset, t.nbytes) for t in tensors.values()] == [
        (t.name, tuple(map(int, t.shape[::-1])), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]  # fmt: skip


def test_versions_2_and_3_differ_in_nothing_else():
    assert parse_gguf(HERE, gguf(version=2)) == parse_gguf(HERE, gguf(version=3)) == ({}, {})
    rest = [pair("a", U32, 1)], [tensor("t", [64, 2], 2, 0)], bytes(72)
    two, three = (parse_gguf(HERE, gguf(*rest, version=version)) for version in (2, 3))
    assert two == three
    assert two[0] == {"a": 1}


def test_holes_and_any_order_are_fine():
    data = gguf(tensors=[tensor("b", [4], 0, 64), tensor("a", [4], 0, 0)], data=bytes(80))
    _, tensors = parse_gguf(HERE, data)
    assert tensors["b"].offset - tensors["a"].offset == 64
    assert tensors["b"].offset + tensors["b"].nbytes == len(data)


F32_1 = tensor("x", [4], 0, 0)
NESTED = text("n") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ", U32, 1) + bytes(4)
HUGE = text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 63)
LONG = text("k") + struct.pack("<IQ", STRING, 1 << 63)

HOSTILE = {
    "not gguf": (b"GGUX" + bytes(40), "not begin with the letters GGUF"),
    "one byte": (b"G", "not begin with the letters GGUF"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha", "git-lfs"),
    "no version": (b"GGUF", "ends inside"),
    "no counts": (b"GGUF\3\0\0\0\1", "ends inside"),
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "version 0": (gguf(version=0), "version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "keys 2^64-1": (gguf(keys=2**64 - 1), "metadata keys"),
    "tensors 2^63": (gguf(count=2**63), "tensors"),
    "a key too many": (gguf([pair("a", STRING, "x" * 50)], keys=2), "ends inside"),
    "a tensor too many": (gguf(tensors=[F32_1], count=2, data=bytes(64)), "0 dimensions"),
    "array of 2^63": (gguf([HUGE]), "9223372036854775808 elements"),
    "string of 2^63": (gguf([LONG]), "ends inside `k`"),
    "key of 2^63": (gguf([struct.pack("<Q", 1 << 63) + bytes(20)]), "bytes long"),
    "key not utf-8": (gguf([pair(b"\xff", U32, 1)]), "not utf-8"),
    "name not utf-8": (gguf(tensors=[tensor(b"\xff", [4], 0, 0)], data=bytes(16)), "not utf-8"),
    "nested array": (gguf([NESTED]), "array of arrays"),
    "unknown type": (gguf([text("k") + struct.pack("<IQ", 13, 0)]), "unknown type 13"),
    "unknown element": (gguf([text("k") + struct.pack("<IIQ", ARRAY, 99, 0)]), "type 99"),
    "bool of 2": (gguf([pair("k", BOOL, 2)]), "neither 0 nor 1"),
    "key twice": (gguf([pair("k", U32, 1), pair("k", U32, 1)]), "`k` occurs twice"),
    "tensor twice": (gguf(tensors=[F32_1, tensor("x", [4], 0, 32)], data=bytes(64)), "twice"),
    "2^32-1 dims": (gguf(tensors=[tensor("x", [1], 0, 0, rank=2**32 - 1)]), "dimensions"),
    "dim of 0": (gguf(tensors=[tensor("x", [4, 0], 0, 0)]), "impossible shape [0, 4]"),
    "dims overflow": (gguf(tensors=[tensor("x", [2**32] * 2, 0, 0)]), "impossible shape"),
    "dims beyond file": (gguf(tensors=[tensor("x", [2**40], 0, 0)]), "ends after the file"),
    "withdrawn type": (gguf(tensors=[tensor("x", [32], 4, 0)]), "unknown type 4"),
    "half a block": (gguf(tensors=[tensor("x", [48, 2], 8, 0)], data=bytes(102)), "not a multiple"),
    "unaligned": (gguf(tensors=[tensor("x", [4], 0, 4)], data=bytes(64)), "is at 4"),
    "outside": (gguf(tensors=[tensor("x", [4], 0, 64)], data=bytes(64)), "ends after the file"),
    "overlap": (
        gguf(tensors=[tensor("x", [16], 0, 0), tensor("y", [4], 0, 32)], data=bytes(64)),
        "`x` and `y` overlap",
    ),
    "same place": (gguf(tensors=[F32_1, tensor("y", [4], 0, 0)], data=bytes(64)), "overlap"),
    "alignment 0": (gguf([pair("general.alignment", U32, 0)]), "alignment is 0"),
    "alignment 24": (gguf([pair("general.alignment", U32, 24)]), "24 is not a power of two"),
    "alignment text": (gguf([pair("general.alignment", STRING, "32")]), "alignment is"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_at_once(case):
    data, cause = HOSTILE[case]
    start = time.process_time()
    error = refused(data)
    assert cause in error.message
    assert time.process_time() - start < 1


def test_every_truncation_is_refused():
    whole = gguf(
        [pair("a", U32, 1), pair("b", ARRAY, (STRING, ["x", "yy"])), pair("c", STRING, "z")],
        [tensor("t", [2, 2], 0, 0), tensor("u", [32], 8, 32)], bytes(32 + 34),
    )  # fmt: skip
    parse_gguf(HERE, whole)
    for length in range(len(whole)):
        refused(whole[:length])


def test_names_in_messages_are_cut_and_have_no_control_characters():
    name = "\x1b[31mred\r\n`"
    error = refused(gguf(tensors=[tensor(name, [0], 0, 0)]))
    assert not set(error.message) & set("\x1b\r\n")
    assert r"\x1b[31mred" in error.message
    error = refused(gguf(tensors=[tensor("n" * 60_000, [0], 0, 0)]))
    assert len(error.message) < 300


def test_the_totals_have_caps_of_their_own(monkeypatch):
    monkeypatch.setattr(parser, "MAX_ELEMENTS", 5)
    monkeypatch.setattr(parser, "MAX_STRING_BYTES", 20)
    three = [pair(name, ARRAY, (U32, [1, 2, 3])) for name in "ab"]
    parse_gguf(HERE, gguf(three[:1]))
    assert "more than 5 elements" in refused(gguf(three)).message
    parse_gguf(HERE, gguf([pair("a", STRING, "x" * 19)]))
    assert "20 bytes" in refused(gguf([pair("a", STRING, "x" * 20)])).message
    two = pair("a", ARRAY, (STRING, ["x" * 10, "x" * 10]))
    assert "20 bytes" in refused(gguf([two])).message
    assert "20 bytes" in refused(gguf([pair("k" * 21, U32, 1)])).message


@pytest.mark.parametrize("value", [st.integers(0, 255), st.binary(max_size=20)])
def test_arrays_come_back_as_they_went_in(value):
    kind = STRING if "binary" in repr(value) else U64

    @given(st.lists(value, max_size=30))
    def check(values):
        metadata, _ = parse_gguf(HERE, gguf([pair("k", ARRAY, (kind, values)), pair("z", U32, 7)]))
        found = metadata["k"]
        if kind == STRING:
            found = [each.encode("utf-8", "surrogateescape") for each in found]
        assert found == values
        assert metadata["z"] == 7

    check()


def test_a_vocabulary_of_262k_tokens_opens_fast(tmp_path):
    count = 262_144
    tokens = [f"▁token{i}" for i in range(count)]
    scores = pair("s", ARRAY, (F32, ()))[:-8] + struct.pack(f"<Q{count}f", count, *range(count))
    data = gguf([pair("tokens", ARRAY, (STRING, tokens)), scores, pair("k", U32, 1)])
    path = tmp_path / "big.gguf"
    path.write_bytes(data)
    taken = []
    for _ in range(3):
        start = time.process_time()
        metadata, _, _ = read_gguf(path)
        taken.append(time.process_time() - start)
    assert metadata["tokens"] == tokens
    assert metadata["s"][-1] == count - 1
    assert min(taken) < 1.0  # 0.1 s; the reference's reader takes 11 s


@pytest.mark.parametrize("first", [24, 30, 100, 1000])
def test_a_header_longer_than_what_is_read_at_first(tmp_path, monkeypatch, first):
    """And one whose file becomes shorter meanwhile, which is no signal."""
    tokens = [f"token {i}" for i in range(500)]
    pairs = [pair("t", ARRAY, (STRING, tokens)), pair("n", ARRAY, (U32, list(range(300))))]
    data = gguf([*pairs, pair("last", STRING, "x" * 999)], [tensor("w", [8], 0, 0)], bytes(32))
    (tmp_path / "m.gguf").write_bytes(data)
    monkeypatch.setattr("llmcli.checkpoints.gguf._FIRST_BYTES", first)
    metadata, tensors, size = read_gguf(tmp_path / "m.gguf")
    assert (metadata, tensors) == parse_gguf(tmp_path / "m.gguf", data)
    assert size == len(data)
    whole = os.fstat(os.open(tmp_path / "m.gguf", os.O_RDONLY)).st_size
    monkeypatch.setattr(
        "llmcli.checkpoints.gguf.open_regular",
        lambda path: (os.open(path, os.O_RDONLY), whole + 8000),
    )
    (tmp_path / "m.gguf").write_bytes(data[:2000])
    with pytest.raises(CheckpointError, match="ends early: it was truncated"):
        read_gguf(tmp_path / "m.gguf")
