"""`llmcli dump` as a shell sees it: the table, the document, files, exit codes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from llmcli.loading.load import load


@pytest.fixture
def dump(cli, weighted):
    return lambda *argv: cli("dump", "-m", weighted, *argv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_have_what_ran_and_the_tokens(dump, weighted, tmp_path, dtype):
    """The prompt's tokens and the new ones, the likeliest; the document says where it is."""
    names = "blocks.*,logits*,cache.*"
    argv = ["hello", "--name", names, "--dtype", dtype, "--generate", "3", "--json", "-o"]
    path = tmp_path / "a.safetensors"
    document = dump(*argv, path).json()
    assert document["file"] == {"path": str(path), "bytes": path.stat().st_size}
    ids = [token["id"] for token in document["tokens"]]
    assert document["prompt_tokens"] == len(document["prompt"]["ids"]) == 5
    assert 6 <= len(ids) <= 8
    arrays, seen = load_torch(path), {}
    load(str(weighted), dtype=dtype).decoder(
        torch.tensor([ids]), tap=lambda name, one: seen.__setitem__(name, one[0])
    )
    for name in seen.keys() & arrays.keys():
        assert torch.equal(arrays[name], seen[name]), name
        assert arrays[name].dtype == seen[name].dtype
    assert arrays["cache.1.k"].shape == (2, len(ids), 8)
    assert arrays["blocks.0.attn.pattern"].shape == (4, len(ids), len(ids))
    assert arrays["logits"][4:-1].argmax(-1).tolist() == ids[5:]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["schema"] == document["schema"] == "llmcli.dump/1"
    assert (metadata["prompt"], metadata["names"]) == ("hello", names)
    assert json.loads(metadata["ids"]) == ids
    assert json.loads(metadata["tokens"])[:5] == list("hello")
    dump(*argv, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as others:
        assert set(others.files) == {*arrays, "metadata"}
        assert json.loads(str(others["metadata"]))["prompt"] == "hello"
        for name, array in arrays.items():
            assert np.array_equal(others[name], array.float().numpy(), equal_nan=True)


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
