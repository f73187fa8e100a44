"""What this machine can do at most: which sets are read, that all of them is, and by whom."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from needs import needs_kernels

from llmcli import devices
from llmcli.graph.precision import Precision
from llmcli.kernels import native
from llmcli.measure import ceilings as module
from llmcli.measure.ceilings import cpu_caches, measure_ceilings
from llmcli.measure.peaks import Peak, resident_bytes
from llmcli.records.machine import Cache, Ceilings, ReadRate

CPU = torch.device("cpu")
MIB = 2**20


def caches(*levels):
    """`caches("L2", bytes, "L3", bytes)`."""
    return tuple(
        Cache(level=level, bytes=nbytes) for level, nbytes in zip(*[iter(levels)] * 2, strict=True)
    )


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
        assert cpu_caches(threads, tmp_path) == caches("L2", l2 * MIB, "L3", l3 * MIB)
    monkeypatch.setattr(module, "processor_numbers", lambda: [1])  # the others may not be used
    assert cpu_caches(4, tmp_path) == caches("L2", MIB, "L3", 32 * MIB)
    for size in tmp_path.rglob("size"):
        size.write_text("much\n")
    assert cpu_caches(2, tmp_path) == cpu_caches(2, tmp_path / "nowhere") == ()


def test_ceilings_of_this_processor(monkeypatch):
    monkeypatch.setattr(module, "cpu_caches", lambda threads: caches("L2", 2 * MIB, "L3", 8 * MIB))
    steps = []
    before = resident_bytes()
    with Peak() as peak, devices.threads(2):
        found = measure_ceilings(
            CPU, Precision.of("float32"), working_set=20 * MIB + 1, seconds=0.1,
            progress=lambda *step: steps.append(step),
        )  # fmt: skip
    assert (found.device, found.threads) == ("cpu", 2)
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
        found = measure_ceilings(CPU, Precision.of("float32"), seconds=0.1)
        rates = [found.reads[-1].bytes_per_s, *(rate.flops_per_s for rate in found.matrices)]
        return min(rates) > 1e8 and found.start_s < 1e-4

    assert any(plausible() for _ in range(5))


L2, L3, RAM = (MIB, 9.0, "L2"), (4 * MIB, 5.0, "L3"), (32 * MIB, 1.0, "memory")


@pytest.mark.parametrize(("rates", "nbytes", "level", "rate"), [
    ((L2, L3, RAM), MIB, "L2", 9.0), ((L2, L3, RAM), 2 * MIB, "L3", 5.0),
    ((L2, L3, RAM), 4 * MIB, "L3", 5.0), ((L2, L3, RAM), 99 * MIB, "memory", 1.0),
    # no cache is claimed for more than it holds, where a larger set was not measured
    ((L3,), 2 * MIB, "L3", 5.0), ((L3,), 5 * MIB, "L3", 5.0),
    ((L3,), 9 * MIB, "memory, not measured", 5.0),
    ((L2,), 2 * MIB, "L3, not measured", 9.0), ((L2,), 9 * MIB, "memory, not measured", 9.0),
])  # fmt: skip
def test_a_set_is_read_where_it_fits(rates, nbytes, level, rate):
    reads = tuple(ReadRate(nbytes=n, bytes_per_s=rate, level=level) for n, rate, level in rates)
    found = Ceilings(
        device="cpu", dtype="float32", threads=1, reads=reads, matrices=(), seconds=0.0,
        caches=caches("L2", MIB, "L3", 8 * MIB),
    ).read(nbytes)  # fmt: skip
    assert (found.level, found.bytes_per_s) == (level, rate)


PACKED = Precision(dtype="float32", cache="bfloat16", formats={"head.W": "Q8_0"})


@pytest.mark.parametrize(("precision", "dtypes", "ways"), [
    (Precision.of("bfloat16"), ["bfloat16"], {"direct", "through float32"}),
    (Precision.of("float64"), ["float64", "bfloat16"], {"direct"}),  # never through float32
    pytest.param(
        PACKED, ["int16", "float32", "bfloat16"], {f"llmcli {native.level()}", "PyTorch"},
        marks=needs_kernels,
    ),
])
def test_a_dtype_is_measured_once_and_products_with_packed_weights_too(
    monkeypatch, precision, dtypes, ways
):
    monkeypatch.setattr(module, "cpu_caches", lambda threads: caches("L2", 2 * MIB))
    found = measure_ceilings(CPU, precision, working_set=MIB, seconds=0.05)
    assert found.dtype == precision.dtype
    assert [rate.dtype for rate in found.matrices] == dtypes
    assert found.matrices[0].way in ways
    assert found.matrices[0].flops_per_s > 0


@pytest.mark.parametrize(("free", "cache", "sets"), [
    (80 * MIB, 32, [10]), (100, 32, [1]), (None, 40, [20, 40, 160, 256]),
])
def test_no_more_than_an_eighth_of_the_free_memory_is_taken(monkeypatch, free, cache, sets):
    """Of 256 MiB where nobody knows what is free."""
    monkeypatch.setattr(devices, "available_bytes", lambda device: free)
    monkeypatch.setattr(module, "cpu_caches", lambda threads: caches("L3", cache * MIB))
    squares, random = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *of, **how: squares.append(of) or random(*of, **how))
    monkeypatch.setattr(module, "best_seconds", lambda calls, device, seconds: 1e-9)
    found = measure_ceilings(CPU, Precision.of("float32"), working_set=10**10)
    assert [rate.nbytes // MIB for rate in found.reads] == sets
    largest = max(of[0] for of in squares if len(of) == 2)
    assert largest == {80 * MIB: 512, 100: 256, None: 2048}[free]


@pytest.fixture
def readers(monkeypatch):
    """`readers(numbers, nbytes, cached)`: the rate, and of each reader what its calls found.

    The second of them is the fastest and takes two seconds.
    """

    def read(numbers, nbytes, cached):
        seen, seconds = [], iter([4.0, 2.0, 8.0])

        def once(calls, device, most):
            seen.append([call().flatten().double().tolist() for call in calls])
            return next(seconds)

        monkeypatch.setattr(module, "best_seconds", once)
        return module.read_rate(numbers, nbytes, 1.0, cached=cached), seen

    return read


@pytest.mark.parametrize(
    ("nbytes", "cached", "times"), [(8 * MIB, True, 1), (MIB, True, 8), (MIB, False, 1)]
)
def test_every_reader_reads_every_byte_as_often_as_is_counted(readers, nbytes, cached, times):
    """A larger number at any place of the set changes what each of them finds; none beyond it."""
    numbers = torch.ones(2 * nbytes // 4)
    rate, plain = readers(numbers, nbytes, cached)
    assert rate == pytest.approx(times * nbytes / 2.0)
    assert [[len(found) for found in calls] for calls in plain] == [[times], [times], [1]]
    for place in (0, nbytes // 8 - 1, nbytes // 8, nbytes // 4 - 1, nbytes // 4):
        numbers.fill_(1.0)[place] = 2.0
        for (one,), (other,) in zip(readers(numbers, nbytes, cached)[1], plain, strict=True):
            assert all((a != b) == (place < nbytes // 4) for a, b in zip(one, other, strict=True))


def test_what_lies_in_memory_is_read_in_pieces_and_all_of_it(readers):
    """Of 16 MiB each."""
    numbers = torch.arange(48 * MIB // 4, dtype=torch.float64).float() / MIB
    rate, found = readers(numbers, 40 * MIB, cached=False)
    assert rate == 40 * MIB / 2
    assert [len(calls) for calls in found] == [3, 3, 3]
    total = sum(sum(values) for values in found[0])
    assert total == pytest.approx(float(numbers[: 10 * MIB].double().sum()), rel=1e-4)
    assert [len(calls) for calls in readers(numbers, 40 * MIB, cached=True)[1]] == [1, 1, 1]


def test_no_dot_product_is_longer_than_cuda_takes(monkeypatch):
    lengths = []
    monkeypatch.setattr(torch, "dot", lambda x, y: lengths.append(len(x)))
    monkeypatch.setattr(module, "best_seconds", lambda calls, *rest: len([one() for one in calls]))
    module.read_rate(torch.empty(5 << 30, device="meta"), 20 << 30, 1.0, cached=False)
    assert lengths == [1 << 30, 1 << 30, 1 << 29]


def test_no_larger_set_is_said_to_be_read_faster_than_a_smaller_one(monkeypatch):
    measured, cached = iter((5.0, 7.0, 1.0, 3.0)), []

    def rate(*args, **named):
        cached.append(named["cached"])
        return next(measured)

    monkeypatch.setattr(module, "read_rate", rate)
    monkeypatch.setattr(module, "cpu_caches", lambda threads: caches("L3", 2 * MIB))
    monkeypatch.setattr(devices, "available_bytes", lambda device: 32 * MIB)
    found = measure_ceilings(CPU, Precision.of("float32"), working_set=3 * MIB, seconds=0.02)
    assert [rate.nbytes // MIB for rate in found.reads] == [1, 2, 3, 4]
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
    monkeypatch.setattr(module, "best_seconds", seconds)
    drawn = torch.get_rng_state()
    found = module.matrix_rate(CPU, "bfloat16", 0.02)
    assert torch.equal(torch.get_rng_state(), drawn)  # by a generator of its own
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
    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += next(costs)

    assert module.best_seconds([call] * pieces, CPU, most) == best
    assert next(costs, None) == left


def test_the_start_of_an_operation_is_the_median_of_a_product_and_a_sum(monkeypatch):
    clock, costs = [0.0], iter((9.0, *[1.0] * 25, *[3.0] * 26))  # a warm-up first
    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
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
    assert module.start_seconds(CPU, torch.bfloat16) == (3.0 + 1.0) / 2
    assert started == [("mm", torch.bfloat16), ("add", torch.bfloat16)] * 52


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
        device=lambda device: nullcontext(entered.append(str(device))),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    device, entered = torch.device("cuda:1"), []
    assert module.device_caches(device, 7) == caches("L2", 50 * MIB)
    assert module.best_seconds([call], device, 0.0) == 0.5
    assert {*entered} == {"cuda:1"}  # whose stream the events are recorded on


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_ceilings_of_a_real_gpu():
    device = torch.device("cuda:0")
    held = torch.cuda.memory_allocated(device)
    found = measure_ceilings(device, Precision.of("bfloat16"))
    assert torch.cuda.memory_allocated(device) - held < 64 * MIB  # cuBLAS keeps its workspace
    assert [rate.level for rate in found.reads] == ["L2", "L2", "memory"]
    assert found.reads[-1].bytes_per_s > 5e10
    assert found.matrices[0].flops_per_s > 1e12
    assert found.seconds < 10
    assert 1e-7 < found.start_s < 1e-4
