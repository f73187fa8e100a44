"""Clocks: what they mark, whose time it is, how often a GPU is waited for, and what they count."""

import sys

import pytest
import torch
from timed_models import FakeDevice, small, timed

from llmcli.commands.timing.measure import clock as clock_module
from llmcli.commands.timing.measure.clock import EventClock, HostClock, OperationCount
from llmcli.ops.elements import add


def test_the_hosts_clock_gives_each_mark_the_time_since_the_one_before(monkeypatch):
    times = iter((5, 25, 26, 36) * 2)
    monkeypatch.setattr(clock_module, "perf_counter_ns", lambda: 10**6 * next(times))
    clock = HostClock()
    for name in ("slow", "other"):  # it begins anew with every run
        clock.start()
        clock(name)
        clock("quick")
        clock.stop()
        marks = clock.marks()
        assert marks.names == (name, "quick", "end")
        assert list(marks.seconds) == pytest.approx([0.020, 0.001, 0.010])
        assert marks.host_s == marks.seconds


def test_the_devices_clock_reads_the_devices_time_and_waits_once_a_run():
    device = FakeDevice()
    clock = EventClock(device.event, device.wait)
    for run in (1, 2):
        clock.start()
        for name in "abc":
            clock(name)
        clock.stop()
        assert device.waits == run
        marks = clock.marks()
        assert marks.names == ("a", "b", "c", "end")
        assert list(marks.seconds) == pytest.approx([20.0] * 4)  # milliseconds are seconds now
        assert max(marks.host_s) < 20.0  # the host did not wait for any of it
        assert device.events == 5  # made in the first run, recorded again in the second


def test_each_mark_has_the_operations_since_the_one_before():
    one = torch.ones(2, 2)
    with OperationCount() as count:
        one + one  # before the start: of nobody
        count.start()
        count("none")
        torch.nn.functional.linear(one, one)  # one call, whatever is in it
        assert one.shape == (2, 2)  # looked up, not computed
        count("product")
        (one * 2).view(4).add_(1)
        count("three")
        one.sum()
        count.stop()
    one.sum()  # nobody counts any more
    marks = count.marks()
    assert marks.names == ("none", "product", "three", "end")
    assert list(marks.seconds) == [0, 1, 3, 1]


def test_no_compiler_is_imported():
    """Of PyTorch: its 65 MiB would be in the peaks of what is measured next."""
    before = set(sys.modules)
    timed(small("llama"))
    assert not [name for name in set(sys.modules) - before if name.startswith("torch._dynamo")]


def test_parts_have_those_of_a_whole_run():
    report = timed(small("llama"), new_tokens=4)
    rows = torch.ones(1, 1, 8)
    with OperationCount() as count:  # our kernel's output, or PyTorch's sum
        count.start()
        add(rows, rows)
        count.stop()
    (one,) = count.marks().seconds
    for phase in report.phases:
        found = {part.part: part for part in phase.totals}
        assert found["residual"].operations == 2 * 2 * phase.calls * one  # two sums in each layer
        assert found["ffn_down"].operations >= 2 * phase.calls
        layers = {part.layer: part.operations for part in phase.parts if part.part == "residual"}
        assert layers == {0: 2 * phase.calls * one, 1: 2 * phase.calls * one}
        assert all(part.operations for part in phase.totals if part.bound)
