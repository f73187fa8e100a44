"""What this machine can do at most: which sets are read, that all of them is, and by whom."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmcli import devices
from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.kernels import native
from llmcli.observe import ceilings as module
from llmcli.observe import rates
from llmcli.observe.ceilings import cpu_caches, measure_ceilings
from llmcli.observe.peaks import Peak, resident_bytes
from llmcli.reports.ceilings import Ceilings, ReadRate

CPU = torch.device("cpu")
MIB = 2**20


def test_a_shared_cache_counts_once_and_an_own_one_for_every_thread(tmp_path, monkeypatch):
    """Four processors on two sockets: their own L1 and L2, and an L3 for each pair."""
    monkeypatch.setattr(module, "processor_numbers", lambda: [0, 1, 2, 3])
    for processor in range(4):
        for index, (level, kind, size, shared) in enumerate((
            (1, "Data", "48K", 1 << processor),
            (1, "Instruction", "32K", 1 << processor),
            (2, "Unified", "1024K", 1 << processor),
            (3, "Unified", "32M", 0b0011 if processor < 2 else 0b1100),
        )):  # fmt: skip
            folder = tmp_path / f"sys/devices/system/cpu/cpu{processor}/cache/index{index}"
            folder.mkdir(parents=True)
            values = {"level": level, "type": kind, "size": size, "shared_cpu_map": f"{shared:x}"}
            for name, value in values.items():
                (folder / name).write_text(f"{value}\n")
    for threads, l2, l3 in ((1, 1, 32), (2, 2, 64), (3, 3, 64), (99, 4, 64)):
        assert cpu_caches(threads, tmp_path) == (("L2", l2 * MIB), ("L3", l3 * MIB))
    monkeypatch.setattr(module, "processor_numbers", lambda: [1])  # the others may not be used
    assert cpu_caches(4, tmp_path) == (("L2", MIB), ("L3", 32 * MIB))
    for size in tmp_path.rglob("size"):
        size.write_text("much\n")
    assert cpu_caches(2, tmp_path) == cpu_caches(2, tmp_path / "nowhere") == ()


def test_ceilings_of_this_processor(monkeypatch):
    monkeypatch.setattr(module, "cpu_caches", lambda threads: (("L2", 2 * MIB), ("L3", 8 * MIB)))
    steps = []
    before, threads = resident_bytes(), torch.get_num_threads()
    with Peak() as peak:
        found = measure_ceilings(
            CPU, Arithmetic.of("float32"), threads=1, working_set=20 * MIB + 1, seconds=0.1,
            progress=lambda *step: steps.append(step),
        )  # fmt: skip
    assert torch.get_num_threads() == threads
    assert (found.device, found.threads) == ("cpu", 1)
    sizes = [(rate.nbytes // MIB, rate.level) for rate in found.reads]
    assert sizes == [
        (1, "L2"), (2, "L2"), (4, "L3"), (8, "L3"), (21, "memory"), (32, "memory")
    ]  # fmt: skip
    assert found.start_s > 0
    fast = [rate.bytes_per_s for rate in found.reads]
    assert fast == sorted(fast, reverse=True)
    assert found.read(20 * MIB + 1) is found.reads[4]
    assert found.read(10**12) is found.reads[-1]
    assert [rate.dtype for rate in found.matrices] == ["float32", "bfloat16"]
    assert all(rate.way for rate in found.matrices)
    assert [step[1:] for step in steps] == [(done, 8) for done in range(8)]
    assert peak.nbytes is None or peak.nbytes < before + 200 * MIB


@pytest.mark.measured
def test_rates_are_those_of_a_processor():
    """Of several tries one that had the processor now and then."""

    def plausible():
        found = measure_ceilings(CPU, Arithmetic.of("float32"), threads=1, seconds=0.1)
        rates = [found.reads[-1].bytes_per_s, *(rate.flops_per_s for rate in found.matrices)]
        return min(rates) > 1e8 and found.start_s < 1e-4

    assert any(plausible() for _ in range(5))


@pytest.mark.parametrize(
    ("nbytes", "level", "rate"),
    [(MIB, "L2", 9.0), (2 * MIB, "L3", 5.0), (5 * MIB, "L3", 5.0), (99 * MIB, "memory", 1.0)],
)
def test_a_set_is_read_where_it_fits(nbytes, level, rate):
    found = read(nbytes, (MIB, 9.0, "L2"), (5 * MIB, 5.0, "L3"), (32 * MIB, 1.0, "memory"))
    assert (found.level, found.bytes_per_s) == (level, rate)


@pytest.mark.parametrize(
    ("nbytes", "level"),
    [(2 * MIB, "L3"), (5 * MIB, "L3"), (9 * MIB, "memory, not measured")],
)
def test_no_cache_is_claimed_for_more_than_it_holds(nbytes, level):
    """Where there was no room for a set that no cache holds."""
    found = read(nbytes, (4 * MIB, 5.0, "L3"))
    assert (found.level, found.bytes_per_s) == (level, 5.0)
    small = read(nbytes, (MIB, 9.0, "L2"))
    assert small.level == {"L3": "L3, not measured"}.get(level, level)


def read(nbytes, *rates):
    """How so many bytes are read where these sets were."""
    reads = tuple(ReadRate(nbytes=n, bytes_per_s=rate, level=level) for n, rate, level in rates)
    return Ceilings(
        device="cpu", threads=1, reads=reads, matrices=(), seconds=0.0,
        caches=(("L2", MIB), ("L3", 8 * MIB)),
    ).read(nbytes)  # fmt: skip


def test_a_dtype_is_measured_once_and_float64_never_through_float32():
    narrow = Arithmetic.of("bfloat16")
    one = measure_ceilings(CPU, narrow, threads=1, working_set=MIB, seconds=0.05)
    assert [rate.dtype for rate in one.matrices] == ["bfloat16"]
    exact = rates.matrix_rate(CPU, "float64", 0.02)
    assert (exact.dtype, exact.way) == ("float64", "direct")


@pytest.mark.skipif(native.level() is None, reason="there are no kernels here")
def test_products_with_packed_weights_have_a_rate_of_their_own():
    packed = Arithmetic(dtype="float32", cache="bfloat16", formats={"head.W": "Q8_0"})
    found = measure_ceilings(CPU, packed, threads=1, working_set=MIB, seconds=0.05)
    assert [rate.dtype for rate in found.matrices] == ["int16", "float32", "bfloat16"]
    assert found.matrices[0].way in (f"llmcli {native.level()}", "PyTorch")
    assert found.matrices[0].flops_per_s > 0


def test_no_more_than_an_eighth_of_the_free_memory_is_taken(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda device: 80 * MIB)
    assert max(module._working_sets(CPU, (("L3", 32 * MIB),), 10**10)) == 10 * MIB
    monkeypatch.setattr(devices, "available_bytes", lambda device: 100)
    assert module._working_sets(CPU, (("L3", 32 * MIB),), 10**10) == [MIB]
    sizes = []
    monkeypatch.setattr(rates, "best_seconds", lambda *call: 1e-9)
    rates._fastest_product(lambda square: sizes.append(len(square)), CPU, 60.0)
    assert sizes == [256]
    monkeypatch.setattr(devices, "available_bytes", lambda device: None)
    assert max(module._working_sets(CPU, (), 10**10)) == 256 * MIB


@pytest.mark.parametrize(
    ("least", "cached", "times"), [(MIB, True, 1), (8 * MIB, True, 8), (8 * MIB, False, 1)]
)
def test_every_reader_reads_every_byte_as_often_as_is_counted(monkeypatch, least, cached, times):
    """A larger number at any place of the set changes what each of them finds; none beyond it."""
    nbytes, seen, seconds = MIB, [], iter([4.0, 2.0, 8.0] * 9)
    monkeypatch.setitem(rates._LEAST_READ, "cpu", least)

    def once(calls, device, most):
        (call,) = calls
        seen.append(call())
        return next(seconds)

    monkeypatch.setattr(rates, "best_seconds", once)
    numbers = torch.ones(2 * nbytes // 4)
    rate = rates.read_rate(numbers, nbytes, 1.0, cached=cached)
    assert rate == pytest.approx(times * nbytes / 2.0)
    plain, seen[:] = [value.flatten().tolist() for value in seen], []
    assert [len(found) for found in plain] == [times, times, 1]
    for place in (0, nbytes // 8 - 1, nbytes // 8, nbytes // 4 - 1, nbytes // 4):
        numbers.fill_(1.0)[place] = 2.0
        rates.read_rate(numbers, nbytes, 1.0, cached=cached)
        found, seen[:] = [value.flatten().tolist() for value in seen], []
        for one, other in zip(found, plain, strict=True):
            assert all((a != b) == (place < nbytes // 4) for a, b in zip(one, other, strict=True))


def test_no_larger_set_is_said_to_be_read_faster_than_a_smaller_one(monkeypatch):
    measured, cached = iter((5.0, 7.0, 1.0, 3.0)), []

    def rate(*args, **named):
        cached.append(named["cached"])
        return next(measured)

    monkeypatch.setattr(module, "read_rate", rate)
    monkeypatch.setattr(module, "cpu_caches", lambda threads: (("L3", 2 * MIB),))
    monkeypatch.setattr(module, "_working_sets", lambda *args: [MIB * n for n in (1, 2, 3, 4)])
    found = measure_ceilings(CPU, Arithmetic.of("float32"), threads=1, seconds=0.02)
    assert [rate.bytes_per_s for rate in found.reads] == [7.0, 7.0, 3.0, 3.0]
    assert cached == [True, True, False, False]


@pytest.mark.parametrize(("narrow", "way"), [(16, "through float32"), (0.25, "direct")])
def test_the_faster_way_of_a_16_bit_product_is_found_and_named(monkeypatch, narrow, way):
    clock, linear = [0.0], torch.nn.functional.linear

    def product(x, y):
        clock[0] += narrow if x.dtype == torch.bfloat16 else 1.0
        return linear(x, y)

    def seconds(calls, device, most):
        begin = clock[0]
        calls[0]()
        return clock[0] - begin

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(rates, "best_seconds", seconds)
    found = rates.matrix_rate(CPU, "bfloat16", 0.02)
    assert found.way == way
    assert found.flops_per_s == 2 * 256**3 / min(narrow, 1.0)


@pytest.mark.parametrize(
    ("costs", "pieces", "most", "best", "left"),
    [  # a warm-up first; five in any case, and no more when the time is over
        ((0.01, 0.5, 0.25, 0.75, 0.5, 0.5, 9.0, 0.1), 1, 1.0, 0.25, 9.0),
        ((9.0, 9.0, 1.0, 8.0, 2.0, 4.0, 3.0, 2.0, 5.0, 6.0, 7.0, 3.0), 2, 0.0, 1.0 + 2.0, None),
    ],
)
def test_of_every_piece_the_best_repetition_counts(monkeypatch, costs, pieces, most, best, left):
    clock, costs = [0.0], iter(costs)
    monkeypatch.setattr(rates, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += next(costs)

    assert rates.best_seconds([call] * pieces, CPU, most) == best
    assert next(costs, None) == left


def test_the_start_of_an_operation_is_the_median_of_a_product_and_a_sum(monkeypatch):
    clock, costs = [0.0], iter((9.0, *[1.0] * 25, *[3.0] * 26))  # a warm-up first
    monkeypatch.setattr(rates, "perf_counter", lambda: clock[0])
    started = []

    def operation(name, seconds):
        real = getattr(torch, name)

        def run(x, y):
            clock[0] += seconds()
            started.append((name, x.dtype))
            return real(x, y)

        return run

    monkeypatch.setattr(torch, "add", operation("add", lambda: 1.0))
    product = operation("mm", lambda: next(costs))
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert rates.start_seconds(CPU, torch.bfloat16) == (3.0 + 1.0) / 2
    assert started == [("mm", torch.bfloat16), ("add", torch.bfloat16)] * 52


def test_what_lies_in_memory_is_read_in_pieces_and_all_of_it(monkeypatch):
    monkeypatch.setattr(rates, "_PIECE", MIB)
    read = []

    def once(calls, device, most):
        read.append([float(call().sum()) for call in calls])
        return 1.0

    monkeypatch.setattr(rates, "best_seconds", once)
    numbers = torch.arange(4 * MIB // 4, dtype=torch.float64).float() / MIB
    assert rates.read_rate(numbers, 5 * MIB // 2, 1.0, cached=False) == 5 * MIB // 2
    assert [len(found) for found in read] == [3, 3, 3]
    assert sum(read[0]) == pytest.approx(float(numbers[: 5 * MIB // 8].sum()), rel=1e-5)
    read.clear()
    rates.read_rate(numbers, 5 * MIB // 2, 1.0, cached=True)
    assert [len(found) for found in read] == [1, 1, 1]


class FakeEvent:
    """A CUDA event on a clock that the calls move on."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.clock

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_on_a_gpu_events_around_several_calls_count_and_the_cache_is_its_own(monkeypatch):
    def call():
        FakeEvent.clock += 0.5

    fake = SimpleNamespace(
        Event=FakeEvent,
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=50 * MIB),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    device = torch.device("cuda:0")
    assert rates._cuda_seconds(call, calls=4) == 0.5
    assert module.device_caches(device, 7) == (("L2", 50 * MIB),)
    assert rates.best_seconds([call], device, 0.0) == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_ceilings_of_a_real_gpu():
    device = torch.device("cuda:0")
    held = torch.cuda.memory_allocated(device)
    found = measure_ceilings(device, Arithmetic.of("bfloat16"), threads=1)
    assert torch.cuda.memory_allocated(device) - held < 64 * MIB  # cuBLAS keeps its workspace
    assert [rate.level for rate in found.reads] == ["L2", "L2", "memory"]
    assert found.reads[-1].bytes_per_s > 5e10
    assert found.matrices[0].flops_per_s > 1e12
    assert found.seconds < 10
    assert 1e-7 < found.start_s < 1e-4
