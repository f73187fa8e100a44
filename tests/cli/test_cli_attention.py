"""`llmcli attention`: matrices on the screen and in files, what it proposes, what it refuses."""

import json
import re
import shlex

import numpy as np
import pytest
from cli_tiny import write_tiny
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


def test_an_end_before_the_span_is_told(cli, attention, tmp_path):
    tokens = attention(TEXT, "--generate", "6", "--json").json()["tokens"]
    written = [token["id"] for token in tokens]
    at = next(at for at in range(9, 14) if written[at] not in written[8:at])
    ending = write_tiny(  # the same model, but for what ends its text
        tmp_path / "m", weights=True, max_position_embeddings=256, eos_token_id=written[at]
    )
    argv = ("attention", "-m", str(ending), TEXT, "--generate", "6")
    total = len(cli(*argv, "--json").json()["tokens"])
    assert total < 14
    head = ("--layer", "0", "--head", "0", "--query")
    files = [("-o", str(tmp_path / f"a.{kind}")) for kind in ("png", "html", "npz")]
    for more in (*((*head, "13:", *file) for file in files), ("--top-pairs", "3", "--key", "13:")):
        result = cli(*argv, *more)
        assert result.code == 2
        assert f"the model ended its text after {total - 8} of 6 tokens" in result.err
        assert f"positions go from 0 to {total - 1}" in result.err
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
    assert f"queries {total - 1} down" in cli(*argv, *head, f"{total - 1}:").out


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_short_text_works(attention, count):
    for argv in ((), ("--layer", "0", "--head", "0"), ("--top-pairs", "3"), ("--metrics", "all")):
        result = attention("abc"[:count], *argv)
        assert (result.code, result.err) == (0, "")


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


def test_a_rank_of_a_long_text_is_left_out_of_a_table_and_refused_as_a_map(cli, tmp_path):
    model = write_tiny(tmp_path / "m", max_position_embeddings=2048)
    ids = ",".join(str(at * at % 250) for at in range(1026))
    long = ("attention", "-m", str(model), "--random-weights", "--ids", ids)
    result = cli(*long, "--map", "effective_rank")
    assert result.code == 2
    assert "up to 1024 tokens, and there are 1026" in result.err
    result = cli(*long, "--metrics", "effective_rank,sink")
    assert result.code == 0
    assert "effective_rank was left out: it needs whole matrices" in result.out
    assert "sink: mean over" in result.out
