"""How well a model predicts a text: the totals, and the tokens that surprised it most."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.score.report import Score, ScoredToken
from llmcli.records.numbers import counted
from llmcli.ui.facts import model_line, score_number
from llmcli.ui.layout import SEPARATOR, Column, Line, Rows
from llmcli.ui.numbers import probability
from llmcli.ui.theme import FAINT, HEADING, confidence_style, one_line, quoted

SHORT = 18  # tokens of a text that are all listed; of a longer one the most surprising
SURPRISING = 20  # number of these
UNKNOWN = "–"
CONTEXT = 64  # most columns of a token with the text around it
_SIGN = re.compile(r"\\x[0-9a-f]{2}|.", re.DOTALL)  # part of a character is spelled already


def render_score(score: Score, model: Mapping[str, Any], *, every: bool) -> RenderableType:
    """The totals, and all tokens or the most surprising ones."""
    parts, tokens = _totals(score, model_line(model), every), score.tokens
    if every or len(tokens) <= SHORT:
        return Group(*parts, _table(score))
    scored = (at for at, token in enumerate(tokens) if token.logprob is not None)
    worst = nsmallest(SURPRISING, scored, key=lambda at: tokens[at].logprob or 0.0)
    return Group(*parts, Surprising(tokens, worst))


def _totals(score: Score, title: str, every: bool) -> list[RenderableType]:
    """The model's line, and perplexity, bits per byte and mean log-probability."""
    if not score.tokens_scored:
        words = "nothing was scored: perplexity, bits per byte and mean logprob are undefined"
        return [Text(one_line(title), style=HEADING), Text(words)]
    why = f": {'the scored tokens have' if _has_text(score) else 'no tokenizer, so'} no bytes"
    if len(score.tokens) > score.window:
        title += f"{SEPARATOR}windows of {counted(score.window, 'token')}, {score.stride} apart"
    nats = " nats" * math.isfinite(score.mean_logprob)
    parts = [
        f"perplexity {score_number(score.perplexity)}",
        f"bits per byte {score_number(score.bits_per_byte, why)}",
        f"mean logprob {score_number(score.mean_logprob)}{nats}",
        f"{score.tokens_scored:,} scored",
    ]
    if every and _has_text(score):
        parts.append(counted(score.bytes_scored, "byte"))
    if score.tokens_scored > 1 and len(score.tokens) <= SHORT:  # of more there is a list
        worst = min(score.tokens, key=lambda token: token.logprob or 0.0)
        text = quoted(worst.text) if worst.text else str(worst.id)
        parts.append(f"most surprising {text} {worst.logprob:.2f}")
    return [Text(one_line(title), style=HEADING), Line(parts)]


def _table(score: Score) -> RenderableType:
    """A row per token; where the width is too little, the probability goes.

    Without a tokenizer there is no column of tokens.
    """
    named = [Column("token", right=False, cut=True)] if _has_text(score) else []
    columns = [Column("#"), Column("id"), *named, Column("logprob")]
    columns += [Column("prob", drop=1), Column("rank")]
    rows: list[list[Text | str]] = []
    for number, token in enumerate(score.tokens):
        text, cells = Text(quoted(token.text)), [UNKNOWN] * 3
        if token.logprob is not None:
            share = math.exp(token.logprob)
            text.stylize(confidence_style(share))
            cells = [f"{token.logprob:.4f}", probability(share), str(token.rank)]
        rows.append([str(number), str(token.id), *[text for _ in named], *cells])
    return Rows(columns, rows)


@dataclass(frozen=True)
class Surprising:
    """The tokens at `places`, one per line, in brackets within the text around them."""

    tokens: Sequence[ScoredToken]
    places: Sequence[int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tokens = self.tokens
        columns = [
            ["#", *map(str, self.places)],
            ["logprob", *(f"{tokens[at].logprob or 0.0:.2f}" for at in self.places)],
            ["rank", *(str(tokens[at].rank) for at in self.places)],
        ]
        widths = [max(map(len, column)) for column in columns]
        room = max(12, min(CONTEXT, options.max_width - sum(widths) - 2 * len(widths)))
        heading = f"most surprising {len(self.places)} of {len(tokens)}: --all or --json"
        lines = [Text(heading[:room], style=FAINT), *(self._around(at, room) for at in self.places)]
        for line, *cells in zip(lines, *columns, strict=True):
            front = "".join(f"{cell:>{width}}  " for cell, width in zip(cells, widths, strict=True))
            whole = Text(front, style=line.style, no_wrap=True, overflow="ignore")
            yield whole.append_text(line)

    def _around(self, at: int, room: int) -> Text:
        """A token in brackets with the text before and after it, in `room` columns."""
        tokens = self.tokens

        def signs(start: int, end: int) -> list[str]:
            """The characters of tokens as one line shows them; ids for those without a text."""
            return [
                one_line(sign)
                for one in tokens[start:end]
                for sign in (_SIGN.findall(one.text) if one.text else [f" {one.id}"])
            ]

        own = "".join(_fitting(["[", *signs(at, at + 1), "]"], max(6, room // 2)))
        free = room - cell_len(own)
        first = _fitting(signs(max(0, at - free), at)[::-1], max(free // 2, 2))
        before = "".join(reversed(first))
        last = _fitting(signs(at + 1, at + free), free - cell_len(before))
        style = f"bold {confidence_style(math.exp(tokens[at].logprob or 0.0))}"
        return Text.assemble((before, FAINT), (own, style), ("".join(last), FAINT))


def _fitting(signs: Sequence[str], columns: int) -> list[str]:
    """The first of them that fit into so many columns, each whole."""
    ends = accumulate(map(cell_len, signs))
    return [sign for sign, end in zip(signs, ends, strict=True) if end <= columns]


def _has_text(score: Score) -> bool:
    return any(token.text for token in score.tokens)
