"""The kernels of packed blocks, bit for bit as their twin, at every level and on every path."""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import cache

import numpy as np
import packed_twin
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sources import levels_of
from tensors import HALVES, same

from llmcli.config.formats import ACTIVATION_BYTES, FORMATS, PACKED, packed_bytes
from llmcli.kernels import native, program
from llmcli.ops.quant import dequantize
from llmcli.weights.packed import Packed, fused

# Rows of weights, columns (of blocks of 32; of 256 a multiple), rows of x.
SHAPES = (
    (1, 32, 1), (2, 64, 2), (7, 96, 3), (15, 256, 4), (16, 288, 5), (17, 512, 6), (31, 320, 7),
    (32, 768, 8), (33, 1024, 9), (5, 1536, 11), (70, 256, 19),
)  # fmt: skip
FLOAT16 = (
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xB800),
    *(0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7D01),
)
SPECIAL = (
    *(0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38, 1e-38, 2.0**-126, -(2.0**-123), 2.0**-122),
    *(2.0**-121, 0.5, -1.0, 126.5, 127.0, 1e10, 3e38, -3e38, 3.4028234663852886e38),
)


def copied(array, shift=0):
    """A copy whose first byte lies `shift` bytes beyond a multiple of 64."""
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + shift
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _number(argument):
    """Arrays are passed as their addresses."""
    return ctypes.c_int64(argument.ctypes.data if isinstance(argument, np.ndarray) else argument)


class Kernels:
    """A library's functions, for a team of `threads` that `parallel` (an address) starts."""

    def __init__(self, path, level, *, threads=1, parallel=None):
        self.library = ctypes.CDLL(str(path))
        self.library.llmcli_packed_size.restype = ctypes.c_int64
        self._team = np.array([level, parallel or 0, threads])

    def _call(self, name, *arguments):
        getattr(self.library, name)(*(_number(a) for a in arguments))

    def run(self, *ops):
        """Operations of `kernels.program`, with arrays where it has addresses."""
        numbers = np.zeros((len(ops), program.NUMBERS), np.int64)
        for row, op in zip(numbers, ops, strict=True):
            row[: len(op)] = [_number(a).value for a in op]
        counters = copied(np.full((len(ops), 8), -1))
        self._call("llmcli_run", numbers, len(ops), counters, self._team, 0)

    def size(self, f, rows, columns):
        return self.library.llmcli_packed_size(
            ctypes.c_int64(PACKED[f].number), ctypes.c_int64(rows), ctypes.c_int64(columns)
        )

    def pack(self, f, raw, columns, *, shift=0, ids=None):
        """Rows of a file, uint8 `[N, bytes]` of any stride, become rows `ids` of the matrix."""
        rows = len(raw)
        packed = copied(np.zeros(self.size(f, rows, columns), np.uint8), shift)
        ids = np.arange(rows) if ids is None else ids
        self._call(
            "llmcli_pack", PACKED[f].number, raw, raw.strides[0], packed, columns, ids, rows,
            self._team,
        )  # fmt: skip
        return packed

    def unpack(self, f, packed, columns, ids):
        out = np.full((len(ids), columns), np.nan, np.float32)
        rows = len(packed) // self.size(f, 16, columns) * 16
        self.run((program.LOOK_UP, PACKED[f].number, packed, columns, ids, len(ids), out, rows, 0))
        return out

    def product(self, x, segments, *, bias=None, frame=3, digits=2):
        """x `[M, K]` with segments (format, packed, rows): `[M, N]`, all of them side by side.

        Around the results is a frame, which must stay as it is.
        """
        places, column = [], 0
        for f, packed, rows in segments:
            places += [packed.ctypes.data, PACKED[f].number, rows, column, 0]
            column += rows
        rows, columns = x.shape
        out = np.full((rows + 2, column + 2 * frame), 5, np.float32)
        results = out[1:-1, frame : frame + column]
        seen = np.empty(rows * columns // 32 * ACTIVATION_BYTES[digits], np.uint8)
        self.run(
            (program.QUANTIZE, x, x.strides[0] // 4, seen, rows, columns, digits),
            (program.MULTIPLY, seen, np.array(places), len(segments), results,
             out.strides[0] // 4, rows, columns, 0 if bias is None else bias, digits),
        )  # fmt: skip
        copy = results.copy()
        results[...] = 5
        assert (out == 5).all()
        return copy

    def seen(self, x, digits=2):
        out = np.empty_like(x)
        self._call("llmcli_seen", x, out, x.size, digits)
        return out


def columns_of(f, columns):
    block = FORMATS[f].block
    return -(-columns // block) * block


def file_rows(f, rows, columns, seed, kind="usual"):
    """Blocks of a file, uint8 `[rows, bytes]`.

    `usual`: random codes, scales around 1; `noise`: random bytes; `extreme`: all codes and integer
    scales are 0x00, 0xff, 0x80 or 0x7f, and float16 numbers are of `FLOAT16`.
    """
    pick = np.random.default_rng([seed, rows, columns, PACKED[f].number])
    n = rows * columns // FORMATS[f].block
    raw = pick.integers(0, 256, (n, FORMATS[f].bytes), np.uint8)
    if kind == "extreme":
        raw[...] = pick.choice(np.array([0, 255, 128, 127], np.uint8), (n, 1))
    for at in HALVES[f] if kind != "noise" else ():
        numbers = pick.normal(size=n).astype(np.float16)
        if kind == "extreme":
            numbers = pick.choice(np.array(FLOAT16, np.uint16), n).view(np.float16)
        raw[:, at : at + 2] = numbers[:, None].view(np.uint8)
    if f == "MXFP4" and kind != "noise":
        usual = pick.integers(110, 140, n)
        raw[:, 0] = usual if kind == "usual" else pick.choice([0, 1, 2, 127, 254, 255], n)
    return raw.reshape(rows, -1)


def inputs(rows, columns, seed, kind="usual"):
    """x, float32 `[rows, columns]`; `special`: of `SPECIAL`, or runs of any magnitude."""
    pick = np.random.default_rng([seed, rows, columns])
    x = pick.normal(size=(rows, columns))
    if kind == "special":
        runs = x.reshape(rows, -1, 32)
        runs *= 2.0 ** pick.integers(-149, 124, (rows, columns // 32, 1))
        where = pick.random((rows, columns // 32)) < 0.5
        runs[where] = pick.choice(SPECIAL, (int(where.sum()), 32))
        where = pick.random(where.shape) < 0.25
        runs[where] = np.where(pick.random((int(where.sum()), 32)) < 0.8, 0, runs[where])
    return x.astype(np.float32)


@cache
def expected(f, shape, kind, digits=2):
    """Its blocks, its x and their product, of the twin."""
    rows, columns, x_rows = shape
    raw = file_rows(f, rows, columns_of(f, columns), 1, kind)
    x = inputs(x_rows, columns_of(f, columns), 2, "usual" if kind == "usual" else "special")
    return raw, x, packed_twin.product(f, raw, x, digits)


@pytest.fixture(scope="module")
def all_kernels(library):
    """At each level."""
    return [Kernels(library, level) for level in levels_of(library)]


def check(all_kernels, f, raw, x, product=None, digits=2):
    """At every level the product of a file's rows with x has the bits of the twin."""
    product = packed_twin.product(f, raw, x, digits) if product is None else product
    for kernels in all_kernels:
        packed = kernels.pack(f, raw, x.shape[1])
        same(kernels.product(x, [(f, packed, len(raw))], digits=digits), product)


every_format = pytest.mark.parametrize("f", PACKED)
one_digit_or_two = pytest.mark.parametrize("digits", [1, 2])


@every_format
@settings(max_examples=20)
@given(st.integers(0, 5000), st.integers(0, 200))
def test_sizes_are_those_of_the_library(all_kernels, f, rows, runs):
    columns = columns_of(f, 32 * runs)
    assert packed_bytes(f, rows, columns) == all_kernels[0].size(f, rows, columns)


@every_format
@pytest.mark.parametrize("kind", ["usual", "noise", "extreme"])
def test_rows_come_out_as_dequantized(all_kernels, f, kind):
    """Those of the twin, too, whose integers and scales the products are made of."""
    for rows, columns, _ in SHAPES:
        columns = columns_of(f, columns)
        raw = file_rows(f, rows, columns, 3, kind)
        dense = dequantize(torch.from_numpy(raw), f, dtype=torch.float32).numpy()
        same(packed_twin.dequantized(f, raw), dense)
        ids = np.random.default_rng(rows).integers(0, rows, 40)
        for kernels in all_kernels:
            packed = kernels.pack(f, raw, columns)
            same(kernels.unpack(f, packed, columns, np.arange(rows)), dense)
            same(kernels.unpack(f, packed, columns, ids), dense[ids])


@every_format
@one_digit_or_two
@pytest.mark.parametrize("kind", ["usual", "extreme", "noise"])
def test_products_have_the_bits_of_the_twin(all_kernels, f, kind, digits):
    for shape in SHAPES:
        check(all_kernels, f, *expected(f, shape, kind, digits), digits)


@every_format
@one_digit_or_two
def test_codes_at_their_ends_do_not_overflow(all_kernels, f, digits):
    """All bytes of a block 0x80 (Q8_0: -128) or 0xff with activations whose digits are all ±127."""
    columns = columns_of(f, 64)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        raw = np.full((3, columns // FORMATS[f].block, FORMATS[f].bytes), byte, np.uint8)
        for at in HALVES[f]:
            raw[..., at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
        raw = raw.reshape(3, -1)
        x = np.ones((4, columns), np.float32)
        x[1] = -1
        x[2, ::2] = -1
        x[3, 1:] = 126.4999 / 127  # below a half: 126 and the largest low digit
        check(all_kernels, f, raw, x, digits=digits)


@every_format
def test_any_address_and_any_stride(all_kernels, f):
    """Blocks of a mapped file and packed ones begin anywhere; x and results at any number."""
    rows, columns = 21, columns_of(f, 288)
    raw, x = file_rows(f, rows, columns, 4), inputs(5, columns, 5)
    product = packed_twin.product(f, raw, x)
    for shift in (1, 2, 3, 31):
        file = copied(np.zeros((rows, raw.shape[1] + 2 * shift + 1), np.uint8), shift)
        file = file[:, shift : shift + raw.shape[1]]
        file[...] = raw
        wide = copied(np.full((5, columns + 7), np.nan, np.float32), 4 * (shift % 16))
        wide = wide[:, shift % 7 : shift % 7 + columns]
        wide[...] = x
        order = np.random.default_rng(shift).permutation(rows)
        for kernels in all_kernels:
            packed = kernels.pack(f, file[order], columns, shift=shift, ids=order)
            np.testing.assert_array_equal(packed, kernels.pack(f, file, columns))
            same(kernels.product(wide, [(f, packed, rows)], frame=shift), product)


def test_several_matrices_in_one_call(all_kernels):
    """Of all formats, each with its own number of rows, every row of x in every pass."""
    columns = 512
    raws = [(f, file_rows(f, (1, 16, 33, 7)[i % 4], columns, 7 + i))
            for i, f in enumerate([*PACKED, "Q4_K", "Q8_0"])]  # fmt: skip
    x = inputs(19, columns, 6)
    products = [packed_twin.product(f, raw, x) for f, raw in raws]
    product = np.concatenate(products, 1)
    bias = np.arange(product.shape[1], dtype=np.float32)
    for kernels in all_kernels:
        segments = [(f, kernels.pack(f, raw, columns), len(raw)) for f, raw in raws]
        for rows in (*range(1, 10), 15, 19):
            same(kernels.product(x[:rows], segments), product[:rows])
        same(kernels.product(x, segments[3:4]), products[3])
        same(kernels.product(x, segments, bias=bias), product + bias)
        assert kernels.product(x, []).shape == (19, 0)
        assert kernels.product(x[:0], segments).shape == (0, len(bias))
        segments.insert(2, ("Q6_K", segments[0][1][:0], 0))
        same(kernels.product(x, segments), product)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_bits_do_not_depend_on_threads(library, threads):
    for f in ("Q4_K", "Q8_0", "Q2_K"):
        raw, x, product = expected(f, (900, 768, 19), "usual")
        numbers = packed_twin.dequantized(f, raw)
        for level, parallel in itertools.product(levels_of(library), {native._team(), None}):
            kernels = Kernels(library, level, threads=threads, parallel=parallel)
            packed = kernels.pack(f, raw, 768)
            for _ in range(3):
                same(kernels.product(x, [(f, packed, 900)]), product)
            same(kernels.unpack(f, packed, 768, np.arange(900)), numbers)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_with_infinity_or_nan_is_nan_and_no_other_is(all_kernels, bad):
    for f in PACKED:
        raw, x = file_rows(f, 20, 256, 8), inputs(9, 256, 9)
        others = np.delete(packed_twin.product(f, raw, x), 4, 0)
        x[4, 100] = bad
        for kernels in all_kernels:
            got = kernels.product(x, [(f, kernels.pack(f, raw, 256), 20)])
            assert np.isnan(got[4]).all()
            same(np.delete(got, 4, 0), others)


@one_digit_or_two
def test_activations_are_rounded_as_by_the_twin(all_kernels, digits):
    """To the nearest multiple of d, ties to even; with two digits to one next to it at most."""
    for kind in ("usual", "special"):
        x = inputs(50, 256, 10, kind)
        seen = all_kernels[0].seen(x, digits)
        same(seen, packed_twin.seen(x, digits))
        most = np.abs(x.reshape(50, -1, 32)).max(-1, keepdims=True)
        allowed = (0.5001 if digits == 1 else 1.01 / 256) * most / 127
        off = np.abs(seen.astype(np.float64) - x).reshape(50, -1, 32)
        allowed = np.where(most < 2.0**-109, most, allowed)
        assert ((off <= allowed) | (most > 3.3e38)).all()  # the largest overflows
    ties = np.zeros((1, 64), np.float32)
    ties[0, :32] = [*(i + 0.5 for i in range(-15, 16)), 127]
    ties[0, 32:] = [*(-i / 2 for i in range(31)), -127]
    # no negative zero; what is a tie of high digits has the largest low digit, or one less
    whole = np.rint(ties) + np.float32(0)
    same(all_kernels[0].seen(ties, 1), whole)
    exact = whole + (ties - whole) * np.float32(254 / 256)
    same(all_kernels[0].seen(ties, 2), exact.astype(np.float32) + np.float32(0))


@given(st.lists(st.floats(width=32), min_size=32, max_size=32))
def test_any_32_activations(all_kernels, numbers):
    x = np.array([numbers], np.float32)
    same(all_kernels[0].seen(x), packed_twin.seen(x))


def test_what_is_too_small_to_divide_by_is_zero(all_kernels):
    """The largest number of a run is 2⁻¹⁰⁹ or more, or all are zeros: d is a normal number."""
    x = np.zeros((1, 32), np.float32)
    raw = file_rows("Q4_1", 3, 32, 11)
    for exponent in range(-149, -103):
        x[0, :3] = 2.0**exponent, -(2.0**exponent), 2.0**exponent / 3
        seen = all_kernels[0].seen(x)
        if exponent < -109:
            assert (seen == 0).all()
        else:
            np.testing.assert_allclose(seen, x, atol=2.0**exponent / 32000, rtol=0)
        check(all_kernels, "Q4_1", raw, x)


def test_the_weights_of_a_model_are_these_kernels(library, use):
    """`Packed` and `fused`: any shape of x, bias, rows in pieces."""
    use(library)
    pieces, raws = [], []
    for i, f in enumerate(("Q6_K", "Q4_K", "Q8_0")):
        raw = file_rows(f, (40, 24, 7)[i], 512, 12 + i)
        piece = Packed(f, (len(raw), 512), torch.device("cpu"))
        for rows in (torch.arange(5, len(raw)), torch.arange(5)):
            piece.write(rows, torch.from_numpy(raw[rows.numpy()]))
        dense = packed_twin.dequantized(f, raw)
        same(piece.dense().numpy(), dense)
        same(piece.dense(rows=slice(3, 6)).numpy(), dense[3:6])
        same(piece.rows(torch.tensor([[2, 0], [6, 6]])).numpy(), dense[[[2, 0], [6, 6]]])
        assert piece.nbytes == packed_bytes(f, len(raw), 512)
        pieces.append(piece)
        raws.append((f, raw))
    wide = torch.from_numpy(inputs(12, 520, 13)).view(3, 4, 520)
    x = wide[:, 1:3, 4:516]
    bias = torch.arange(71.0)
    flat = np.ascontiguousarray(x.numpy()).reshape(6, 512)
    product = np.concatenate([packed_twin.product(f, raw, flat) for f, raw in raws], 1)
    both = fused(pieces)
    assert both.shape == (71, 512)
    same(both.matmul(x).numpy(), product.reshape(3, 2, 71))
    for b in (bias, bias.double(), torch.arange(142.0)[::2] / 2):
        same(both.matmul(x, b).numpy(), product.reshape(3, 2, 71) + bias.numpy())
    same(pieces[1].matmul(x.transpose(0, 1)).numpy(),
         product[:, 40:64].reshape(3, 2, 24).swapaxes(0, 1))  # fmt: skip
    same(pieces[0].quantized_input(x).numpy(), packed_twin.seen(flat).reshape(3, 2, 512))
