"""`llmcli dump`, `shapes` and `lens` as a shell sees them: documents, files, what is computed."""

import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as load_torch

import llmcli.commands.lens.measure
from llmcli.loading.load import load


@pytest.fixture
def dump(cli, weighted):
    return partial(cli, "dump", "-m", weighted)


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


def test_on_a_narrow_screen_only_what_fits_is_computed(cli, weighted, monkeypatch, tmp_path):
    """And for a file or a document all of it."""
    monkeypatch.setattr("sys.stdin", None)
    lens, asked = partial(cli, "lens", "-m", weighted), []
    plain = llmcli.commands.lens.measure.measure_lens

    def spied(*arguments, **options):
        report = plain(*arguments, **options)
        asked.append(report.positions)
        return report

    monkeypatch.setattr(llmcli.commands.lens.measure, "measure_lens", spied)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    file, text = tmp_path / "out.json", "a text that is longer than the screen"
    assert "positions 34 to 36 of 37 tokens" in lens(text, "--no-pager").out
    lens(text, "--json")
    lens(text, "-o", str(file))
    assert asked == [tuple(range(32, 37)), *[tuple(range(37))] * 2]
    assert len(json.loads(file.read_text())["positions"]) == 37
