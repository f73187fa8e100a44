"""`llmcli experts` through the command line."""

from __future__ import annotations

import csv
import io
import json

import pytest

from llmcli.cli.prompts import LOOKED_AT


@pytest.fixture
def experts(cli, mixture, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    return lambda *argv: cli("experts", "-m", mixture, "--random-weights", *argv)


def test_json(experts, tmp_path):
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
    assert list(said["checks"]) == ["choice", "weights", "sum", "loads"]
    assert said["ok"] is True
    said = experts("--json").json()
    assert "".join(token["text"] for token in said["tokens"]) == LOOKED_AT
    text = tmp_path / "long.txt"  # is read in chunks
    text.write_text("the cat sat on 12 mats. " * 60)
    said = experts("-f", str(text), "--json").json()
    assert len(said["tokens"]) > 1024
    assert said["checks"]["chunks"]["ok"]
    assert said["ok"] is True


def test_files(experts, tmp_path):
    file = tmp_path / "x.json"
    said = experts("hello", "--json", "-o", str(file))
    document = said.json()
    assert json.loads(file.read_text("utf-8")) == document
    size = f"{file.stat().st_size / 1024:.3g} KiB"
    assert said.err == f"note: wrote `{file}` ({size}): the choices at 5 positions\n"
    for ending, begins in (("png", b"\x89PNG"), ("html", b"<!doctype html>"), ("csv", b"layer,")):
        assert experts("hello", "-o", str(tmp_path / f"x.{ending}")).code == 0
        assert (tmp_path / f"x.{ending}").read_bytes().startswith(begins)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text())))
    chosen = [[int(row["expert"]) for row in rows if row["layer"] == "1"][at : at + 3]
              for at in range(0, 15, 3)]  # fmt: skip
    assert chosen == document["layers"][0]["chosen"]
