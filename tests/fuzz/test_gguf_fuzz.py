"""Hostile GGUF headers: only CheckpointError comes out, in bounded time and memory."""

import struct
from itertools import pairwise

import pytest
from fuzz_gguf import EDGES, check, in_proportion, mutate
from gguf_bytes import ARRAY, BOOL, F32, F64, STRING, U8, U32, U64, gguf, pair, tensor, text
from hypothesis import example, given
from hypothesis import strategies as st

u64s = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1), st.integers(0, 64))
u32s = st.one_of(st.sampled_from([e for e in EDGES if e < 2**32]), st.integers(0, 45))

VALID = gguf(
    [
        pair("general.architecture", STRING, "llama"), pair("general.alignment", U32, 64),
        pair("tokens", ARRAY, (STRING, ["a", "bc", b"\xff", ""])),
        pair("scores", ARRAY, (F32, [0.5, 1.5])), pair("flags", ARRAY, (BOOL, [0, 1])),
        pair("big", U64, 2**64 - 1), pair("real", F64, 0.1), pair("byte", U8, 7),
    ],
    [tensor("a", [4, 2], 0, 0), tensor("b", [64, 3], 8, 64), tensor("c", [256], 14, 320)],
    bytes(320 + 210),
    alignment=64,
)  # fmt: skip


def survive(data: bytes) -> bool:
    """As the fuzzer's `check`, in bounded memory; whether the file was accepted."""
    return in_proportion(check, data)


@given(st.binary(max_size=200))
@example(b"")
def test_noise(data):
    survive(data)


@given(st.binary(max_size=300), st.sampled_from([2, 3]), u64s, u64s)
def test_noise_behind_a_header(data, version, tensors, keys):
    survive(b"GGUF" + struct.pack("<IQQ", version, tensors % 4, keys % 4) + data)
    survive(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + data)


@given(st.sampled_from([VALID, gguf()]), st.integers(0, 1000), st.integers(0, 2**32))
def test_mutations_of_a_valid_file(data, cut, seed):
    """Bytes, numbers, pairs and rows of the table that are changed, put in or taken out."""
    assert survive(data)
    survive(mutate(data, len(data) + 600 - cut, seed))


# Every number in a small honest file, by its place: a lie about each in turn.
HONEST = {
    "version": ("I", 3), "tensors": ("Q", 2), "keys": ("Q", 2), "key length": ("Q", 1),
    "key": ("s", b"k"), "type": ("I", ARRAY), "inner": ("I", STRING), "count": ("Q", 3),
    "len 0": ("Q", 2), "str 0": ("s", b"ab"), "len 1": ("Q", 0), "len 2": ("Q", 9),
    "str 2": ("s", b"123456789"), "key 2 length": ("Q", 17), "key 2": ("s", b"general.alignment"),
    "type 2": ("I", U32), "alignment": ("I", 32), "name length": ("Q", 1), "name": ("s", b"a"),
    "rank": ("I", 2), "dim 0": ("Q", 64), "dim 1": ("Q", 2), "kind": ("I", 8), "offset": ("Q", 32),
    "name 2 length": ("Q", 1), "name 2": ("s", b"b"), "rank 2": ("I", 1), "dim": ("Q", 8),
    "kind 2": ("I", 0), "offset 2": ("Q", 0),
}  # fmt: skip


def honest(**lies) -> bytes:
    table = b"GGUF"
    for field, (letter, value) in HONEST.items():
        value = lies.get(field, value)
        table += value if letter == "s" else struct.pack("<" + letter, value)
    return table


def padded(table: bytes) -> bytes:
    return table + bytes(-len(table) % 32) + bytes(32 + 2 * 2 * 34)


@pytest.mark.parametrize("field", [field for field in HONEST if HONEST[field][0] != "s"])
def test_a_lie_about_each_number(field):
    letter, truth = HONEST[field]
    assert survive(padded(honest()))
    for value in {*range(70), *EDGES} - {truth}:
        if letter == "Q" or value < 2**32:
            survive(padded(honest(**{field: value})))
            survive(honest(**{field: value}))  # and nothing behind the header


@given(st.data())
def test_two_lies_at_once(data):
    lies = {}
    for field in data.draw(st.lists(st.sampled_from(sorted(HONEST)), min_size=2, max_size=2)):
        values = {"s": st.binary(max_size=12), "I": u32s, "Q": u64s}[HONEST[field][0]]
        lies[field] = data.draw(values)
    survive(padded(honest(**lies)))


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 8), st.integers(0, 30))
def test_arrays_of_strings_that_run_off_the_end(strings, more, cut):
    body = b"".join(text(each) for each in strings)
    body = body[: max(0, len(body) - cut)]
    head = text("k") + struct.pack("<IIQ", ARRAY, STRING, len(strings) + more)
    table = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + head + body
    whole = more == 0 and sum(8 + len(each) for each in strings) == len(body)
    assert survive(table) == whole


@given(
    st.lists(st.tuples(st.sampled_from([0, 8, 14, 24]), st.integers(1, 3), st.integers(0, 40))),
    st.sampled_from([1, 2, 32, 64, 2**20, 2**21, 2**30]),
)
def test_places_of_tensors(layout, alignment):
    """Files whose tensor table is honest in form: accepted exactly when nothing overlaps."""
    block = {0: (1, 4), 8: (32, 34), 14: (256, 210), 24: (1, 1)}
    table, spans = [], []
    for i, (kind, blocks, slot) in enumerate(layout):
        size, nbytes = block[kind]
        table.append(tensor(f"t{i}", [size * blocks], kind, slot * 32))
        spans.append((slot * 32, slot * 32 + nbytes * blocks))
    accepted = survive(
        gguf([pair("general.alignment", U32, alignment)], table, bytes(2200), alignment=32)
    )
    spans.sort()
    fine = all(before[1] <= after[0] for before, after in pairwise(spans))
    if not fine or alignment > 2**20:
        assert not accepted
    elif alignment <= 32:
        assert accepted


def test_headers_full_of_entries_stay_in_proportion():
    survive(gguf([text("k") + struct.pack("<IIQ", ARRAY, STRING, 40_000) + bytes(320_000)]))
    many = [pair(f"{i:x}", U8, 1) for i in range(5_000)]
    assert survive(gguf(many))
    assert not survive(gguf([*many, pair("0", U8, 1)]))
    table = [tensor(f"{i:x}", [1], 24, i * 32) for i in range(2_000)]
    assert survive(gguf(tensors=table, data=bytes(2_000 * 32)))
