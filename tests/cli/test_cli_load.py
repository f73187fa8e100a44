"""`llmcli load` as a shell sees it: the table, verdicts, the document, exit codes."""

from __future__ import annotations

import hashlib
import os
import sys

import children
import pytest
from cli_tiny import write_tiny
from safetensors.numpy import load_file

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.cli.options import ModelOptions
from llmcli.commands.load.command import _refetch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("load") / "m", weights=True)


def test_the_document_has_each_stage_with_what_it_took(cli, folder):
    document = cli("load", "-m", folder, "--dtype", "float32", "--json").json()
    stages = {stage["name"]: stage for stage in document["stages"]}
    assert list(stages) == [
        "find", "headers", "import", "plan", "tokenizer", "build", "read", "convert", "scan",
    ]  # fmt: skip
    size = document["bytes"]["tensors"]
    assert stages["read"]["bytes"] == stages["convert"]["bytes"] == size
    assert stages["read"]["bytes_per_s"] == pytest.approx(size / stages["read"]["seconds"])
    assert sum(line["bytes"] for line in document["ledger"]) == size
    assert document["model"]["weight_bytes"] == document["bytes"]["weights"] == size
    assert document["ok"]
    first = document["ledger"][0]
    numbers = load_file(folder / "model.safetensors")[first["source"]]
    assert first["numbers"]["min"] == pytest.approx(float(numbers.min()))
    assert first["numbers"]["std"] == pytest.approx(float(numbers.std()), rel=1e-5)


def test_in_ascii_marks_are_words(folder):
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = children.run(
        [sys.executable, "-m", "llmcli", "load", "-m", str(folder), "--check"],
        capture_output=True, env=environment, check=True,
    )  # fmt: skip
    assert b"no infinity in" in result.stdout
    assert result.stdout.isascii()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./m", "fetch it again, or another one"),
        (None, "fetch it again, or another one"),
        ("org/name@main", "`llmcli models rm org/name@main` and load it again"),
    ],
)
def test_what_to_do_with_a_file_of_bad_numbers_is_said_by_where_it_came_from(name, words):
    assert words in _refetch(ModelOptions(model=name))


def test_a_file_whose_digest_is_known_is_compared_with_it(cli, tmp_path):
    """The hub's cache names what is behind a link by its sha256."""
    folder = write_tiny(tmp_path / "m", weights=True)
    assert "no sha256 is known for these files" in cli("load", "-m", str(folder), "--check").out
    weights = folder / "model.safetensors"
    blob = folder / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    said = cli("load", "-m", str(folder), "--check")
    assert said.code == 0
    assert "the sha256 of 1 file is the published one" in said.out
    assert "✓ whole: 20 tensors" in said.out
    assert "whole:" not in cli("load", "-m", str(folder)).out, "no digest is computed there"
    data = bytearray(blob.read_bytes())
    data[-3] ^= 1
    blob.write_bytes(data)
    said = cli("load", "-m", str(folder), "--check")
    assert said.code == 4
    assert "check failed: the sha256 of 1 file" in said.err


def test_a_file_of_the_catalog_is_known_wherever_it_lies(cli, tmp_path, monkeypatch):
    file = write_tiny(tmp_path / "m", weights=True) / "model.safetensors"
    data = bytearray(file.read_bytes())
    entry = CatalogEntry(
        name="known", summary="", size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    monkeypatch.setitem(CATALOG, "known", entry)
    said = cli("load", "-m", tmp_path / "m", "--check")
    assert said.code == 0
    assert "✓ `model.safetensors` is the catalog's `known` · exactly" in said.out
    assert "✓ whole: 20 tensors" in said.out
    assert cli("load", "-m", tmp_path / "m", "--check", "--json").json()["confirmed"] == 1
    data[-3] ^= 1  # it may be another model of that size, such as a fine-tuned one
    file.write_bytes(data)
    said = cli("load", "-m", tmp_path / "m", "--check")
    assert said.code == 0
    differs = "has the size of the catalog's `known` and differs from it"
    assert f"! `model.safetensors` {differs}" in said.out
    assert "✓ readable: 20 tensors" in said.out
    assert cli("load", "-m", tmp_path / "m", "--check", "--json").json()["confirmed"] == 0
