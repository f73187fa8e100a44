"""The environment header, the stopwatch, and what other programs take of the processors."""

from __future__ import annotations

import os
import platform
import sys
import time
from types import SimpleNamespace

import children
import pytest
import torch

from llmcli.commands.generate.measure import Stopwatch
from llmcli.kernels import native
from llmcli.measure import machine as module
from llmcli.measure.machine import CpuContention, environment, memory_bytes
from llmcli.records.document import members
from llmcli.records.machine import MachineLoad


def test_the_header_says_what_torch_says():
    header = environment(kernels=("k",))
    assert header.torch == torch.__version__
    assert header.threads == torch.get_num_threads()
    assert header.python == platform.python_version()
    assert header.kernels == ("k",)
    assert header.kernel_level == native.status()
    assert header.cores >= 1
    assert header.processor


def test_a_container_limit_is_the_memory(monkeypatch):
    monkeypatch.setattr(module, "memory_limit", lambda: 2**20)
    assert memory_bytes() == 2**20


def test_gpus_come_from_the_drivers_files(monkeypatch):
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  555.42.06  Tue Jun 4"
    said = {"/proc/driver/nvidia/version": text}
    monkeypatch.setattr(module, "system_text", said.get)
    assert module._nvidia_driver() == "555.42.06"


def test_the_stopwatch_counts_only_what_the_engine_took(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("llmcli.commands.generate.measure.perf_counter", lambda: clock[0])

    def engine():
        for index, seconds in enumerate((2.0, 0.5, 0.5)):
            clock[0] += seconds
            yield SimpleNamespace(index=index)

    watch = Stopwatch()
    for _ in watch.watch(engine(), prompt_tokens=10):
        clock[0] += 100  # the consumer prints slowly
    timings = watch.timings()
    assert (timings.first_token_s, timings.prompt_tokens_per_s) == (2.0, 5.0)
    assert timings.generated_tokens == 3
    assert timings.generated_tokens_per_s == pytest.approx(2.0)
    assert watch.elapsed == 3.0
    without = Stopwatch()
    assert list(without.watch(iter(()), prompt_tokens=10)) == []
    timings = without.timings()
    assert timings.first_token_s is timings.prompt_tokens_per_s is None
    assert timings.generated_tokens_per_s is None
    assert timings.prompt_tokens == 0


TICK = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(others, stolen, own)`: the next reading, 10 seconds after the first."""
    (tmp_path / "proc").mkdir()

    def read(seconds, *, others=0.0, stolen=0.0, own=0.0):
        used = round((others + own) * TICK)
        user, rest = used // 2, used - used // 2
        # processor 7 is not ours: whatever is done there does not matter
        (tmp_path / "proc/stat").write_text(
            f"cpu  9 9 9 9 9 9 9 9 9 9\n"
            f"cpu0 {user} 0 0 777 5 0 0 {round(stolen * TICK)} 0 0\n"
            f"cpu1 0 0 {rest} 777 5 0 0 0 0 0\n"
            f"cpu7 {int(99 * seconds * TICK)} 0 0 0 0 0 0 99 0 0\nintr 12 0\n"
        )
        monkeypatch.setattr(module, "perf_counter", lambda: 100.0 + seconds)
        monkeypatch.setattr(os, "times", lambda: os.times_result((own, 0.0, 0.0, 0.0, seconds)))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0))
    read(0)

    def load(threads=2, **taken):
        begun = CpuContention(tmp_path)
        read(10, **taken)
        return begun.load(threads)

    return load


def test_others_are_what_is_not_our_own(machine):
    found = machine(others=9.0, own=11.0)
    assert (found.seconds, found.processors, found.threads) == (10.0, 2, 2)
    assert found.others == pytest.approx(0.9)
    assert (found.stolen, found.load_average) == (0.0, 0.5)
    assert found.slowed
    assert found.words == (
        "other programs took 0.90 of 2 processors: on an idle machine this is faster"
    )
    assert members(found) == vars(found) | {"slowed": True}


@pytest.mark.parametrize(
    ("others", "own", "threads", "slowed"),
    [(1.0, 19.0, 2, False), (9.0, 10.0, 2, True), (9.0, 10.0, 1, False)],
    ids=["idle", "busy", "a processor to spare is for the others"],
)
def test_only_who_needs_the_processors_of_others_is_slowed(machine, others, own, threads, slowed):
    assert machine(threads, others=others, own=own).slowed is slowed


def test_the_host_of_a_virtual_machine_counts(machine):
    found = machine(others=0.1, stolen=4.0, own=15.0)
    assert found.slowed
    assert "took 0.01 of 2 processors and the virtual machine's host 0.40" in found.words


def test_without_proc_the_load_average_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    found = CpuContention(tmp_path).load(threads=1)
    assert (found.others, found.stolen, found.load_average) == (None, None, 1.5)
    plain = {"seconds": 1.0, "others": None, "stolen": None}
    assert MachineLoad(**plain, processors=2, threads=1, load_average=1.5).slowed
    assert not MachineLoad(**plain, processors=2, threads=1, load_average=1.1).slowed
    assert not MachineLoad(**plain, processors=2, threads=2, load_average=None).slowed


@pytest.mark.measured
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not count it")
def test_a_neighbour_is_seen():
    children.start([sys.executable, "-c", "print(flush=True)\nwhile True: pass"])
    begun = CpuContention()
    time.sleep(1.5)
    assert begun.load(threads=1).others > 0.3
