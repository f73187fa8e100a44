"""`llmcli load` as a shell sees it: the table, verdicts, the document, exit codes."""

import hashlib

import numpy as np
import pytest
from cli_tiny import write_tiny
from hub_cache_files import write_revision
from safetensors.numpy import load_file, save_file

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry


def test_the_document_has_each_stage_with_what_it_took(cli, weighted):
    document = cli("load", "-m", weighted, "--dtype", "float32", "--json").json()
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
    numbers = load_file(f"{weighted}/model.safetensors")[first["source"]]
    assert first["numbers"]["min"] == pytest.approx(float(numbers.min()))
    assert first["numbers"]["std"] == pytest.approx(float(numbers.std()), rel=1e-5)


def test_a_file_of_bad_numbers_from_the_hub_is_removed_first(cli, tmp_path, monkeypatch):
    """What is said of one that lies anywhere else is in the transcript load-verdicts."""
    folder = write_tiny(tmp_path / "m", weights=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, folder / "model.safetensors")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    write_revision(tmp_path / "hub", "org/name", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    said = cli("load", "-m", "org/name@main", "--offline", "--check")
    assert said.code == 7
    assert "`llmcli models rm org/name@main` and load it again" in said.err


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
    assert "✓ `model.safetensors` is the catalog's `known`" in said.out
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
