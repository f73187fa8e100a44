"""`llmcli attention`: matrices on the screen and in files, what it proposes, what it refuses."""

import json
import re
import shlex

import numpy as np
import pytest
from covers import in_turn
from safetensors.numpy import load_file

TEXT = "abcabcab"


@pytest.fixture
def attention(cli, weighted):
    return lambda *argv: cli("attention", "-m", weighted, "--no-stdin", *argv)


@pytest.fixture
def matrices(attention):
    """Every matrix of a run, `[layer][head][query, key]`."""

    def read(*argv):
        document = attention(*argv, "--json", "--patterns").json()
        what = document["what"]
        return [
            np.array([head[what] for head in layer["heads"]], float) for layer in document["layers"]
        ]

    return read


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


@pytest.mark.parametrize(
    ("what", "dtype"), in_turn(["pattern", "scores"], ["float32", "float64"])
)
def test_every_file_has_the_matrices(attention, matrices, tmp_path, what, dtype):
    """Arrays in the model's own precision, documents in nine digits."""
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
