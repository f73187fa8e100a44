"""`llmcli load` as a shell sees it: the table, verdicts, the document, exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import children
import numpy as np
import pytest
from cli_tiny import write_tiny
from safetensors.numpy import load_file, save_file

from llmcli.checkpoints.catalog import CATALOG, CatalogEntry
from llmcli.cli.options import ModelOptions
from llmcli.commands.load.command import _refetch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("load") / "m", weights=True)


@pytest.fixture
def changed(folder, tmp_path):
    """A copy with other tensors: `changed(lambda tensors: …)`."""

    def copy(change):
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return copy


def spoiled(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = np.nan


def test_layers_are_folded_and_all_of_them_are_shown_when_asked(cli, folder):
    result = cli("load", "-m", folder)
    assert (result.code, result.err) == (0, "")
    assert "blocks.{0-1}.mlp.W_up" in result.out
    assert "F32 [48 32] × 2" in result.out
    assert "head.W is embed.W" in result.out
    verdict = "✓ readable: 20 tensors, all numbers finite, 7 checks"
    assert result.out.splitlines()[1] == f"{verdict} · --checks · --all"
    assert result.out.count("✓") == 1
    checked = cli("load", "-m", folder, "--checks").out
    assert checked.splitlines()[-1] == verdict
    assert checked.count("✓") == 8
    assert "✓ no NaN and no infinity in " in checked
    every = cli("load", "-m", folder, "--all").out
    assert "blocks.0.mlp.W_up" in every
    assert "blocks.1.mlp.W_up" in every
    some = cli("load", "-m", folder, "--filter", "*.1.mlp.up_proj*").out
    assert "blocks.1.mlp.W_up" in some
    assert "blocks.0.mlp.W_up" not in some
    assert len(some.splitlines()) == 5, "a title, two of the table, a line, the last verdict"


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


def test_the_answer_fits_a_screen(cli, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    brief, full = cli("load", "-m", folder).out, cli("load", "-m", folder, "--all").out
    assert len(brief.splitlines()) < 24
    for words in ("mean", "look at the numbers  ", "blocks.1."):
        assert words not in brief
        assert words in full


def test_verdicts_alone(cli, folder):
    result = cli("load", "-m", folder, "--check")
    assert (result.code, result.err) == (0, "")
    marks = [line[0] for line in result.out.splitlines()[2:]]
    assert set(marks) == {"✓", "!"}  # no digest is known
    assert "blocks" not in result.out
    assert cli("load", "-m", folder, "--check", "--json").json()["dtype"] is None


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_not_a_number_exits_7_after_the_view(cli, changed, flags):
    path = changed(spoiled)
    result = cli("load", "-m", path, *flags)
    assert result.code == 7
    name = "model.layers.1.mlp.up_proj.weight[3,7]" if flags else "blocks.1.mlp.W_up[7,3]"
    at = -1 if flags else 1
    assert result.out.rstrip().splitlines()[at] == f"✗ `{name}` is not a number"
    if not flags:  # the layer is not folded with the others
        assert "1 NaN at [7,3]" in result.out
        assert "blocks.0.mlp.W_up" in result.out
    assert f"error: `{name}` is not a number" in result.err
    assert "hint: the file has such numbers" in result.err
    document = cli("load", "-m", path, *flags, "--json")
    assert document.code == 7
    assert not document.json()["ok"]
    assert document.json()["not_finite"] == f"`{name}` is not a number"


def test_too_large_for_half_precision_has_a_hint_of_its_own(cli, changed):
    path = changed(lambda tensors: tensors["model.norm.weight"].fill(1e6))
    assert cli("load", "-m", path, "--check").code == 0
    result = cli("load", "-m", path, "--dtype", "float16")
    assert result.code == 7
    assert "try `--dtype float32`" in result.err
    assert "32 +∞" in result.out


def test_what_does_not_fit_exits_4(cli, changed):
    path = changed(lambda tensors: tensors.pop("model.norm.weight"))
    plain = cli("load", "-m", path)
    assert (plain.code, plain.out) == (4, "")
    assert "no tensor for `ln_final.w`" in plain.err
    assert f"`llmcli load -m {path} --check` looks at what is here" in plain.err
    result = cli("load", "-m", path, "--check")
    assert result.code == 4
    assert "✗ the checkpoint does not fit its own configuration" in result.out
    assert "✓ no NaN and no infinity" in result.out
    assert "error: the checkpoint does not fit" in result.err
    assert "readable:" not in result.out


def test_a_wrong_claim_exits_4_before_what_is_not_finite(cli, changed):
    def short(tensors):
        spoiled(tensors)
        rows = "model.embed_tokens.weight"
        tensors[rows] = tensors[rows][:260].copy()

    path = changed(short)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 260}))
    said = "the tokenizer's tokens"
    for flags in ([], ["--check"]):
        result = cli("load", "-m", path, *flags)
        assert result.code == 4, result.err
        assert f"✗ {said}: 261, but it is 260 rows of the embedding" in result.out
        assert "is not a number" in result.out
        assert result.err.startswith(f"error: {said} says 261, but it is 260 rows")


def test_a_wrong_label_is_told_and_no_more(cli, changed):
    path = changed(lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    result = cli("load", "-m", path, "--check")
    assert (result.code, result.err) == (0, "")
    assert "! the dtype in config.json: float16, but it is F32" in result.out


def test_a_lone_file_is_looked_through_and_not_loaded(cli, changed, tmp_path_factory):
    lone = tmp_path_factory.mktemp("lone") / "x.safetensors"
    lone.write_bytes((changed(lambda tensors: None) / "model.safetensors").read_bytes())
    result = cli("load", "-m", lone, "--check")
    assert result.code == 0
    assert "there is no config.json" in result.out
    refused = cli("load", "-m", lone)
    assert refused.code == 4
    assert "look at the tensors alone with --check" in refused.err
    lone.write_bytes((changed(spoiled) / "model.safetensors").read_bytes())
    assert cli("load", "-m", lone, "--check").code == 7
    lone.write_bytes(lone.read_bytes()[:-1])
    cut = cli("load", "-m", lone, "--check")
    assert (cut.code, cut.out) == (4, "")
    assert "is truncated" in cut.err


def test_names_of_a_stranger_cannot_reach_the_terminal(cli, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a\x1b[31m\nb": np.full((2, 2), np.inf, np.float32)}, path)
    result = cli("load", "-m", path, "--check")
    assert result.code == 7
    assert "\x1b" not in result.out + result.err
    assert "`a\\x1b[31m\\nb[0,0]` is infinite" in result.out


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


def test_an_architecture_that_is_not_supported_is_no_fault_of_the_file(cli, tmp_path):
    path = write_tiny(tmp_path / "m", weights=True, model_type="dbrx")
    for flags in ([], ["--check"]):
        result = cli("load", "-m", path, *flags)
        assert result.code == 4
        assert result.err == (
            "error: `dbrx` is not supported: "
            "it needs `a translation of its settings and tensor names`\n"
            "hint: `llmcli info --families` lists what can be run\n"
        )


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


def test_the_model_that_ships_with_llmcli_is_whole(cli):
    said = cli("load", "-m", "tiny", "--check").out
    assert "✓ `model.safetensors` is the catalog's `tiny` · exactly" in said
    assert "✓ whole: " in said


def test_numbers_that_no_tensor_has_exit_1_and_are_named(cli, changed):
    name = "model.embed_tokens.weight"
    path = changed(lambda tensors: tensors[name].__setitem__((10, 7), 1e20))
    said = cli("load", "-m", path, "--check")
    assert said.code == 1
    assert "✗ check failed: no block of numbers is unlike all others of its tensor" in said.out
    assert f"worst at `{name}[10,0]`" in said.out
    assert "readable:" not in said.out
    assert said.err == (
        f"error: the numbers from `{name}[10,0]` on are unlike all others of that tensor: the file "
        "is damaged\nhint: fetch it again, or another one\n"
    )
    document = cli("load", "-m", path, "--check", "--json")
    assert document.code == 1
    assert not document.json()["ok"]
    assert document.json()["checks"]["outliers"]["where"] == f"`{name}[10,0]`"
