"""The environment header and the stopwatch."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from llmcli.commands.generate.measure import Stopwatch
from llmcli.kernels import native
from llmcli.observe import environment as module
from llmcli.observe.environment import environment, memory_bytes


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
    monkeypatch.setattr(module, "_read", lambda path: text if "nvidia/version" in path else "")
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
