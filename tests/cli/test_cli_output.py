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


def test_single_precision_scores_the_same(cli, tmp_path):
    base = ("score", "-m", str(write_tiny(tmp_path / "m", weights=True)), "hello wörld", "--json")
    single, double = (cli(*base, "--dtype", dtype).json() for dtype in ("float32", "float64"))
    assert double["mean_logprob"] == pytest.approx(single["mean_logprob"], abs=1e-5)
