"""JSON of anything, colour by the rules, settings with their sources, scores of a small model."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cli_tiny import write_tiny

from llmcli.cli.options import OutputOptions
from llmcli.cli.output import Output, Screen, dumps, json_pieces, jsonable
from llmcli.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "colour", "animate"),
    [
        (Terminal(), {}, True, True),
        (io.StringIO(), {}, False, False),
        (None, {"FORCE_COLOR": "1"}, True, False),
        (Terminal(), {"NO_COLOR": "1"}, False, True),
        (Terminal(), {"NO_COLOR": ""}, True, True),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, True),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True, False),
        (io.StringIO(), {"FORCE_COLOR": "0"}, False, False),
        (io.StringIO(), {"FORCE_COLOR": ""}, False, False),
        (Terminal(), {"TERM": "dumb"}, False, False),
        (Terminal(), {"TERM": "dumb", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_colour_and_animation(stream, environ, colour, animate):
    screen = Screen.of(stream, environ)
    assert (screen.colour, screen.animate) == (colour, animate)


@dataclass
class Point:
    x: float
    where: Path


def test_everything_becomes_json():
    value = {
        "nan": math.nan, "inf": -math.inf, "tuple": (1, True, None), 3: np.float32(0.5),
        "array": np.array([[1.0, np.nan]]), "point": Point(2.5, Path("a/b")), "int": np.int64(7),
    }  # fmt: skip
    assert json.loads(dumps(value)) == {
        "nan": None, "inf": None, "tuple": [1, True, None], "3": 0.5,
        "array": [[1.0, None]], "point": {"x": 2.5, "where": "a/b"}, "int": 7,
    }  # fmt: skip
    assert jsonable(Point(math.nan, Path("x"))) == {"x": None, "where": "x"}


def test_json_is_ascii():
    """No terminal that shows it, and no encoding of a pipe, can change what it says."""
    value = {"ü🎉": "\u202e\x9b\x7f\ud800"}
    text = '{"\\u00fc\\ud83c\\udf89": "\\u202e\\u009b\\u007f\\\\ud800"}'
    assert dumps(value) == "".join(json_pieces(value)) == text


def test_env_says_where_settings_come_from(cli, monkeypatch):
    monkeypatch.setenv("LLMCLI_MODEL", "./somewhere")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("LLMCLI_CACHE", "/tmp/some-cache")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    document = cli("env", "--json", "--seed", "5", "--offline").json()
    found = {setting["name"]: setting for setting in document["settings"]}
    assert document["schema"] == "llmcli.env/1"
    assert document["environment"]["llmcli"]
    assert (found["model"]["value"], found["model"]["origin"]) == ("./somewhere", "LLMCLI_MODEL")
    assert (found["threads"]["value"], found["threads"]["source"]) == ("3", "environment")
    assert (found["seed"]["value"], found["seed"]["origin"]) == ("5", "--seed")
    assert (found["offline"]["value"], found["offline"]["source"]) == (True, "flag")
    assert found["dtype"]["source"] == "default"
    assert found["llmcli cache"]["value"] == "/tmp/some-cache"
    assert "secret" not in json.dumps(document)
    flagged = cli("env", "-m", "smollm2", "--json").json()["settings"]
    assert next(s for s in flagged if s["name"] == "model")["source"] == "flag"


def test_tokens(cli, tiny):
    document = cli("tokens", "-m", tiny, "hé <|end|>", "--json").json()
    assert document["schema"] == "llmcli.tokens/1"
    assert [(t["text"], t["start"], t["end"], t["special"]) for t in document["tokens"]] == [
        ("h", 0, 1, False), ("\\xc3", 1, 2, False), ("\\xa9", 2, 3, False), (" ", 3, 4, False),
        ("<|end|>", 4, 11, True),
    ]  # fmt: skip
    assert document["eos"] == [0]
    plain = cli("tokens", "-m", tiny, "<|end|>", "--no-special", "--json").json()
    assert [token["text"] for token in plain["tokens"]] == list("<|end|>")
    ids = cli("tokens", "-m", tiny, "--ids", "76,77", "--json").json()
    assert [(t["text"], t["start"], t["end"]) for t in ids["tokens"]] == [("h", 0, 1), ("i", 1, 2)]


def test_tokens_of_the_template(cli, tiny):
    result = cli("tokens", "-m", tiny, "hi", "--chat", "--system", "s")
    totals, rest = result.out.split("\n\n", 1)
    assert totals.startswith("8 tokens · 48 bytes")
    assert rest.startswith("rendered template\n<|system|>s<|end|><|user|>hi<|end|><|assist")
    document = cli("tokens", "-m", tiny, "hi", "--chat", "--json").json()
    assert document["rendered"] == "<|user|>hi<|end|><|assistant|>"
    assert [token["id"] for token in document["tokens"]] == [1, 76, 77, 0, 2]


def test_score(cli, tmp_path):
    folder = str(write_tiny(tmp_path / "m", weights=True))
    document = cli("score", "-m", folder, "hello wörld", "--dtype", "float32", "--json").json()
    assert document["schema"] == "llmcli.score/1"
    assert document["tokens"][0] == {
        "id": 76, "text": "h", "logprob": None, "rank": None, "bytes": "68",
    }  # fmt: skip
    assert document["tokens_scored"] == document["bytes_scored"] == 11
    logprobs = [token["logprob"] for token in document["tokens"][1:]]
    assert document["mean_logprob"] == pytest.approx(sum(logprobs) / 11)
    assert document["perplexity"] == pytest.approx(math.exp(-document["mean_logprob"]))
    assert document["bits_per_byte"] == pytest.approx(-sum(logprobs) / 11 / math.log(2))
    exact = cli("score", "-m", folder, "hello wörld", "--dtype", "float64", "--json").json()
    assert exact["mean_logprob"] == pytest.approx(document["mean_logprob"], abs=1e-5)
    assert "perplexity" in cli("score", "-m", folder, "hello").out


def test_score_versus(cli, tmp_path):
    folder = str(write_tiny(tmp_path / "m", weights=True))
    other = str(write_tiny(tmp_path / "o", weights=True, rms_norm_eps=0.5))
    base = ("score", "-m", folder, "hello", "--dtype", "float64")
    document = cli(*base, "--versus", other, "--json").json()
    theirs = document["versus"]
    assert theirs["model"]["name"] == other
    assert theirs["difference"]["same_tokens"] is True
    assert theirs["difference"]["mean_logprob"] == pytest.approx(
        theirs["mean_logprob"] - document["mean_logprob"]
    )
    assert abs(theirs["difference"]["mean_logprob"]) > 1e-6
    assert "is better by" in cli(*base, "--versus", other).out


def test_score_of_a_long_text_and_of_one_token(cli, tmp_path):
    folder = str(write_tiny(tmp_path / "m", weights=True))
    document = cli("score", "-m", folder, "abc" * 100, "--json").json()
    assert (document["window"], document["stride"]) == (128, 64)
    assert document["tokens_scored"] == 299
    one = cli("score", "-m", folder, "a", "--json")
    assert one.json()["perplexity"] is None
    assert "single token" in one.err
    assert cli("score", "-m", folder, "abc", "--stride", "128").code == 2


def test_a_note_does_not_end_up_behind_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("llmcli.cli.progress.PATIENCE_S", 0)
    out = Output("models", OutputOptions())
    out.err = Screen(terminal=True, animate=True, colour=True, width=80)
    with Progress(out) as progress:
        progress("downloading x", 1, 3)
        out.note("it comes from elsewhere")
        progress("downloading y", 2, 3)
    first, note, rest = capsys.readouterr().err.partition("note: it comes from elsewhere\n")
    assert "downloading x" in first
    assert first.endswith("\x1b[2K")  # the line is empty again
    assert note
    assert "downloading y" in rest
    out.note("after it")
    assert capsys.readouterr().err == "note: after it\n"
