"""`llmcli experts` through the command line."""

from __future__ import annotations

import csv
import io
import json

import pytest

from llmcli.cli.prompts import LOOKED_AT
from llmcli.commands.experts import command, measure
from llmcli.parts.experts import forward


@pytest.fixture
def experts(cli, mixture, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    return lambda *argv: cli("experts", "-m", mixture, "--random-weights", *argv)


def test_json(experts):
    said = experts("hello", "--json", "--generate", "2", "--dtype", "float64").json()
    assert said["prompt_tokens"] == 5
    assert said["positions"] == list(range(7))
    assert [layer["layer"] for layer in said["layers"]] == [1, 2]
    for layer in said["layers"]:
        assert (layer["experts"], layer["per_token"]) == (8, 3)
        assert sum(layer["load"]) == 21
        assert all(len(set(chosen)) == 3 for chosen in layer["chosen"])
        assert all(abs(sum(weights) - 1.5) < 1e-9 for weights in layer["weights"])
        assert min(layer["margins"]) == layer["smallest_margin"]
        assert 0 < layer["shared_share"] < 1
    assert list(said["checks"]) == ["choice", "weights", "sum", "loads", "cache"]
    assert said["ok"] is True


def test_without_a_prompt_there_is_one(experts):
    said = experts("--json").json()
    assert "".join(token["text"] for token in said["tokens"]) == LOOKED_AT


def test_a_long_prompt_is_read_in_chunks(experts, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("the cat sat on 12 mats. " * 60)
    said = experts("-f", str(text), "--json").json()
    assert len(said["tokens"]) > 1024
    assert said["checks"]["chunks"]["ok"]
    assert said["ok"] is True


def test_files(experts, tmp_path):
    said = experts("hello", "--json", "-o", str(tmp_path / "x.json"))
    document = said.json()
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == document
    size = f"{(tmp_path / 'x.json').stat().st_size / 1024:.3g} KiB"
    wrote = f"note: wrote `{tmp_path / 'x.json'}` ({size})"
    assert said.err == f"{wrote}: the choices at 5 positions\n"
    for ending, begins in (("png", b"\x89PNG"), ("html", b"<!doctype html>"), ("csv", b"layer,")):
        assert experts("hello", "-o", str(tmp_path / f"x.{ending}")).code == 0
        assert (tmp_path / f"x.{ending}").read_bytes().startswith(begins)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text())))
    chosen = [[int(row["expert"]) for row in rows if row["layer"] == "1"][at : at + 3]
              for at in range(0, 15, 3)]  # fmt: skip
    assert chosen == document["layers"][0]["chosen"]


def test_a_page_is_opened(experts, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr("llmcli.cli.files.launch", lambda path: opened.append(path) or 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert experts("hello", "--open").code == 0
    file = tmp_path / "x.png"
    assert experts("hello", "-o", str(file), "--open").code == 0
    assert opened[1:] == [str(file)]
    assert (tmp_path / opened[0]).read_bytes().startswith(b"<!doctype html>")
    monkeypatch.setattr("llmcli.cli.files.launch", lambda path: 1)
    failed = experts("hello", "-o", str(file), "--open")
    assert failed.code == 0
    assert "note: no image viewer could be started" in failed.err
    assert "✓ 5 checks" in failed.out


@pytest.mark.parametrize("ending", ["json", "csv", "html"])
def test_the_size_of_a_file_is_known_before(experts, tmp_path, monkeypatch, ending):
    sizes = []
    monkeypatch.setattr(command, "check_size", lambda file, size, **rest: sizes.append(size))
    path = tmp_path / f"x.{ending}"
    assert experts("some words, " * 70, "-o", str(path), "-q").code == 0
    assert path.stat().st_size == pytest.approx(sizes[0], rel=0.3)


def test_a_file_that_gets_too_large_is_refused(experts, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcli.cli.files.PAGE_CAP", 1000)
    monkeypatch.setattr(measure, "measure_experts", None)
    result = experts("hello", "-o", str(tmp_path / "x.html"))
    assert result.code == 2
    assert "choose fewer positions with `--position` or layers with `--layer`" in result.err


def test_a_check_that_does_not_hold_ends_with_1(experts, monkeypatch):
    weigh = forward.weigh
    monkeypatch.setattr(forward, "weigh", lambda *x: weigh(*x).flip(-1))
    result = experts("hello", "--dtype", "float32")
    assert result.code == 1
    assert "✗ check failed: scores and weights are what their formulas make" in result.out
    assert "worst at blocks.1.moe.expert_weight[" in " ".join(result.out.split())
    assert result.err.startswith("error: check failed: scores and weights are what")
