"""`llmcli lens` through the command line."""

from __future__ import annotations

import json

import pytest

import llmcli.commands.lens.measure.run
from llmcli.commands.lens.command import parse_target
from llmcli.errors import UsageError
from llmcli.loading.load import load


@pytest.fixture
def lens(cli, weighted, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    return lambda *argv: cli("lens", "-m", weighted, *argv)


def test_on_a_narrow_screen_only_what_fits_is_computed(lens, monkeypatch, tmp_path):
    """And for a file or a document all of it."""
    asked = []
    plain = llmcli.commands.lens.measure.run.measure_lens

    def spied(*arguments, **options):
        report = plain(*arguments, **options)
        asked.append(report.positions)
        return report

    monkeypatch.setattr(llmcli.commands.lens.measure.run, "measure_lens", spied)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    file, text = tmp_path / "out.json", "a text that is longer than the screen"
    assert "positions 34 to 36 of 37 tokens" in lens(text, "--no-pager").out
    lens(text, "--json")
    lens(text, "-o", str(file))
    assert asked == [tuple(range(32, 37)), *[tuple(range(37))] * 2]
    assert len(json.loads(file.read_text())["positions"]) == 37


def test_targets_that_are_no_token(weighted):
    tokenizer = load(weighted, dtype="float32").tokenizer
    assert parse_target("'x'", tokenizer, 261) == parse_target("x", tokenizer, 261)
    assert parse_target("output", tokenizer, 261) == "output"
    with pytest.raises(UsageError, match="is 4 tokens, not one: `n`, `e`, `x`, `t`"):
        parse_target("'next'", tokenizer, 261)
    with pytest.raises(UsageError, match="is 0 tokens, not one"):
        parse_target("", tokenizer, 261)
    assert parse_target("7", None, 261) == 7
    for text in ("261", "x", "-1"):
        with pytest.raises(UsageError, match="no tokenizer, so it takes an id") as caught:
            parse_target(text, None, 261)
        assert caught.value.hint == "ids go from 0 to 260"


def test_a_word_without_its_space_is_pointed_out():
    class Spaced:
        def encode(self, text, add_bos):
            return [1] if text == " Paris" else [2, 3]

        def token_text(self, id):
            return "…"

    with pytest.raises(UsageError) as caught:
        parse_target("Paris", Spaced(), 9)
    assert caught.value.hint.startswith('did you mean `--target " Paris"`?')
