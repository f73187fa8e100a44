"""What `info` says that a run needs is what fresh processes held; see the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmcli.measure.peaks import resident_bytes

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import memory_estimate

    monkeypatch.setattr(memory_estimate, "environment", lambda threads: {})
    yield memory_estimate
    for name in ("memory_estimate", "bench_tools"):
        sys.modules.pop(name, None)


@pytest.mark.real
@pytest.mark.measured
@pytest.mark.skipif(resident_bytes() is None, reason="the system does not say what is resident")
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_estimate_is_within_a_tenth_of_what_was_held(benchmark, smollm2_path, dtype):
    found = benchmark.measure(str(smollm2_path), dtype, 512, 1, 1)
    load, prefill, decode = found["peaks"]
    assert found["need"]["weights_bytes"] < load <= max(prefill, decode) == found["measured"]
    assert abs(found["ratio"] - 1) <= 0.1  # half for the benchmark: processors differ in libraries


@pytest.mark.parametrize(("ratio", "code"), [(1.04, 0), (0.96, 0), (1.11, 1), (0.89, 1)])
def test_the_benchmark_fails_for_an_estimate_that_is_further_off(
    benchmark, monkeypatch, capsys, ratio, code
):
    def measure(spec, dtype, context, batch, threads):
        return {
            "model": spec, "dtype": dtype, "context": context, "batch": batch, "total": 2**20,
            "peaks": [2**20] * 3, "measured": 2**20, "ratio": ratio,
        }  # fmt: skip

    monkeypatch.setattr(benchmark, "measure", measure)
    argv = ["x", "--models", "smollm2", "--contexts", "64", "--batches", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    assert benchmark.main() == code
    assert capsys.readouterr().out.count("✗") == 3 * code
