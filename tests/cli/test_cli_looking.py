"""`llmcli attention`: files of matrices, what it proposes; `llmcli explain`: help, derivations."""

import base64
import json
import re
import shlex
from unittest.mock import Mock

import numpy as np
import pytest
from covers import in_turn
from safetensors.numpy import load_file
from zoo import variant

from llmcli.commands.explain import measure
from llmcli.decoder.decoder import Decoder
from llmcli.inspect.numbers import names
from llmcli.loading.load import load

TEXT = "abcabcab"


@pytest.fixture
def attention(cli, weighted):
    return lambda *argv: cli("attention", "-m", weighted, "--no-stdin", *argv)


def test_what_it_proposes_can_be_run(cli, weighted, attention, monkeypatch, tmp_path):
    """A long text is not repeated, a file is named again, a pipe stands before."""

    def hint(result):
        """The one command line that a page proposes."""
        (found,) = re.findall(r"^head \d+\.\d+.*?:\s+(.*llmcli attention .*)$", result.out, re.M)
        return found

    tokens = attention("--synthetic", "6", "--seed", "3", "--json").json()["tokens"]
    for argv in ((TEXT, "--generate", "2"), ("--synthetic", "6", "--seed", "3"), ("a 'b'",)):
        _, *words = shlex.split(hint(attention(*argv, "--dtype", "float64")))
        document = cli(*words, "--json").json()
        assert len(document["layers"]) == len(document["layers"][0]["heads"]) == 1
        assert document["dtype"] == "float64"
        if argv[0] == "--synthetic":
            assert document["tokens"] == tokens
        elif argv[0] == TEXT:
            assert (document["prompt_tokens"], len(document["tokens"])) == (8, 10)
    [repeated] = re.findall(r"try:\s+llmcli (attention .*)$", attention(TEXT).out, re.MULTILINE)
    assert len(cli(*shlex.split(repeated), "--json").json()["tokens"]) == 65
    long, file = "the cat sat on the mat because the cat was tired", tmp_path / "a.txt"
    file.write_text(long)
    assert hint(attention(long)).startswith("llmcli attention PROMPT --no-stdin -m")
    assert f"-f {file} " in hint(attention("-f", str(file)))
    with file.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert hint(cli("attention", "-m", weighted, "-")).startswith("… | llmcli attention - -m")


def test_the_help_names_every_metric(cli):
    from llmcli.records.attention import METRICS

    text = " ".join(cli("attention", "--help").out.split())
    assert f"Metrics: {', '.join(metric.name for metric in METRICS)}. " in text


@pytest.mark.parametrize(("what", "dtype"), in_turn(["pattern", "scores"], ["float32", "float64"]))
def test_every_file_has_the_matrices(attention, tmp_path, what, dtype):
    """Arrays in the model's own precision, documents in nine digits."""

    def matrices(*argv):
        """Every matrix of a run, `[layer][head][query, key]`."""
        document = attention(*argv, "--json", "--patterns").json()
        heads = ([one[document["what"]] for one in layer["heads"]] for layer in document["layers"])
        return [np.array(one, float) for one in heads]

    of = (TEXT, "--what", what, "--dtype", dtype)
    document = matrices(*of)
    files = {kind: tmp_path / f"a.{kind}" for kind in ("safetensors", "npz", "json")}
    for file in files.values():
        result = attention(*of, "-o", str(file))
        assert result.code == 0
        size = f"{file.stat().st_size / 1024:.3g} KiB"
        assert result.err.startswith(f"note: wrote `{file}` ({size}): ")
        if file.suffix == ".npz":
            assert result.err.endswith(f": blocks.0-1.attn.{what} [4 8 8] each, heads 0-3\n")
    arrays, npz = load_file(files["safetensors"]), np.load(files["npz"])
    names = [f"blocks.{layer}.attn.{what}" for layer in (0, 1)]
    assert sorted(arrays) == names
    for name, shown in zip(names, document, strict=True):
        assert (arrays[name].dtype, arrays[name].shape) == (np.dtype(dtype), (4, 8, 8))
        np.testing.assert_array_equal(arrays[name], npz[name])
        shown[np.isnan(shown)] = -np.inf  # a masked score is null
        np.testing.assert_allclose(arrays[name], shown, rtol=1e-6)
    about = json.loads(str(npz["metadata"]))
    assert json.loads(about["tokens"]) == list(TEXT)
    wide = arrays[names[1]]
    assert (wide != wide.astype(np.float32)).any() == (dtype == "float64")
    read = json.loads(files["json"].read_text())
    assert about["schema"] == read["schema"] == "llmcli.attention/1"
    cells = read["layers"][1]["heads"][0][what]
    np.testing.assert_array_equal(np.array(cells[-1], np.float32), wide[0, -1].astype(np.float32))
    assert len(str(cells[-1][0])) <= len("-0.123456789")
    if what == "scores":
        weights = np.exp(wide - wide.max(-1, keepdims=True))
        pattern = matrices(TEXT, "--dtype", dtype)[1]
        np.testing.assert_allclose(weights / weights.sum(-1, keepdims=True), pattern, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "window", "chunks", "values"),
    [
        ("gemma2", 19, False, "plain"), ("llama4", 19, True, "plain"),
        ("mamba2", None, False, "signed"),
    ],
)  # fmt: skip
def test_a_page_has_the_cells_that_are_seen(cli, tmp_path, name, window, chunks, values):
    (tmp_path / "config.json").write_text(json.dumps(variant(name).settings))
    ids, file = ",".join(map(str, range(5, 45))), tmp_path / "a.html"
    cli("attention", "-m", str(tmp_path), "--random-weights", "--ids", ids, "-o", str(file))
    of = {
        id: re.search(f'id="{id}">(.*?)</script>', file.read_text())[1]
        for id in ("data", "cells-0-0")
    }
    layer = json.loads(of["data"])["layers"][0]
    assert (layer["window"], layer["chunks"], layer["values"]) == (window, chunks, values)
    steps = np.frombuffer(base64.b64decode(of["cells-0-0"]), np.uint8)
    ends = np.cumsum([i % window + 1 if chunks else min(i + 1, window or 40) for i in range(40)])
    assert len(steps) == ends[-1]
    if values == "plain":  # every row sums to 1, but for the steps
        sums = [row.sum() for row in np.split((steps / 255) ** 2, ends[:-1])]
        np.testing.assert_allclose(sums, 1, atol=0.03)


@pytest.fixture
def explain(cli, weighted):
    return lambda number, *argv: cli("explain", number, "-m", weighted, *argv)


def test_a_parameter_needs_no_pass(explain, monkeypatch):
    monkeypatch.setattr(Decoder, "__call__", pytest.fail)
    for name in ("blocks.0.attn.W_q[2,5]", "blocks.1.ln1.w[3]", "embed.W[3,1]"):
        result = explain(name)
        assert (result.code, result.err) == (0, "")
        assert "n = " not in result.out


def test_help_lists_the_names(cli):
    text = cli("explain", "--help").out
    known = names(load("tiny").config, 3)
    listed = re.findall(r"^  ((?:[a-z]|blocks\.N)[\w.{},]*(?:  logits|  pos_embed)?)  ", text, re.M)
    told = {
        f"{before}{one}".replace("N", "0")
        for word in " ".join(listed).split()
        for before, _, inside in [word.removesuffix("}").partition("{")]
        for one in inside.split(",")
    }
    ours = {n for n, axes in known.items() if axes.kind == "activation"}
    first = {n for n in ours if not re.match(r"blocks\.[1-9]", n)} - {"logits_raw"}
    assert first <= told
    gated_and_rotated = {"q_norm", "k_norm", "q_rot", "k_rot", "gate", "up", "act"}
    assert {n.rpartition(".")[2] for n in told - first} == gated_and_rotated


def test_the_examples_of_the_help_work(cli, monkeypatch, tmp_path):
    text = cli("explain", "--help").out.partition("Examples:")[2]
    commands = [line.strip() for line in text.splitlines() if line.strip()]
    assert len(commands) == 5
    file = tmp_path / "stdin"
    for line in commands:
        file.write_text("And God said\n" if line.startswith("echo") else "")
        with file.open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            words = shlex.split(line.rpartition(" | ")[2])
            assert words.pop(0) == "llmcli"
            result = cli(*words, *(() if "-m" in words else ("-m", "tiny")))
        assert result.code == 0, (line, result.err)


def test_ctrl_c(explain, monkeypatch):
    monkeypatch.setattr(measure, "derive", Mock(side_effect=KeyboardInterrupt))
    result = explain("logits[0,0]", "hello")
    assert (result.code, result.out) == (130, "")


NUMBERS = [
    ("blocks.3.attn.pattern[2,7,4]", "A"), ("blocks.3.attn.scores[2,7,4]", "S"),
    ("blocks.3.ln1.out[7,5]", "T¹"), ("blocks.3.mlp.post[3,77]", "L"),
    ("logits[7,' was']", "logits"),
]


def derived(cli, number, letter, *of):
    """How far a number that is derived down to the weights, each step right, is from the kernel's.
    """
    document = cli("explain", number, *of, "--depth", "all", "--json").json()
    assert document["ok"] is True
    assert document["steps"][0]["symbol"].startswith(f"{letter}[")
    assert all(one["ok"] for one in (*document["steps"], *document["checks"]))
    assert {"embed", "pos_embed"} & {step["name"] for step in document["steps"]}
    return document["difference"] / max(1, abs(document["value"]))


@pytest.mark.parametrize(
    ("number", "letter", "dtype"),
    in_turn([pytest.param(*one) for one in NUMBERS], ["float32", "float64"]),
)
def test_the_trained_model_that_ships(number, letter, dtype, cli):
    text = "And God said, Let there be light: and there"
    rounding = {"float32": 1e-5, "float64": 1e-13}[dtype]
    assert derived(cli, number, letter, text, "-m", "tiny", "--dtype", dtype) < rounding


@pytest.mark.real
@pytest.mark.parametrize(("number", "letter"), [
    ("blocks.3.attn.pattern[2,-1,0]", "A"), ("blocks.3.mlp.post[-1,77]", "L"),
    ("logits[-1,' the']", "logits"),
])  # fmt: skip
def test_the_real_model(number, letter, cli, smollm2_path):
    """As in the help: without a text, and `' the'` is a token. Scores and norms are steps."""
    assert derived(cli, number, letter, "-m", str(smollm2_path)) < 1e-4
