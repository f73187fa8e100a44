"""The table of tokens as text."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from llmcli.commands.tokens.report import TokensReport
from llmcli.commands.tokens.view import render_tokens
from llmcli.reports.text import TokenPiece


def shown(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


REPORT = TokensReport(
    text="hi [b]", rendered=None, bytes=6, vocabulary=99, bos=1, adds_bos=True, eos=(2, 5),
    tokens=(
        TokenPiece(id=1, text="<s>", bytes="", start=0, end=0, special=True),
        TokenPiece(id=40, text="hi", bytes="6869", start=0, end=2, special=False),
        TokenPiece(id=41, text=" [b]\n\x1b", bytes="205b625d0a1b", start=2, end=6, special=False),
    ),
)  # fmt: skip


def test_tokens():
    assert shown(render_tokens(REPORT), 99).splitlines() == [
        "3 tokens · 6 bytes, 2.00 a token · vocabulary 99 · BOS 1 is put in front"
        " · end-of-text ids 2, 5",
        "",
        "#   id   token                    bytes",
        "───────────────────────────────────────",
        '0    1   "<s>"          special     0–0',
        '1   40   "hi"                       0–2',
        '2   41   " [b]\\n\\x1b"               2–6',
    ]


def test_the_totals_stand_before_the_template_and_its_tokens():
    lines = shown(render_tokens(replace(REPORT, rendered="<s>hi\n")), 99).splitlines()
    assert lines[0].startswith("3 tokens · 6 bytes")
    assert lines[1:6] == ["", "rendered template", "<s>hi", "", lines[5]]
    assert lines[5].startswith("#   id")


def test_a_long_text_is_drawn_line_by_line_and_not_cell_by_cell(monkeypatch):
    """A `Text` for every cell took most of the time and the memory of a text of megabytes."""
    many = replace(REPORT, tokens=REPORT.tokens[1:] * 1000)
    made = []
    begin = Text.__init__
    monkeypatch.setattr(Text, "__init__", lambda *a, **k: made.append(1) or begin(*a, **k))
    lines = shown(render_tokens(many, every=True), 99).splitlines()
    assert len(made) < 100
    assert len(lines) == 2 + 2 + 2000
    assert lines[2002].split() == ["1998", "40", '"hi"', "0–2"]


def test_tokens_in_few_columns():
    one = replace(REPORT, tokens=REPORT.tokens[2:], bytes=1, adds_bos=False, eos=(2,))
    assert shown(render_tokens(one), 25).splitlines() == [
        "1 token",
        "1 byte, 1.00 a token",
        "vocabulary 99",
        "no BOS is put in front",
        "end-of-text id 2",
        "",
        "#   id   token      bytes",
        "─────────────────────────",
        '0   41   " [b]\\n…     2–6',
    ]


def test_of_many_tokens_the_first_and_the_last_are_shown():
    many = replace(REPORT, tokens=REPORT.tokens[1:2] * 40)
    lines = shown(render_tokens(many)).splitlines()
    assert len(lines) <= 23
    numbers = [line.split()[0] for line in lines[5:23]]
    assert numbers == [*map(str, range(10)), "…", *map(str, range(33, 40))]
    assert lines[15] == "… 23 tokens more: --all or --json"
    assert len(shown(render_tokens(many, every=True)).splitlines()) == 3 + 2 + 40
    some = replace(many, tokens=many.tokens[:18])
    assert "more" not in shown(render_tokens(some))
