"""The C kernels: right, equal bit for bit on every path, and absent without harm."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from kernel_sources import EXTENSION, ROOT, SOURCES
from tensors import drawn, same
from torch.nn.functional import pad

from llmcli.config.formats import PACKED
from llmcli.config.mlp import ACTIVATIONS
from llmcli.errors import UsageError
from llmcli.graph.precision import FAST_WIDE
from llmcli.kernels import native, program
from llmcli.ops import product

COLUMNS = (1, 7, 31, 32, 33, 64, 65, 576, 577)
ROWS = (*range(1, 10), 16, 17, 24)
SPECIAL = (
    *(0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan),
    *(3.3895e38, -3.3895e38, 1e20, 1.1755e-38, -1e-39, 9.2e-41, -9.2e-41),  # to the ends, subnormal
)
numbers = partial(drawn, dtype=torch.bfloat16)


def computed(x, w, threads=1):
    """The kernel's product of two matrices whose rows are contiguous."""
    out = torch.full((len(x), len(w)), math.nan)
    multiply(
        (x.data_ptr(), x.stride(0)), (w.data_ptr(), w.stride(0)), (out.data_ptr(), len(w)),
        (len(x), len(w), x.shape[1]), threads, from_float32=x.dtype == torch.float32,
    )  # fmt: skip
    return out


def multiply(x, w, out, shape, threads, *, from_float32=False):
    """Addresses and distances of rows, and (M, N, K)."""
    rows, _, columns = shape
    wide = torch.empty(rows, -(-columns // 32) * 32)
    program.run(
        (program.WIDEN, *x, wide, rows, columns, from_float32),
        (program.MULTIPLY_BFLOAT16, wide, *w, *out, *shape, 0), writes=(wide,), threads=threads,
    )


def twin(x, w):
    """The product of bfloat16 matrices, rounded and ordered as the kernels do, bit for bit.

    Of every 32 columns lane j of 16 adds column 2j, then 2j + 1; columns beyond the last are zeros.
    Then lane j + 8 is added to lane j, lane j + 4, j + 2, j + 1. Every sum is rounded to float32,
    no product is.
    """
    a, b = (pad(one.double(), (0, -one.shape[1] % 32)) for one in (x, w))
    lanes = torch.zeros(len(x), len(w), 16)
    for k in range(a.shape[1]):
        lanes[..., k % 32 // 2] = lanes[..., k % 32 // 2].double() + torch.outer(a[:, k], b[:, k])
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_level_has_the_bits_of_the_twin(every_level, columns):
    for outputs, rows in ((1, 1), (5, 3), (3, 8), (2, 11)):
        x, w = numbers(rows, columns, seed=1), numbers(outputs, columns, seed=2)
        same(every_level(lambda x=x, w=w: computed(x, w)), twin(x, w))


def test_special_numbers_come_out_as_of_the_twin(every_level):
    pick = torch.Generator().manual_seed(3)
    special = torch.tensor(SPECIAL).bfloat16()
    seen = []
    for columns, ordinary in ((1, 0), (2, 0), (33, 0), (40, 39), (70, 69)):
        x, w = (special[torch.randint(len(SPECIAL), (24, columns), generator=pick)] for _ in "xw")
        x[:, :ordinary], w[:, :ordinary] = numbers(2, 24, ordinary, seed=4)
        seen.append(twin(x, w))
        same(every_level(lambda x=x, w=w: computed(x, w)), seen[-1])
        assert seen[-1].isnan().any()
    assert all(any(kind(s).any() for s in seen) for kind in (torch.isposinf, torch.isneginf))
    assert any((s.isfinite() & (s != 0)).any() for s in seen[-2:])


def test_a_product_is_not_rounded_before_it_is_added(every_level):
    """2¹²⁸ alone is beyond float32; added to -1.5 · 2¹²⁷ it is not."""
    x, w = torch.zeros(9, 66), torch.zeros(9, 66)
    first, then = (0, 2), (32, 3)  # of one lane each: an even column later, and an odd one
    x[:, first], w[:, first] = -1.5 * 2.0**63, 2.0**64
    x[:, then], w[:, then] = 2.0**64, 2.0**64
    x, w = x.bfloat16(), w.bfloat16()
    assert (twin(x, w) == 2.0**127).all()
    assert (every_level(lambda: computed(x, w)) == 2.0**127).all()


def test_subnormal_sums_are_not_flushed(every_level):
    x = numbers(9, 64, seed=5) * 2.0**-80
    w = numbers(9, 64, seed=6) * 2.0**-66
    expected = twin(x, w)
    assert 0 < expected.abs().max() < 2.0**-130
    same(every_level(lambda: computed(x, w)), expected)


@pytest.mark.parametrize("columns", [65, 576, 577])
def test_bits_do_not_depend_on_rows_threads_levels_or_strides(levels, use, library, columns):
    outputs = 1 + 3 * (65536 // 2 // columns)  # several chunks, so that there is work to hand out
    x, w = numbers(max(ROWS), columns, seed=7), numbers(outputs, columns, seed=8)
    stacked = numbers(3, outputs + 9, columns + 5, seed=9)
    stacked[1, 4:-5, 3:-2] = w
    wide = numbers(2, len(x), columns + 3, seed=10)
    wide[1, :, 1:-2] = x
    use(library, "portable")
    expected = torch.cat([computed(row[None], w) for row in x])
    exact = x.double() @ w.double().t()
    # ceil(K / 32) · 2 additions in a lane and 4 of lanes, each with a relative error of 2⁻²⁴
    roundings = -(-columns // 32) * 2 + 4
    bound = (x.double().abs() @ w.double().abs().t()) * roundings * 2**-24 / (1 - 2**-16)
    assert ((expected - exact).abs() <= bound).all()
    for _ in levels():
        for rows in ROWS:
            for threads in (1, 2, 3):
                same(computed(x[:rows], w, threads), expected[:rows])
            same(computed(wide[1, :rows, 1:-2], stacked[1, 4:-5, 3:-2], 2), expected[:rows])


def test_numbers_may_begin_at_an_odd_address(levels):
    """A mapped file's tensors do."""
    x, w = numbers(3, 97, seed=11), numbers(7, 97, seed=12)
    expected = twin(x, w)
    kept = [ctypes.create_string_buffer(1 + 2 * t.numel()) for t in (x, w)]
    places = []
    for tensor, buffer in zip((x, w), kept, strict=True):
        address = ctypes.addressof(buffer)
        address += 1 - address % 2
        ctypes.memmove(address, tensor.data_ptr(), 2 * tensor.numel())
        places.append((address, 97))
    for _ in levels():
        out = torch.empty(3, 7)
        multiply(*places, (out.data_ptr(), 7), (3, 7, 97), 1)
        same(out, expected)


def test_nothing_beyond_the_matrices_is_written_or_counts(levels):
    """Neighbours of every row are NaN, and the frame around the results stays as it is."""
    x, w = (torch.full((9, 110), math.nan).bfloat16() for _ in range(2))
    x[2:7, 4:101], w[1:8, 6:103] = numbers(5, 97, seed=13), numbers(7, 97, seed=14)
    x, w = x[2:7, 4:101], w[1:8, 6:103]
    for _ in levels():
        frame = torch.full((7, 12), 5.0)
        out = frame[1:6, 2:9]
        multiply((x.data_ptr(), 110), (w.data_ptr(), 110), (out.data_ptr(), 12), (5, 7, 97), 1)
        same(out.contiguous(), twin(x, w))
        out.fill_(5.0)
        assert (frame == 5.0).all()


def test_without_rows_outputs_or_columns(levels):
    for _ in levels():
        assert computed(numbers(0, 8), numbers(3, 8)).shape == (0, 3)
        assert computed(numbers(3, 8), numbers(0, 8)).shape == (3, 0)
        assert (computed(numbers(2, 0), numbers(3, 0)) == 0).all()


def test_calls_at_the_same_time_do_not_meet(library, use):
    use(library)
    x, w = numbers(4, 577, seed=15), numbers(500, 577, seed=16)
    expected = computed(x, w)
    with ThreadPoolExecutor(6) as pool:
        for out in pool.map(lambda i: computed(x[i % 4 :], w, 1 + i % 3), range(120)):
            same(out, expected[-len(out) :])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists threads there")
def test_the_threads_are_those_of_pytorch(library, use):
    use(library)
    assert native._team() is not None
    torch.ones(1 << 20).sum()  # PyTorch's own team is there from now on
    before = set(os.listdir("/proc/self/task"))
    x, w = numbers(1, 576), numbers(4096, 576)
    for _ in range(5):
        computed(x, w, torch.get_num_threads())
    assert set(os.listdir("/proc/self/task")) <= before  # other tests' may have ended meanwhile


def test_a_team_is_started_for_large_products_only(library, use, monkeypatch):
    started = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def team(work, data, threads, flags):
        started.append(threads)
        with ThreadPoolExecutor(threads) as pool:
            run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
            list(pool.map(lambda _: run(data), range(threads)))

    use(library)
    monkeypatch.setattr(native, "_team", lambda: ctypes.cast(team, ctypes.c_void_p).value)
    x, w = numbers(2, 576), numbers(400, 576)
    alone = computed(x, w, 1)
    computed(x, w[:8], 4)
    assert started == []
    same(computed(x, w, 4), alone)
    assert started == [4]


def test_a_level_is_chosen_by_the_processor_or_by_name(library, use):
    use(library)
    best = native.level()
    assert best in native.LEVELS
    assert native.status() == best
    use(library, "portable")
    assert native.status() == native.level() == "portable"
    use(library, "off")
    assert native.level() is None
    assert native.status() == "off"


@pytest.mark.parametrize(("wanted", "message"), [
    ("avx", "`LLMCLI_KERNELS=avx` is not a level"), ("avx512", "this processor cannot run"),
])  # fmt: skip
def test_a_level_that_cannot_be_is_a_usage_error(library, use, monkeypatch, wanted, message):
    class Old:
        def llmcli_native_levels(self):
            return 0b011

    use(library, wanted)
    monkeypatch.setattr(native, "_library", Old)
    for _ in range(2):  # an error is not remembered as a level
        with pytest.raises(UsageError, match=message) as caught:
            native.check()
        assert "portable" in (caught.value.hint or "")
        assert "avx2" in (caught.value.hint or "")
    monkeypatch.undo()


def test_without_a_library_nothing_breaks(use, tmp_path):
    x, w = numbers(2, 65), numbers(9, 65)
    missing = tmp_path / "none.so"
    use(missing)
    assert native.status() == "not built (no C compiler when it was installed)"
    assert native.level() is None
    assert torch.allclose(product.product_float32(x, w), x.float() @ w.float().t())
    use(missing, "avx2")
    with pytest.raises(UsageError, match="no kernels for `LLMCLI_KERNELS=avx2`: not built"):
        native.check()
    use(missing, "off")
    assert native.status() == "off"
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF no library")
    use(damaged)
    assert native.status().startswith("cannot be loaded (")
    assert native.level() is None


def test_a_library_of_another_version_is_not_called(library, use, monkeypatch):
    use(library)
    monkeypatch.setattr(native, "_VERSION", 0)
    assert native.status().startswith("stale (")
    assert native.level() is None


KERNELS = ROOT / "llmcli" / "kernels"


def test_the_tables_of_python_are_those_of_c():
    """Levels, operations, activations and packed formats, by their numbers; blocks and bytes."""
    text = "".join((KERNELS / f"{name}.h").read_text() for name in ("common", "program", "formats"))
    text += (KERNELS / "steps.c").read_text()
    enums = re.findall(r"enum (\w+) {(.*?)}", text, re.S)
    tables = {name: re.findall(r"\w+", names) for name, names in enums}
    assert tables["level"] == [name.upper() for name in native.LEVELS]
    assert {"portable", *FAST_WIDE} < set(native.LEVELS)
    assert tables["activation"] == [name.upper() for name in ACTIVATIONS]
    *kinds, _ = tables["kind"]
    assert [getattr(program, name) for name in kinds] == [*range(len(kinds))]
    *formats, _ = tables["format"]
    assert formats == [*PACKED]
    assert [one.number for one in PACKED.values()] == [*range(len(formats))]
    rows = re.findall(r"\[(\w+)\] = {(\d+), (\d+),", text)
    assert rows == [(name, str(one.block), str(one.bytes)) for name, one in PACKED.items()]


def test_the_package_names_all_sources_and_headers():
    """What is not named is not in an sdist, and a change of it would not build them again."""
    assert sorted(SOURCES) == sorted(str(path) for path in KERNELS.glob("*.c"))
    headers = sorted(str(path.relative_to(ROOT)) for path in KERNELS.glob("*.h"))
    assert sorted(EXTENSION["depends"]) == headers
    assert EXTENSION["optional"]
    assert "-ffp-contract=off" in EXTENSION["extra-compile-args"]
