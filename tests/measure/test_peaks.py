"""The most memory that was held during something."""

from mmap import PAGESIZE, mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_process import MIB, FakeProcess

from llmcli.commands.generate.measure import Stopwatch
from llmcli.measure import peaks as module
from llmcli.measure.machine import memory_bytes
from llmcli.measure.peaks import Peak, highest_bytes, resident_bytes

CPU = torch.device("cpu")
MODEL = SimpleNamespace(device=CPU, decoder=SimpleNamespace(devices=(CPU,)))
LOADED = SimpleNamespace(model=MODEL, import_s=0.0, load_s=0.0, peaks=())
resets = pytest.mark.skipif(not module._set_back(), reason="the mark cannot be set back here")


@pytest.fixture
def process(monkeypatch):
    return FakeProcess(monkeypatch)


def test_a_peak_is_what_was_held_inside_and_neither_before_nor_after(process):
    process.hold(300)
    with Peak() as peak:
        process.hold(100)
    process.hold(200)
    assert peak.nbytes == peak.resident == 200 * MIB
    assert peak.device is None
    for _ in range(2):
        with Peak():
            pass
    assert process.most == 100 * MIB
    assert highest_bytes() == 400 * MIB, "remembered when the mark is set back"


def test_an_inner_peak_takes_nothing_from_the_outer_one(process):
    with Peak() as outer:
        process.hold(150)
        with Peak() as small:
            process.hold(50)
        with Peak() as none:
            pass
    with Peak() as later, Peak():
        process.hold(20)
        with Peak():  # two are around it
            pass
    found = [peak.nbytes for peak in (outer, small, none, later)]
    assert found == [250 * MIB, 150 * MIB, 100 * MIB, 120 * MIB]


def test_an_open_peak_is_the_most_so_far_and_an_error_closes_it(process):
    peak, seen = Peak(), []

    def fails():
        with peak:
            seen.append(peak.nbytes)
            process.hold(60)
            seen.append(peak.nbytes)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert seen == [100 * MIB, 160 * MIB]
    process.hold(120)
    assert peak.nbytes == 160 * MIB


@resets
def test_the_system_tells_what_was_held_in_between():
    """Half of what is taken may be given back by others in this process meanwhile."""
    with Peak() as outer:
        with Peak() as before:
            pass
        with Peak() as inner, mmap(-1, 256 * MIB) as memory:  # malloc would keep some for later
            for start in range(0, 256 * MIB, PAGESIZE):
                memory[start] = 1
        with Peak() as after:
            pass
    assert 128 * MIB < inner.nbytes - before.nbytes < 384 * MIB
    assert 128 * MIB < inner.nbytes - after.nbytes < 384 * MIB
    assert outer.nbytes >= inner.nbytes
    assert inner.nbytes <= highest_bytes() < memory_bytes()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert resident_bytes() == pytest.approx(pages * PAGESIZE, rel=0.01)


def test_without_a_mark_that_can_be_set_back_a_peak_is_known_only_if_it_is_the_highest(
    process, monkeypatch
):
    monkeypatch.setattr(module, "_set_back", lambda: False)
    process.hold(300)
    with Peak() as lower:
        pass
    with Peak() as higher:
        process.hold(500)
    assert (lower.nbytes, higher.nbytes) == (None, 600 * MIB)
    monkeypatch.setattr(module, "_HIGHEST", {})
    monkeypatch.setattr(module, "_mark", lambda: None)  # a system that keeps none
    with Peak() as peak:
        pass
    assert peak.nbytes is highest_bytes() is None


def test_a_mark_that_stays_where_it_was_was_not_set_back(monkeypatch):
    sizes = {"VmHWM": 900 * MIB, "VmRSS": 100 * MIB}
    monkeypatch.setattr(module, "_status", sizes.get)
    assert not module._set_back()


class FakeCuda:
    """PyTorch's counts of one GPU, as `Peak` asks for them."""

    def __init__(self):
        self.now = self.most = 0
        self.synchronize = lambda device: None
        self.max_memory_allocated = lambda device: self.most

    def allocate(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)

    def reset_peak_memory_stats(self, device):
        self.most = self.now


def test_on_a_gpu_it_is_what_pytorch_allocated_there(monkeypatch):
    cuda, device = FakeCuda(), torch.device("cuda:0")
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(module, "_HIGHEST", {})
    cuda.allocate(1000)
    with Peak(device) as outer:
        cuda.allocate(500)
        cuda.allocate(-500)
        with Peak(device) as inner:
            cuda.allocate(100)
            cuda.allocate(-100)
    cuda.allocate(-900)
    with Peak(device) as last:
        pass
    assert (outer.nbytes, inner.nbytes, last.nbytes) == (1500, 1100, 100)
    assert outer.device == 1500
    assert outer.resident != outer.device
    assert highest_bytes(device) == 1500


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peaks_on_a_real_gpu():
    device = torch.device("cuda:0")
    with Peak(device) as outer:
        torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        with Peak(device) as inner:
            torch.empty(16 * MIB, dtype=torch.uint8, device=device)
    assert outer.nbytes - inner.nbytes == 48 * MIB
    assert highest_bytes(device) >= outer.nbytes


def test_the_stopwatch_counts_only_what_the_engine_took(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("llmcli.commands.generate.measure.perf_counter", lambda: clock[0])

    def engine():
        for index, seconds in enumerate((2.0, 0.5, 0.5)):
            clock[0] += seconds
            yield SimpleNamespace(index=index)

    watch = Stopwatch(LOADED)
    for _ in watch.watch(engine(), prompt_tokens=10):
        clock[0] += 100  # the consumer prints slowly
    timings = watch.timings()
    assert (timings.first_token_s, timings.prompt_tokens_per_s) == (2.0, 5.0)
    assert timings.generated_tokens == 3
    assert timings.generated_tokens_per_s == pytest.approx(2.0)
    assert watch.elapsed == 3.0
    without = Stopwatch(LOADED)
    assert list(without.watch(iter(()), prompt_tokens=10)) == []
    timings = without.timings()
    assert timings.first_token_s is timings.prompt_tokens_per_s is None
    assert timings.generated_tokens_per_s is None
    assert timings.prompt_tokens == 0


def tokens(watch, process, *mebibytes):
    """The watched tokens of an engine: one for each, after having held so much."""

    def engine():
        for index, size in enumerate(mebibytes):
            process.hold(size)
            yield SimpleNamespace(index=index)

    return watch.watch(engine(), prompt_tokens=1)


def test_the_stopwatch_tells_the_prompts_peak_from_the_decodings(process):
    def said():
        return [(peak.phase, peak.resident_bytes) for peak in watch.timings().peaks]

    watch = Stopwatch(LOADED)
    for sizes in ((80, 10, 10), (20, 40, 10)):  # two batches, one after the other
        assert len(list(tokens(watch, process, *sizes))) == 3
    assert said() == [("prefill", 180 * MIB), ("decode", 140 * MIB)]
    watch = Stopwatch(LOADED)
    cut_short = tokens(watch, process, 10, 90, 10)
    next(cut_short)
    next(cut_short)
    assert said()[1] == ("decode", 190 * MIB)
    cut_short.close()
    watch = Stopwatch(LOADED)
    assert len(list(tokens(watch, process, 1))) == 1
    assert [phase for phase, _ in said()] == ["prefill"], "there was no decoding"
