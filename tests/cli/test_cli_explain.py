"""`llmcli explain` through the command line."""

import io
import os
import re
import shlex

import pytest
from covers import few, in_turn

from llmcli.commands.explain import measure
from llmcli.commands.explain.options import names
from llmcli.decoder.decoder import Decoder
from llmcli.loading.load import load


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


def test_the_examples_of_the_help_work(cli, monkeypatch):
    text = cli("explain", "--help").out.partition("Examples:")[2]
    commands = [line.strip() for line in text.splitlines() if line.strip()]
    assert len(commands) == 5
    for line in commands:
        reading, writing = os.pipe()
        os.write(writing, b"And God said\n" if line.startswith("echo") else b"")
        os.close(writing)
        with io.TextIOWrapper(os.fdopen(reading, "rb")) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            words = shlex.split(line.rpartition(" | ")[2])
            assert words.pop(0) == "llmcli"
            result = cli(*words, *(() if "-m" in words else ("-m", "tiny")))
        assert result.code == 0, (line, result.err)


def test_ctrl_c(explain, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "explain", interrupted)
    result = explain("logits[0,0]", "hello")
    assert (result.code, result.out) == (130, "")


@pytest.mark.parametrize("columns", few(["40", "200"], 1))
def test_every_line_fits_the_terminal(columns, explain, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    argv = ("tab\tand\x1b[31m \u4e2d", "--depth", "all", "--no-pager")
    for number in ("blocks.1.attn.z[0,5,2]", "blocks.1.resid_post[4,3]", "blocks.0.attn.W_q[0,0]"):
        for more in ((), ("--full",)):
            out = explain(number, *argv, *more).out
            lines = [line for line in out.splitlines() if not line.startswith("/")]
            assert max(map(len, lines)) <= int(columns), max(lines, key=len)
            assert "\x1b" not in out


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
    ("blocks.3.attn.pattern[2,-1,0]", "A"), ("blocks.3.mlp.post[3,77]", "L"),
    ("logits[-1,' the']", "logits"),
])  # fmt: skip
def test_the_real_model(number, letter, cli, smollm2_path):
    """As in the help: without a text, and `' the'` is a token. Scores and norms are steps."""
    assert derived(cli, number, letter, "-m", str(smollm2_path)) < 1e-4
