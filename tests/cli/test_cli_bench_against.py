"""`bench --against` as a user runs it: both engines' rows, the ratio, the order, the check."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tiny import write_tiny

Cli = Callable[..., Any]
SHORT = ("-p", "12", "-n", "3", "-r", "3", "-t", "1", "--no-ceilings", "--dtype", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("against") / "model", weights=True))


def test_both_engines_rows_and_the_ratio_of_runs_in_turns(cli: Cli, folder: str) -> None:
    import transformers

    result = cli("bench", "-m", folder, "--against", "transformers", *SHORT, "--json")
    assert (result.code, result.err) == (0, "")
    found = result.json()
    rows = [(row["engine"], row["n_prompt"], row["n_gen"]) for row in found["rows"]]
    assert rows == [
        ("llmcli", 12, 0), ("transformers", 12, 0), ("llmcli", 0, 3), ("transformers", 0, 3),
    ]  # fmt: skip
    ours, theirs = found["rows"][:2]
    assert theirs["engine_version"] == transformers.__version__
    for key in ("model_size", "model_n_params", "bits_per_weight", "type_k", "dtype", "flops"):
        assert ours[key] == theirs[key], key
    assert (ours["backends"], theirs["backends"]) == ("CPU", "CPU,transformers")
    assert (theirs["build_commit"], theirs["build_number"]) == (transformers.__version__, 0)
    assert ours["build_commit"] != theirs["build_commit"]
    for key in ("peak_memory_bytes", "base_bytes", "prefill_resident_bytes"):
        assert (ours[key], theirs[key]) == (None, None), key  # one process, two engines
    pair = found["against"][0]
    assert ours["against_ratio"] == pytest.approx(pair["median"], abs=1e-6)
    assert ours["against_ratios"] == pytest.approx(pair["ratios"], abs=1e-6)
    assert ours["against_order"] == pair["order"]
    assert (theirs["against_ratio"], theirs["against_ratios"]) == (None, [])
    assert pair["of_means"] == pytest.approx(ours["avg_ts"] / theirs["avg_ts"], rel=1e-6)
    low, high = pair["interval"]
    assert low < pair["median"] < high
    assert pair["undecided"] == (low <= 1 <= high)
    assert pair["lowest"] <= pair["quartiles"][0] <= pair["median"] <= pair["quartiles"][1]
    assert (pair["test"], pair["peer"], pair["number"]) == ("pp12", "transformers", 1)
    assert pair["order"] == [
        "llmcli", "transformers", "transformers", "llmcli", "llmcli", "transformers",
    ]  # fmt: skip
    by_hand = [b / a for a, b in zip(ours["samples_ns"], theirs["samples_ns"], strict=True)]
    assert pair["ratios"] == pytest.approx(by_hand)
    assert pair["lowest"] <= pair["median"] <= pair["highest"]
    check = found["checks"]["same_model"]
    assert check["ok"]
    assert 0 <= check["value"] <= check["tolerance"] == 1e-6


def test_on_the_screen_the_engines_are_named_with_their_bits(cli: Cli, folder: str) -> None:
    """And beside a format of rows the ratio is a note."""
    import transformers

    argv = ("bench", "-m", folder, "--against", "transformers", *SHORT)
    result = cli(*argv)
    assert (result.code, result.err) == (0, "")
    table = result.out.split("\n\n")[0].splitlines()
    assert len({len(line) for line in table}) == 1  # no name is wider than its column
    assert "| llmcli       |" in result.out
    assert "| transformers |" in result.out
    assert "llmcli ÷ transformers in tokens/s: the median of pairwise ratios" in result.out
    words = " ".join(result.out.split())
    same = "transformers predicts the same after 8 × 32 random tokens, KL in nats"
    assert f"transformers {transformers.__version__}: float32, 32 bits a weight" in words
    assert same in words
    result = cli(*argv, "-o", "jsonl")
    assert len(result.out.splitlines()) == 4
    reading, writing, last = result.err.splitlines()
    words = r"[\d.]+×, the median of 3 pairs \(95 % interval [\d.]+× … [\d.]+×\): \w+"
    assert re.fullmatch(rf"note: llmcli ÷ transformers, pp12: {words}", reading)
    assert re.fullmatch(rf"note: llmcli ÷ transformers, tg3: {words}", writing)
    assert f"{same}: " in last


def test_a_model_that_is_not_the_same_is_said(
    cli: Cli, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: transformers' weights are changed after it has loaded them."""
    from llmcli.commands.bench.measure.peers import transformers as peer

    good = peer.read_model

    @torch.no_grad()
    def bad(ours: Any) -> Any:
        model = good(ours)
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        return model

    monkeypatch.setattr(peer, "read_model", bad)
    argv = ("bench", "-m", folder, "--against", "transformers", *SHORT)
    result = cli(*argv)
    assert result.code == 0
    note = f"note: transformers does not compute what llmcli does with `{folder}`: KL "
    assert note in result.err
    assert "✗ check failed: " in result.out
    assert not cli(*argv, "--json").json()["checks"]["same_model"]["ok"]


def test_each_dtype_has_its_own_check(cli: Cli, tmp_path: Path) -> None:
    """Random weights are the same on both sides; without a comparison there is no check."""
    model = ("-m", str(write_tiny(tmp_path / "model")), "--random-weights", "--seed", "7")
    swept = [*SHORT[:-1], "float32,bfloat16", "--json"]
    found = cli("bench", *model, "--against", "transformers", *swept).json()
    assert {name: check["tolerance"] for name, check in found["checks"].items()} == {
        "same_model": 1e-6,
        "same_model_2": 0.03,
    }
    assert all(check["ok"] for check in found["checks"].values())
    assert len(found["rows"]) == 8
    found = cli("bench", *model, *swept).json()
    assert (found["checks"], found["against"]) == ({}, [])


def test_a_peer_that_cannot_run_the_model_leaves_our_rows(cli: Cli, folder: str) -> None:
    pytest.importorskip("llama_cpp")
    result = cli("bench", "-m", folder, "--against", "llama.cpp", *SHORT, "--json")
    assert result.code == 0
    rows = result.json()["rows"]
    assert [row["error_code"] for row in rows] == [None, 2, None, 2]
    assert "llama.cpp reads GGUF files" in rows[1]["error"]
    assert result.json()["against"] == []


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("transformers", "transformers", "transformers"),
     ("llama.cpp", "llama_cpp", "llama-cpp-python")],
)  # fmt: skip
def test_a_peer_that_is_not_installed_is_a_usage_error(
    cli: Cli, folder: str, monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(
        "llmcli.commands.bench.command.find_spec",
        lambda asked: None if asked == module else find(asked),
    )
    result = cli("bench", "-m", folder, "--against", name, *SHORT)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: `--against {name}` needs a package that is not ")
    assert f"`pip install {package}`" in result.err


@pytest.mark.real
def test_llama_cpp_beside_us_on_smollm2(cli: Cli, smollm2_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    result = cli("bench", "-m", str(smollm2_path), "--against", "llama.cpp", *SHORT, "--json")
    assert (result.code, result.err) == (0, "")
    found = result.json()
    assert [row["engine"] for row in found["rows"]] == ["llmcli", "llama.cpp"] * 2
    assert [row["error"] for row in found["rows"]] == [None] * 4
    assert found["rows"][1]["dtype"] == "Q4_1"
    assert found["rows"][1]["bits_per_weight"] == pytest.approx(5.74, abs=0.01)
    assert found["checks"]["same_model"]["ok"]
    assert all(pair["median"] > 0 for pair in found["against"])
