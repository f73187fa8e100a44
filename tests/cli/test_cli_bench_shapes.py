"""`bench --device meta`: any size is counted, and nothing of it is computed or made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import LLAMA

from llmcli.observe import ceilings
from llmcli.reports.ceilings import Ceilings, MatrixRate, ReadRate

Cli = Callable[..., Any]
EIGHT_B = LLAMA | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
NUMBERS = 8_030_261_248
MATRICES = NUMBERS - 128256 * 4096 - 65 * 4096  # without the table that is looked up, and norms


@pytest.fixture
def counted(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A configuration without weights, benchmarked on a machine of round numbers."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B))

    def measured(device: Any, dtype: Any, **options: Any) -> Ceilings:
        assert device.type != "meta"
        return Ceilings(
            device=str(device), threads=1, caches=(), seconds=0.0,
            reads=(ReadRate(nbytes=10**9, bytes_per_s=1e10, level="memory"),),
            matrices=(MatrixRate(dtype="bfloat16", flops_per_s=1e15),),
        )  # fmt: skip

    monkeypatch.setattr(ceilings, "measure_ceilings", measured)

    def run(*argv: str, device: str = "meta") -> Any:
        shape = ("-p", "0", "-n", "1", "-t", "1", "--device", device)
        result = cli("bench", "-m", str(tmp_path), *shape, *argv)
        assert (result.code, result.err) == (0, "") or device != "meta"
        return result

    return run


RANDOM = ("--random-weights", "--dtype", "bfloat16")


def test_a_model_of_8_billion_is_counted(counted: Cli) -> None:
    result = counted(*RANDOM, "-d", "0,100", "--json")
    flat, deep = result.json()["rows"]
    for row in (flat, deep):
        assert (row["meta"], row["samples_ns"], row["avg_ts"]) == (True, [], 0)
        assert (row["model_n_params"], row["model_size"]) == (NUMBERS, 2 * NUMBERS)
    products = 32 * 2 * 2 * 32 * 128  # of one query with one key in 32 layers, and its value
    assert flat["flops"] == 2 * MATRICES + products
    assert deep["flops"] - flat["flops"] == 100 * products
    keys = 32 * 2 * 8 * 128 * 2  # bytes of a token in the cache
    assert [row["peak_memory_bytes"] for row in (flat, deep)] == [None, None]
    more = deep["estimated_memory_bytes"] - flat["estimated_memory_bytes"]
    assert 0 <= more - 100 * keys < 50e6
    assert 2 * NUMBERS < flat["estimated_memory_bytes"] < 2 * NUMBERS + 600e6
    # a token is a row of the table, all matrices and norms, the cache, and a few activations
    nbytes = 2 * (MATRICES + 4096 + 65 * 4096)
    for row, tokens in ((flat, 1), (deep, 101)):
        assert 0 < row["bytes"] - nbytes - tokens * keys < 2e7
        assert row["roofline_ns"] == pytest.approx(row["bytes"] / 10, rel=1e-6)  # 10 GB a second


def test_the_screen_says_what_it_would_take_at_least(counted: Cli) -> None:
    out = counted(*RANDOM).out
    assert "| not run |" in " ".join(out.split())
    assert "lower bound" in out
    assert "needs" in out
    assert "peak" not in out
    assert "1.5 s" in out or "1.50 s" in out
    assert "lower bound" not in counted(*RANDOM, "--no-ceilings").out


def test_without_weights_there_is_a_row_for_the_error_beside_the_shapes(counted: Cli) -> None:
    result = counted("--no-ceilings", "--json", device="cpu,meta")
    assert result.code == 0
    refused, meta = result.json()["rows"]
    assert refused["error_kind"] == "checkpoint"
    assert meta["flops"] == 2 * MATRICES + 32 * 4 * 32 * 128
