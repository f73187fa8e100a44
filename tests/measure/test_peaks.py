"""The most memory that was held during something."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap

import pytest
import torch

from llmcli.measure import peaks as module
from llmcli.measure.environment import memory_bytes
from llmcli.measure.peaks import Peak, highest_bytes, resident_bytes
from llmcli.measure.stopwatch import Stopwatch

MIB, PAGE = 2**20, 4096
NEAR = 4 * MIB  # what the interpreter and the kernel's counts may differ by
resets = pytest.mark.skipif(not module._set_back(), reason="the mark cannot be set back here")


def hold(mebibytes):
    """Takes memory from the system, writes every page of it, and gives it back."""
    with mmap(-1, mebibytes * MIB) as memory:  # malloc would keep some for later
        for start in range(0, mebibytes * MIB, PAGE):
            memory[start] = 1


@resets
def test_a_peak_is_what_was_held_inside_and_neither_before_nor_after():
    hold(300)
    before = resident_bytes()
    with Peak() as peak:
        hold(100)
    hold(200)
    assert peak.nbytes == peak.resident == pytest.approx(before + 100 * MIB, abs=NEAR)
    assert peak.device is None


@resets
def test_an_inner_peak_takes_nothing_from_the_outer_one():
    before = resident_bytes()
    with Peak() as outer:
        hold(150)
        with Peak() as small:
            hold(50)
        with Peak() as none:
            pass
    with Peak() as later:
        hold(20)
    assert outer.nbytes == pytest.approx(before + 150 * MIB, abs=NEAR)
    assert small.nbytes == pytest.approx(before + 50 * MIB, abs=NEAR)
    assert none.nbytes == pytest.approx(before, abs=NEAR)
    assert later.nbytes == pytest.approx(before + 20 * MIB, abs=NEAR)


@resets
def test_an_open_peak_is_the_most_so_far_and_an_error_closes_it():
    before = resident_bytes()
    peak, seen = Peak(), []

    def fails():
        with peak:
            seen.append(peak.nbytes)
            hold(60)
            seen.append(peak.nbytes)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert seen == [pytest.approx(size, abs=NEAR) for size in (before, before + 60 * MIB)]
    hold(120)
    assert peak.nbytes == pytest.approx(before + 60 * MIB, abs=NEAR)


@resets
def test_the_highest_of_all_is_remembered_when_the_mark_is_set_back():
    before = resident_bytes()
    hold(400)
    for _ in range(2):
        with Peak():
            pass
    assert before + 400 * MIB - NEAR < highest_bytes() < memory_bytes()


def test_without_a_mark_that_can_be_set_back_a_peak_is_known_only_if_it_is_the_highest(monkeypatch):
    mark = [500]
    monkeypatch.setattr(module, "_set_back", lambda: False)
    monkeypatch.setattr(module, "_mark", lambda: mark[0])
    with Peak() as lower:
        pass
    with Peak() as higher:
        mark[0] = 700
    assert lower.nbytes is None
    assert higher.nbytes == 700


def test_a_system_that_keeps_no_mark_has_no_peak(monkeypatch):
    monkeypatch.setattr(module, "_MARKS", module._Marks())
    monkeypatch.setattr(module, "_mark", lambda: None)
    with Peak() as peak:
        pass
    assert peak.nbytes is None
    assert highest_bytes() is None


def test_a_mark_that_stays_where_it_was_was_not_set_back(monkeypatch):
    sizes = {"VmHWM": 900 * MIB, "VmRSS": 100 * MIB}
    monkeypatch.setattr(module, "_status", sizes.get)
    assert not module._set_back()


class FakeCuda:
    """PyTorch's counts of one GPU, as `Peak` asks for them."""

    def __init__(self):
        self.now = self.most = 0

    def allocate(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)

    def synchronize(self, device):
        pass

    def reset_peak_memory_stats(self, device):
        self.most = self.now

    def max_memory_allocated(self, device):
        return self.most


def test_on_a_gpu_it_is_what_pytorch_allocated_there(monkeypatch):
    cuda, device = FakeCuda(), torch.device("cuda:0")
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(module, "_MARKS", module._Marks())
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


@dataclass
class Tick:
    index: int


@dataclass(eq=False)
class Like:
    """Equal to a PhasePeak of that phase with about so many resident bytes."""

    phase: str
    nbytes: int

    def __eq__(self, other):
        near = pytest.approx(self.nbytes, abs=NEAR)
        return other.phase == self.phase and other.resident_bytes == near


def engine(*mebibytes):
    """A token for each, after having held so much."""
    for index, size in enumerate(mebibytes):
        hold(size)
        yield Tick(index)


@resets
def test_the_stopwatch_tells_the_prompts_peak_from_the_decodings():
    before = resident_bytes()
    watch = Stopwatch()
    for sizes in ((80, 10, 10), (20, 40, 10)):  # two batches, one after the other
        for _ in watch.watch(engine(*sizes), prompt_tokens=1):
            pass
    assert watch.timings().peaks == (
        Like("prefill", before + 80 * MIB),
        Like("decode", before + 40 * MIB),
    )


@resets
def test_a_run_that_is_cut_short_has_the_peaks_so_far():
    before = resident_bytes()
    watch = Stopwatch()
    tokens = watch.watch(engine(10, 90, 10), prompt_tokens=1)
    next(tokens)
    next(tokens)
    assert watch.timings().peaks[1] == Like("decode", before + 90 * MIB)


def test_after_a_single_token_there_was_no_decoding():
    watch = Stopwatch()
    assert len(list(watch.watch(engine(1), prompt_tokens=1))) == 1
    assert [peak.phase for peak in watch.timings().peaks] == ["prefill"]
