"""Clocks: what they mark, whose time it is, and how often a GPU is waited for."""

import pytest
from timed_models import FakeDevice

from llmcli.commands.timing.measure import clock as clock_module
from llmcli.commands.timing.measure.clock import EventClock, HostClock


def test_the_hosts_clock_gives_each_mark_the_time_since_the_one_before(monkeypatch):
    times = iter((5, 25, 26, 36))
    monkeypatch.setattr(clock_module, "perf_counter_ns", lambda: 10**6 * next(times))
    clock = HostClock()
    clock.start()
    clock("slow")
    clock("quick")
    clock.stop()
    marks = clock.marks()
    assert marks.names == ("slow", "quick", "end")
    assert list(marks.seconds) == pytest.approx([0.020, 0.001, 0.010])
    assert marks.host_s == marks.seconds


def test_a_clock_begins_anew_with_every_run():
    clock = HostClock()
    for name in ("one", "two"):
        clock.start()
        clock(name)
        clock.stop()
        assert clock.marks().names == (name, "end")


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
