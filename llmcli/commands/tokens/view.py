"""A text in tokens, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.records.numbers import counted
from llmcli.records.text import TokenPiece
from llmcli.ui.layout import Column, Line, Rows
from llmcli.ui.theme import FAINT, HEADING, SPECIAL, printable, quoted

MOST, FIRST, LAST = 18, 10, 7  # a longer table shows so many rows at each end


@dataclass(frozen=True, kw_only=True)
class TokensReport:
    """A text in tokens, as the model would be given it. `rendered`: the chat template's text."""

    text: str | None
    rendered: str | None
    tokens: tuple[TokenPiece, ...]
    bytes: int
    vocabulary: int
    bos: int | None
    adds_bos: bool
    eos: tuple[int, ...]


def render_tokens(report: TokensReport, *, every: bool = False) -> RenderableType:
    """The totals, the rendered template where there is one, and a row per token.

    Of many tokens the first and the last, unless `every`.
    """
    special = any(token.special for token in report.tokens)
    columns = [
        Column("#"),
        Column("id"),
        Column("token", right=False, cut=True),
        *([Column("", right=False)] if special else []),
        Column("bytes"),
    ]
    count = len(report.tokens)
    parts = [
        counted(count, "token"),
        f"{counted(report.bytes, 'byte')}, {report.bytes / count:.2f} a token"
        if count
        else "no tokens",
        f"vocabulary {report.vocabulary}",
        f"BOS {report.bos} is put in front" if report.adds_bos else "no BOS is put in front",
        f"end-of-text id{'s' * (len(report.eos) > 1)} {', '.join(map(str, report.eos))}"
        if report.eos
        else "no end-of-text id",
    ]
    gap = (0, 0, "")
    if count > MOST and not every:
        words = f"… {count - FIRST - LAST} tokens more: --all or --json"
        gap = (FIRST, count - LAST, words)
    table = Rows(columns, _TokenRows(report, special), gap)
    shown: list[RenderableType] = [Line(parts, HEADING), Text()]
    if report.rendered is not None:
        text = printable(report.rendered).removesuffix("\n")
        shown += [Text("rendered template", style=FAINT), Text(text), Text()]
    return Group(*shown, table)


@dataclass(frozen=True)
class _TokenRows(Sequence[list[Text | str]]):
    """A row per token, made when it is read. `special`: with the column that says which are."""

    report: TokensReport
    special: bool

    def __len__(self) -> int:
        return len(self.report.tokens)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(*number.indices(len(self)))]
        token = self.report.tokens[number]
        special = [Text("special", style=SPECIAL) if token.special else ""] * self.special
        place = f"{token.start}–{token.end}"
        return [str(number), str(token.id), quoted(token.text), *special, place]
