"""`llmcli dump` as a shell sees it: the table, the document, files, exit codes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from cli_tiny import write_tiny
from json_schemas import errors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from llmcli.loading.load import load
from llmcli.shell.prompts import LOOKED_AT

ALL = "embed,blocks.*,ln_final*,logits*,cache.*"


@pytest.fixture
def dump(cli, weighted):
    return lambda *argv: cli("dump", "-m", weighted, *argv)


def emitted(path, ids, dtype):
    seen = {}
    model = load(str(path), dtype=dtype)
    model.decoder(torch.tensor([ids]), tap=lambda name, one: seen.__setitem__(name, one[0]))
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_safetensors_file_is_bit_for_bit_what_ran(dump, weighted, tmp_path, dtype):
    path = tmp_path / "all.safetensors"
    result = dump("hello", "--name", ALL, "-o", path, "--dtype", dtype, "--json")
    assert result.code == 0
    document = result.json()
    arrays, seen = load_torch(path), emitted(weighted, document["prompt"]["ids"], dtype)
    assert set(seen) < set(arrays)
    for name, array in seen.items():
        assert torch.equal(arrays[name], array), name
        assert arrays[name].dtype == array.dtype
    assert document["file"] == {"path": str(path), "bytes": path.stat().st_size}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["schema"] == document["schema"] == "llmcli.dump/1"
    assert metadata["prompt"] == "hello"
    assert json.loads(metadata["ids"]) == document["prompt"]["ids"]
    assert json.loads(metadata["tokens"]) == list("hello")
    assert metadata["names"] == ALL


def test_npz_and_safetensors_have_the_same(dump, tmp_path):
    name = ["--name", "blocks.*.resid_post,blocks.0.attn.pattern", "--dtype", "bfloat16"]
    for ending in ("npz", "safetensors"):
        result = dump("hello", *name, "-o", tmp_path / f"a.{ending}")
        assert result.code == 0
        assert result.err.startswith(f"note: wrote `{tmp_path / f'a.{ending}'}` (")
        assert result.err.endswith("): 3 tensors\n")
    one, other = np.load(tmp_path / "a.npz"), load_torch(tmp_path / "a.safetensors")
    assert set(one.files) == {*other, "metadata"}
    for name, array in other.items():
        assert np.array_equal(one[name], array.float().numpy())
    assert json.loads(str(one["metadata"]))["prompt"] == "hello"
    document = dump("--no-stdin", "--json", "-o", tmp_path / "a.npz").json()
    names = [tensor["name"] for tensor in document["tensors"]]
    assert names == [one for one in np.load(tmp_path / "a.npz") if one != "metadata"]
    assert document["prompt"]["text"] == LOOKED_AT


def test_generated_tokens_are_dumped_too(dump, tmp_path):
    path = tmp_path / "a.safetensors"
    names = "cache.*,blocks.0.attn.pattern,logits"
    document = dump("hello", "--name", names, "--generate", "3", "-o", path, "--json").json()
    new = len(document["tokens"]) - document["prompt_tokens"]
    assert document["prompt_tokens"] == 5
    assert 1 <= new <= 3
    arrays = load_torch(path)
    assert arrays["cache.1.k"].shape == (2, 5 + new, 8)
    assert arrays["blocks.0.attn.pattern"].shape == (4, 5 + new, 5 + new)
    logits = arrays["logits"]
    assert len(logits) == 5 + new
    written = [token["id"] for token in document["tokens"][5:]]
    assert logits[4:-1].argmax(-1).tolist() == written, "greedy"
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["ids"])[5:] == written


def test_a_parameter_needs_no_prompt(dump, weighted, tmp_path):
    path = tmp_path / "w.safetensors"
    names = "blocks.0.attn.W_k,model.layers.1.mlp.up_proj.weight"
    result = dump("--name", names, "-o", path, "--dtype", "float32")
    assert result.code == 0
    arrays, stored = load_file(path), load_file(f"{weighted}/model.safetensors")
    assert set(arrays) == {"blocks.0.attn.W_k", "blocks.1.mlp.W_up"}
    there = stored["model.layers.0.self_attn.k_proj.weight"]
    ours = arrays["blocks.0.attn.W_k"]
    assert ours.shape == there.T.shape
    assert np.allclose(ours.astype(np.float32), there.T, rtol=1e-2)


@pytest.mark.parametrize("generate", ["0", "2"])
def test_a_nan_exits_7_and_what_there_is_is_written(cli, tmp_path, generate):
    sick, path = write_tiny(tmp_path / "sick", weights=True), tmp_path / "a.safetensors"
    tensors = load_file(sick / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = np.nan
    save_file(tensors, sick / "model.safetensors")
    argv = ["dump", "-m", sick, "hello", "--name", "blocks.*", "-o", path, "--generate", generate]
    result = cli(*argv, "--dtype", "float32")
    assert result.code == 7
    assert "error: `blocks.1.mlp.up[0,7]` is not a number" in result.err
    assert "✗ `blocks.1.mlp.up[0,7]` is not a number" in result.out
    assert "no NaN" not in result.out
    arrays = load_file(path)
    assert np.isnan(arrays["blocks.1.mlp.up"][:, 7]).all()
    assert np.isfinite(arrays["blocks.1.ln2.out"]).all()
    assert "blocks.1.resid_post" in arrays
    document = cli(*argv, "--json").json()  # one document, and no other
    assert errors(document, "dump") == []
    assert document["not_finite"] == "`blocks.1.mlp.up[0,7]` is not a number"
    assert document["ok"] is False
    bad = next(one for one in document["tensors"] if one["nan"])
    assert (bad["name"], bad["first_bad"]) == ("blocks.1.mlp.up", [0, 7])


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_a_pipe_is_told_its_size_too(dump, tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    document = dump("hello", "--name", "logits", "-o", path, "--json").json()
    data = os.read(reading, 1 << 16)
    os.close(reading)
    assert document["file"] == {"path": str(path), "bytes": len(data)}
    assert len(data) > 1000
