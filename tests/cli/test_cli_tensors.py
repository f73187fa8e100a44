"""`dump`, `shapes`, `lens`, `load`, `info` and `score`: documents, files, and what is computed."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from cli_tiny import write_tiny
from needs import needs_kernels
from programs import pipe
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

import llmcli.commands.lens.measure
import llmcli.commands.score.measure
from llmcli.checkpoints import open_checkpoint
from llmcli.families import translate
from llmcli.graph.cost import total_cost
from llmcli.graph.precision import Precision
from llmcli.graph.spec import Call
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
    with pipe(path) as reading:
        document = dump("hello", "--name", "logits", "-o", path, "--json").json()
        data = os.read(reading, 1 << 16)
    assert document["file"] == {"path": str(path), "bytes": len(data)}
    assert len(data) > 1000


def test_the_document_has_every_tensor(cli, tmp_path):
    folder = write_tiny(tmp_path / "m", weights=True)
    shapes = partial(cli, "shapes", "-m", folder, "--json", "--dtype", "float32", "--tokens", "5")
    document = shapes().json()
    tensors = document["tensors"]
    own = [tensor for tensor in tensors if tensor["kind"] == "parameter"]
    assert shapes("--params").json()["tensors"] == own
    assert shapes("--activations").json()["tensors"] == [one for one in tensors if one not in own]
    for tensor in tensors:
        assert len(tensor["axes"]) == len(tensor["shape"]) == len(tensor["documents"])
        assert tensor["bytes"] == 4 * np.prod(tensor["shape"])
    assert {tensor["phase"] for tensor in own} == {None}
    assert document["model"]["parameters"] == sum(np.prod(tensor["shape"]) for tensor in own)
    assert set(Counter((tensor["name"], tensor["phase"]) for tensor in tensors).values()) == {1}
    config, _ = translate(open_checkpoint(folder))
    for call, (tokens, past) in zip(document["flops"], [(5, 0), (1, 5)], strict=True):
        ran = [tensor for tensor in tensors if tensor["phase"] == call["phase"]]
        shape = Call(batch=1, tokens=tokens, past=past, phase=call["phase"])
        work = total_cost(config, shape, precision=Precision.of("float32"), logits="all")
        for name in ("flops", "flops_full"):
            assert call[name] == sum(tensor[name] for tensor in ran) == vars(work)[name] > 0
    # 2 layers × keys and values × 2 heads of 8 × 4 bytes
    assert document["cache"]["per_token"] == 2 * 2 * 2 * 8 * 4


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


def test_a_document_of_loading_has_each_stage_with_what_it_took(cli, weighted):
    document = cli("load", "-m", weighted, "--dtype", "float32", "--json").json()
    assert "torch linear" in document["environment"]["kernels"]
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


@needs_kernels
def test_what_would_fit_of_a_model_that_does_not(cli, tmp_path):
    """On a device that is not here; each as the options themselves say it."""
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
             "max_position_embeddings": 131072}  # fmt: skip
    write_tiny(tmp_path / "m", **large)

    def asked(*more):
        return cli("info", "-m", str(tmp_path / "m"), "--device", "cpu", "--json", *more).json()

    assert asked("--memory", "999GiB")["would_fit"] == []
    (memory,) = asked("--memory", "999GiB", "--batch", "2")["memory"]
    parts = ("weights_bytes", "cache_bytes", "runtime_bytes_estimate")
    most = max(memory["cache_copies_bytes"], memory["prompt_bytes_estimate"])
    assert memory["needed_bytes"] == sum(memory[part] for part in parts) + most
    document = asked("--memory", "12 GB")
    (device,) = document["memory"]
    assert (device["fits"], device["free_bytes"]) == (False, 12 << 30)
    offers = document["would_fit"]
    assert [offer["options"].split(" -c ")[0] for offer in offers] == [
        "--quantize int8", "--quantize int4",
    ][-len(offers):]  # fmt: skip
    assert offers
    for offer in offers:
        again = asked("--memory", "12G", *offer["options"].split())
        (device,) = again["memory"]
        assert (device["fits"], again["would_fit"]) == (True, [])
        assert (device["context"], device["needed_bytes"]) == (
            offer["context"], offer["needed_bytes"],
        )  # fmt: skip
    shown = cli("info", "-m", str(tmp_path / "m"), "--memory", "12GiB", "--device", "cpu").out
    assert "would fit: --quantize int" in shown


@pytest.mark.parametrize("text", [
    "🙂 日本語 né<|end|>", "🙂 日本語 ne\u0301<|end|>", "ne\u0301\u0323 \u1112\u1161\u11ab日",
    "a🙂  <|begin|> \n b日\u0301",
])
def test_each_byte_of_the_text_is_scored_once(cli, tmp_path, text):
    """Byte-level tokens share the characters that a normalizer or a special token touches."""
    folder = write_tiny(tmp_path / "m", weights=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    tokenizer["added_tokens"][4] |= {"lstrip": True, "rstrip": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").unlink()
    body = cli("score", "-m", str(folder), text, "--json").json()
    counted = len(text.encode()) - 1  # the first token, which nothing predicts, is one byte
    assert body["bytes_scored"] == counted
    nats = -sum(token["logprob"] for token in body["tokens"][1:])
    assert body["bits_per_byte"] == pytest.approx(nats / math.log(2) / counted)
    both = cli("diff", str(folder), str(folder), text, "--json").json()
    for side in (both["score_a"], both["score_b"]):
        assert side["bits_per_byte"] == pytest.approx(body["bits_per_byte"])
    spelled = cli("score", "-m", str(folder), "--ids", "70,71,72", "--json").json()
    assert spelled["bytes_scored"] == 2


@pytest.mark.measured
@pytest.mark.parametrize("argv", [(), ("--json",)])
def test_a_long_text_needs_little_memory(cli, weighted, tmp_path, monkeypatch, argv):
    """A token is 250 bytes, of which JSON and the view make no second copy."""

    def predicted(readers, ids, window, stride):
        for at in range(1, len(ids)):
            yield at, [torch.zeros(1, 300)]

    def found(logprobs, ids, position, dtype):
        return [-0.5 - position / 7], [1000 + position]

    plain = llmcli.commands.score.measure.measure_score

    def counted(*given, **options):
        score = plain(*given, **options)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.reset_peak()
        return score

    held, count = [], 50_000
    monkeypatch.setattr("llmcli.commands.score.measure.predictions", predicted)
    monkeypatch.setattr("llmcli.commands.score.measure.chosen", found)
    monkeypatch.setattr("llmcli.commands.score.measure.measure_score", counted)
    monkeypatch.setattr("llmcli.shell.streams.write", lambda text, flush=True: None)
    (tmp_path / "long.txt").write_text("ab cd" * (count // 5))
    base = ("score", "-m", weighted, *argv)
    assert cli(*base, "warm").code == 0
    tracemalloc.start()
    try:
        assert cli(*base, "-f", str(tmp_path / "long.txt")).code == 0
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held[1] < 310 * count
    assert most - held[1] < 50 * count
