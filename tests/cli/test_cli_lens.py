"""`llmcli lens` through the command line."""

from __future__ import annotations

import json

import pytest

import llmcli.commands.lens.measure


@pytest.fixture
def lens(cli, weighted, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    return lambda *argv: cli("lens", "-m", weighted, *argv)


def test_on_a_narrow_screen_only_what_fits_is_computed(lens, monkeypatch, tmp_path):
    """And for a file or a document all of it."""
    asked = []
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
