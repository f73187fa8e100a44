"""`--draft`: the same text, told how many tokens were proposed."""

import json

import pytest
from cli_tiny import write_tiny
from json_schemas import errors

from llmcli.engine.speculation import Pace

PROMPT = "one two three one two three one two"


@pytest.fixture
def run(cli, tmp_path, monkeypatch):
    """A command on a model that drafts are checked with, at most 16 tokens at a time."""
    monkeypatch.setattr(Pace, "rows", lambda self, ground, most: min(most, 16))
    folder = write_tiny(tmp_path / "m", weights=True)
    return lambda command, *argv: cli(command, "-m", folder, "--dtype", "float64", *argv)


@pytest.fixture
def generate(run):
    return lambda *argv: run("generate", PROMPT, "--raw", "-n", "60", *argv)


@pytest.mark.parametrize("sampling", [["--greedy"], ["--seed", "4", "-t", "1"]])
def test_the_text_is_the_same(generate, sampling, tmp_path):
    other = write_tiny(tmp_path / "other", weights=True)
    alone = generate(*sampling)
    for draft in ("ngram", other):
        assert generate(*sampling, "--draft", draft).out == alone.out
    told = generate(*sampling, "--draft", other, "--json").json()
    assert errors(told, "generate") == []
    speculation = told["speculation"]
    assert speculation["draft"] == str(other)
    assert 40 < speculation["accepted"] <= speculation["proposed"]
    assert speculation["speedup"] is None or speculation["speedup"] > 0
    assert "speculation" not in generate(*sampling, "--json").json()


def test_statistics_tell_of_the_draft(generate):
    short = generate("--greedy", "--draft", "ngram", "--stats", "short").err
    assert "draft " in short
    assert " right" in short
    assert "draft" not in generate("--greedy", "--stats", "short").err
    assert "ngram: " in generate("--greedy", "--draft", "ngram", "--stats", "full").err


def test_a_draft_that_cannot_be_one(generate, tmp_path):
    other = write_tiny(tmp_path / "other", weights=True, vocab_size=300)
    assert generate("--draft", "nothing-of-that-name").code == 3
    config = json.loads((other / "tokenizer.json").read_text())
    vocab = config["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(config))
    refused = generate("--draft", other)
    assert refused.code == 2
    assert f"error: `{other}` has a different vocabulary than `" in refused.err


def test_a_conversation_with_a_draft_is_the_same(run, tmp_path):
    said = ("chat", "--prompt", "aaaa", "-n", "40", "--greedy")
    alone = run(*said, "--json").json()
    drafted = run(*said, "--json", "--draft", tmp_path / "m").json()
    assert errors(drafted, "chat") == []
    assert drafted["messages"] == alone["messages"]
    assert drafted["speculation"]["accepted"] > 0
    assert "speculation" not in alone
    assert " right" in run(*said, "--stats", "--draft", "ngram").err
