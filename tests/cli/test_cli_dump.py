"""`llmcli dump` as a shell sees it: the table, the document, files, exit codes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from cli_tiny import write_tiny
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

import llmcli.cli.files as files_module
from llmcli.cli.prompts import LOOKED_AT
from llmcli.loading.load import load
from llmcli.parts.attention import forward as attention

ALL = "embed,blocks.*,ln_final*,logits*,cache.*"


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump") / "m"
    return write_tiny(folder, weights=True, max_position_embeddings=256)


@pytest.fixture
def dump(cli, weighted):
    return lambda *argv: cli("dump", "-m", weighted, *argv)


def emitted(path, ids, dtype):
    seen = {}
    model = load(str(path), dtype=dtype)
    model.decoder(torch.tensor([ids]), tap=lambda name, one: seen.__setitem__(name, one[0]))
    return seen


def test_what_is_built_in_is_in_the_file_and_the_document(dump, tmp_path):
    document = dump("--no-stdin", "--json", "-o", tmp_path / "a.npz").json()
    names = [tensor["name"] for tensor in document["tensors"]]
    assert names == [one for one in np.load(tmp_path / "a.npz") if one != "metadata"]
    assert document["prompt"]["text"] == LOOKED_AT


def test_a_file_is_told_with_its_size(dump, tmp_path):
    result = dump("hello", "--name", "embed", "-o", tmp_path / "a.npz")
    assert result.err.startswith(f"note: wrote `{tmp_path / 'a.npz'}` (")
    assert result.err.endswith("): 1 tensor\n")


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
    for ending in ("npz", "safetensors"):
        name = ["--name", "blocks.*.resid_post,blocks.0.attn.pattern", "--dtype", "bfloat16"]
        assert dump("hello", *name, "-o", tmp_path / f"a.{ending}").code == 0
    one, other = np.load(tmp_path / "a.npz"), load_torch(tmp_path / "a.safetensors")
    assert set(one.files) == {*other, "metadata"}
    for name, array in other.items():
        assert np.array_equal(one[name], array.float().numpy())
    assert json.loads(str(one["metadata"]))["prompt"] == "hello"


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
    arrays, stored = load_file(path), load_file(weighted / "model.safetensors")
    assert set(arrays) == {"blocks.0.attn.W_k", "blocks.1.mlp.W_up"}
    there = stored["model.layers.0.self_attn.k_proj.weight"]
    ours = arrays["blocks.0.attn.W_k"]
    assert ours.shape == there.T.shape
    assert np.allclose(ours.astype(np.float32), there.T, rtol=1e-2)


def test_a_file_that_is_too_large_is_refused_before_it_is_begun(dump, tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "FILE_CAP", 1000)
    path = tmp_path / "a.npz"
    result = dump("hello", "--name", "logits", "-o", path)
    assert result.code == 2
    assert "--force" in result.err
    assert not list(tmp_path.iterdir())
    assert dump("hello", "--name", "logits", "-o", path, "--force").code == 0
    assert path.exists()


def test_a_file_has_about_the_size_that_was_said(dump, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "llmcli.commands.dump.command.check_size", lambda path, size, **_: said.append(size)
    )
    for ending in ("safetensors", "npz"):
        path = tmp_path / f"a.{ending}"
        dump("hello world", "--name", ALL, "-o", path, "--generate", "4")
        assert path.stat().st_size == pytest.approx(said.pop(), rel=0.1)


@pytest.fixture
def sick(tmp_path):
    """A model with a NaN in the middle."""
    folder = write_tiny(tmp_path / "sick", weights=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("generate", ["0", "2"])
def test_a_nan_exits_7_and_what_there_is_is_written(cli, sick, tmp_path, generate):
    path = tmp_path / "a.safetensors"
    argv = ["dump", "-m", sick, "hello", "--name", "blocks.*", "-o", path, "--generate", generate]
    result = cli(*argv, "--dtype", "float32")
    assert result.code == 7
    assert "error: `blocks.1.mlp.up[0,7]` is not a number" in result.err
    assert "✗ `blocks.1.mlp.up[0,7]` is not a number" in result.out
    arrays = load_file(path)
    assert np.isnan(arrays["blocks.1.mlp.up"][:, 7]).all()
    assert np.isfinite(arrays["blocks.1.ln2.out"]).all()
    assert "blocks.1.resid_post" in arrays
    document = cli(*argv, "--json").json()  # one document, and no other
    assert document["not_finite"] == "`blocks.1.mlp.up[0,7]` is not a number"
    assert document["ok"] is False
    assert "no NaN" not in result.out
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


def test_a_formula_that_does_not_hold_exits_1(dump, monkeypatch):
    import llmcli.nn.block as block

    def faulty(self, x, cache, step):
        step.emit(f"{self.name}.resid_pre", x)
        out = x * 1.01
        step.emit(f"{self.name}.attn_out", x)
        step.emit(f"{self.name}.resid_mid", out)
        return out

    monkeypatch.setattr(block.Block, "__call__", faulty)
    result = dump("hello", "--name", "blocks.*.resid_mid", "--dtype", "float32")
    assert result.code == 1
    assert "error: check failed: 2 tensors are what the formula makes" in result.err
    assert "✗ check failed: 2 tensors" in result.out
    assert "blocks.0.resid_mid[" in result.err
    assert dump("hello", "--name", "blocks.*.resid_mid", "--no-check").code == 0
    document = dump("hello", "--name", "blocks.*.resid_mid", "--json").json()
    assert document["checks"]["formulas"]["ok"] is False


@pytest.mark.parametrize("name", ["scores", "pattern"])
def test_a_kernel_with_another_scale_exits_1(name, dump, monkeypatch):
    argv = ("hello", "--name", f"blocks.*.attn.{name}", "--dtype", "float32")
    assert dump(*argv).code == 0
    attend = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda *qkv, scale, **mask: attend(*qkv, scale=2 * scale, **mask)
    )
    result = dump(*argv)
    assert result.code == 1
    assert "the pattern shown · values is the kernel's own z" in result.err
