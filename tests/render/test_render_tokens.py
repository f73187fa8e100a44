"""The table of tokens as text."""

from dataclasses import replace

from drawn import shown
from rich.text import Text

from llmcli.commands.tokens.report import TokensReport
from llmcli.commands.tokens.view import render_tokens
from llmcli.records.text import TokenPiece

REPORT = TokensReport(
    text="hi [b]", rendered=None, bytes=6, vocabulary=99, bos=1, adds_bos=True, eos=(2, 5),
    tokens=(
        TokenPiece(id=1, text="<s>", bytes="", start=0, end=0, special=True),
        TokenPiece(id=40, text="hi", bytes="6869", start=0, end=2, special=False),
        TokenPiece(id=41, text=" [b]\n\x1b", bytes="205b625d0a1b", start=2, end=6, special=False),
    ),
)  # fmt: skip


def test_screens(golden):
    """More is in transcripts/tokens-shown.txt."""
    few = replace(REPORT, tokens=REPORT.tokens[2:], bytes=1, adds_bos=False, eos=(2,))
    many = replace(REPORT, tokens=REPORT.tokens[1:2] * 40)
    golden("tokens", {
        "a text that begins with BOS": shown(render_tokens(REPORT), width=99),
        "in few columns": shown(render_tokens(few), width=25),
    })  # fmt: skip
    assert len(shown(render_tokens(many, every=True)).splitlines()) == 3 + 2 + 40
    assert "more" not in shown(render_tokens(replace(many, tokens=many.tokens[:18])))


def test_a_long_text_is_drawn_line_by_line_and_not_cell_by_cell(monkeypatch):
    """A `Text` for every cell took most of the time and the memory of a text of megabytes."""
    many = replace(REPORT, tokens=REPORT.tokens[1:] * 1000)
    made = []
    begin = Text.__init__
    monkeypatch.setattr(Text, "__init__", lambda *a, **k: made.append(1) or begin(*a, **k))
    lines = shown(render_tokens(many, every=True), width=99).splitlines()
    assert len(made) < 100
    assert len(lines) == 2 + 2 + 2000
    assert lines[2002].split() == ["1998", "40", '"hi"', "0–2"]
