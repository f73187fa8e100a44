"""Tables of tokens: what a text was cut into, and how well each token was predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.reports.text import Comparison, Score, ScoredToken, TokensReport
from llmcli.ui.layout import Column, Dotted, Rows
from llmcli.ui.theme import (
    FAINT,
    HEADING,
    SPECIAL,
    confidence_style,
    one_line,
    printable,
    quoted,
)

TOKEN = Column("token", right=False, cut=True)
MOST_ROWS, ENDS = 60, 20  # a longer table shows so many rows at each end


def render_tokens(report: TokensReport) -> RenderableType:
    """The rendered template where there is one, a row per token, and a line of totals."""
    columns = [Column("#"), Column("id"), TOKEN, Column("", right=False), Column("bytes")]
    special = any(token.special for token in report.tokens)
    if not special:
        del columns[3]
    count = len(report.tokens)
    parts = [
        _plural(count, "token"),
        f"{_plural(report.bytes, 'byte')}, {report.bytes / count:.2f} a token"
        if count
        else "no tokens",
        f"vocabulary {report.vocabulary}",
        f"BOS {report.bos} is put in front" if report.adds_bos else "no BOS is put in front",
        _end_of_text(report.eos),
    ]
    shown: list[RenderableType] = [Rows(columns, _TokenRows(report, special)), Dotted(parts, FAINT)]
    if report.rendered is not None:
        text = printable(report.rendered).removesuffix("\n")
        shown = [Text("rendered template", style=HEADING), Text(text), Text(), *shown]
    return Group(*shown)


@dataclass(frozen=True)
class _TokenRows(Sequence[list[Text | str]]):
    """A row per token, made when it is read. `special`: with the column that says which are."""

    report: TokensReport
    special: bool

    def __len__(self) -> int:
        return len(self.report.tokens)

    def __getitem__(self, number: Any) -> Any:
        token = self.report.tokens[number]
        special = [Text("special", style=SPECIAL) if token.special else ""] * self.special
        place = f"{token.start}–{token.end}"
        return [str(number), str(token.id), quoted(token.text), *special, place]


def _end_of_text(eos: tuple[int, ...]) -> str:
    if not eos:
        return "no end-of-text id"
    return f"end-of-text id{'s' if len(eos) > 1 else ''} {', '.join(map(str, eos))}"


def render_score(score: Score, title: str, *, every: bool = False) -> RenderableType:
    """A row per token with its log-probability, probability and rank, then the totals.

    Of more than 60 tokens the middle is left out, unless `every`. Without a tokenizer there is
    no column of tokens. Where the width is too little, the probability goes first: the
    log-probability says the same.
    """
    columns = [
        Column("#"), Column("id"), TOKEN, Column("logprob"),
        Column("prob", first_to_go=1), Column("rank"),
    ]  # fmt: skip
    rows = [_score_row(number, token) for number, token in enumerate(score.tokens)]
    if not _has_text(score):
        columns, rows = _without(2, columns, rows)
    gap = (0, 0, "")
    if not every and len(rows) > MOST_ROWS:
        words = f"… {len(rows) - 2 * ENDS} tokens not shown: --all or --json has them all"
        gap = (ENDS, len(rows) - ENDS, words)
    heading = Text(one_line(title), style=HEADING)
    return Group(heading, Rows(columns, rows, gap), Text(), render_summary(score))


def _score_row(number: int, token: ScoredToken) -> list[Text]:
    text = Text(quoted(token.text))
    values = ("–", "–", "–")
    if token.logprob is not None:
        probability = math.exp(token.logprob)
        text.stylize(confidence_style(probability))
        values = (f"{token.logprob:.4f}", percent(probability), str(token.rank))
    return [Text(str(number)), Text(str(token.id)), text, *map(Text, values)]


def render_summary(score: Score, title: str | None = None) -> RenderableType:
    """Perplexity, bits per byte and mean log-probability of one model."""
    known = _has_text(score)
    scored = f"{score.tokens_scored} of {_plural(len(score.tokens), 'token')}"
    nothing = "undefined: nothing was scored"
    no_bytes = "undefined: the scored tokens have no bytes"
    if not known and score.tokens_scored:
        no_bytes = "undefined: no tokenizer, so no bytes"
    facts = [
        ("scored", f"{scored}, {_plural(score.bytes_scored, 'byte')}" if known else scored),
        ("mean logprob", _number(score.mean_logprob, nothing)),
        ("perplexity", _number(score.perplexity, nothing)),
        (
            "bits per byte",
            _number(score.bits_per_byte, no_bytes if score.tokens_scored else nothing),
        ),
    ]
    if score.tokens_scored and len(score.tokens) > score.window:
        windows = f"windows of {_plural(score.window, 'token')}, {score.stride} apart"
        facts.append(("context", windows))
    grid = Table.grid(padding=(0, 2))
    for label, value in facts:
        grid.add_row(Text(label, no_wrap=True), Text(value))
    return grid if title is None else Group(Text(one_line(title), style=HEADING), grid)


def render_comparison(comparison: Comparison, ours: str, theirs: str) -> RenderableType:
    """Which of two models predicts the text better, and by how much."""
    bits, mean = comparison.bits_per_byte, comparison.mean_logprob
    ours, theirs = one_line(ours), one_line(theirs)
    if comparison.same_tokens and comparison.largest_difference == 0:
        return Text("identical: every token has the same logprob in both")
    if math.isfinite(bits):
        better = f"{theirs if bits < 0 else ours} needs {abs(bits):.4f} bits per byte fewer"
        lines = [better if bits else "both need the same bits per byte"]
    elif mean is not None and math.isfinite(mean):
        lines = [f"{theirs if mean > 0 else ours} has the higher mean logprob"]
    else:
        lines = ["nothing was scored that could be compared"]
    if comparison.same_tokens and mean is not None:
        lines.append(
            f"mean logprob differs by {mean:+.6f}, "
            f"a single token by at most {comparison.largest_difference or 0.0:.6f}"
        )
    elif not comparison.same_tokens:
        lines.append("their tokens differ: only bits per byte compare them")
    return Text("\n".join(lines))


def percent(probability: float) -> str:
    """`50.00%`, and two significant digits of what is less than a tenth of a percent: `0.0082%`."""
    value = 100 * probability
    return f"{value:.2f}%" if value >= 0.1 else f"{value:.2g}%"


def _number(value: float, undefined: str) -> str:
    """Four decimals, of large numbers fewer: six digits say it all."""
    if math.isnan(value):
        return undefined
    if math.isinf(value):
        return "infinite"
    digits = len(str(int(abs(value))))
    return f"{value:.6g}" if digits > 9 else f"{value:.{min(4, max(0, 6 - digits))}f}"


def _has_text(score: Score) -> bool:
    return any(token.text for token in score.tokens)


def _without(
    index: int, columns: list[Column], rows: list[list[Text]]
) -> tuple[list[Column], list[list[Text]]]:
    return (
        columns[:index] + columns[index + 1 :],
        [row[:index] + row[index + 1 :] for row in rows],
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
