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
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration without weights, on a machine of round numbers."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B))

    def measured(device: Any, dtype: Any, **options: Any) -> Ceilings:
        assert device.type != "meta"
        return Ceilings(
            device=str(device), threads=1, caches=(), seconds=0.0,
            reads=(ReadRate(nbytes=10**9, bytes_per_s=1e10, level="memory"),),
            matrices=(MatrixRate(dtype="bfloat16", flops_per_s=1e15),),
        )  # fmt: skip

    monkeypatch.setattr(ceilings, "measure_ceilings", measured)
    return str(tmp_path)


def test_a_model_of_8_billion_is_counted(cli: Cli, model: str) -> None:
    asked = ("bench", "-m", model, "--random-weights", "--device", "meta", "--dtype", "bfloat16")
    result = cli(*asked, "-p", "0", "-n", "1", "-d", "0,100", "-t", "1", "--json")
    assert (result.code, result.err) == (0, "")
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


def test_the_screen_says_what_it_would_take_at_least(cli: Cli, model: str) -> None:
    asked = ("bench", "-m", model, "--random-weights", "--device", "meta", "--dtype", "bfloat16")
    result = cli(*asked, "-p", "0", "-n", "1", "-t", "1")
    assert (result.code, result.err) == (0, "")
    assert "| not run |" in " ".join(result.out.split())
    assert "lower bound" in result.out
    assert "needs" in result.out
    assert "peak" not in result.out
    assert "1.5 s" in result.out or "1.50 s" in result.out
    bare = cli(*asked, "-p", "0", "-n", "1", "-t", "1", "--no-ceilings")
    assert bare.code == 0
    assert "lower bound" not in bare.out


def test_without_weights_there_is_a_row_for_the_error_beside_the_shapes(
    cli: Cli, model: str
) -> None:
    asked = ("bench", "-m", model, "-p", "0", "-n", "1", "-t", "1", "--no-ceilings", "--json")
    result = cli(*asked, "--device", "cpu,meta")
    assert result.code == 0
    refused, counted = result.json()["rows"]
    assert refused["error_kind"] == "checkpoint"
    assert counted["flops"] == 2 * MATRICES + 32 * 4 * 32 * 128
