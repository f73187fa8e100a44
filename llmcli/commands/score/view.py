"""How well a model predicts a text: the totals, and the tokens that surprised it most."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.score.report import Comparison, Score, ScoredToken
from llmcli.records.numbers import counted
from llmcli.ui.facts import model_line
from llmcli.ui.layout import SEPARATOR, Column, Line, Rows
from llmcli.ui.numbers import probability
from llmcli.ui.theme import FAINT, HEADING, confidence_style, one_line, quoted

SHORT = 18  # tokens of a text that are all listed; of a longer one the most surprising
SURPRISING, WITH_ANOTHER = 20, 15  # number of these for one model, and for two
UNKNOWN = "–"
CONTEXT = 64  # most columns of a token with the text around it
_SIGN = re.compile(r"\\x[0-9a-f]{2}|.", re.DOTALL)  # part of a character is spelled already


def render_scores(
    scores: Sequence[Score],
    models: Sequence[Mapping[str, Any]],
    comparison: Comparison | None,
    *,
    every: bool,
) -> RenderableType:
    """The totals of one or two models, which of two is better, and the tokens.

    The tokens are those of the first model, with both models' values if they have the same.
    """
    parts: list[RenderableType] = []
    for letter, score, model in zip("AB", scores, models, strict=False):
        before = f"{letter}  " if comparison is not None else ""
        parts += _totals(score, before + model_line(model), every)
    shown, most = scores[:1], SURPRISING
    if comparison is not None:
        parts.append(_comparison(comparison, *(one_line(str(model["name"])) for model in models)))
        shown, most = scores if comparison.largest_difference else shown, WITH_ANOTHER
    tokens = shown[0].tokens
    if every or len(tokens) <= SHORT:
        return Group(*parts, _table(*shown))
    scored = [at for at, token in enumerate(tokens) if token.logprob is not None]
    worst = sorted(scored, key=lambda at: tokens[at].logprob or 0.0)[:most]
    return Group(*parts, Surprising([score.tokens for score in shown], worst))


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
        f"perplexity {_number(score.perplexity)}",
        f"bits per byte {_number(score.bits_per_byte, why)}",
        f"mean logprob {_number(score.mean_logprob)}{nats}",
        f"{score.tokens_scored:,} scored",
    ]
    if every and _has_text(score):
        parts.append(counted(score.bytes_scored, "byte"))
    if score.tokens_scored > 1 and len(score.tokens) <= SHORT:  # of more there is a list
        worst = min(score.tokens, key=lambda token: token.logprob or 0.0)
        text = quoted(worst.text) if worst.text else str(worst.id)
        parts.append(f"most surprising {text} {worst.logprob:.2f}")
    return [Text(one_line(title), style=HEADING), Line(parts)]


def _table(ours: Score, theirs: Score | None = None) -> RenderableType:
    """A row per token, with the values of A and B if there are two models.

    Where the width is too little, the probability goes first: the log-probability says the same; of
    two models the ranks, then the difference. Without a tokenizer there is no column of tokens.
    """
    named = [Column("token", right=False, cut=True)] if _has_text(ours) else []
    columns = [Column("#"), Column("id"), *named]
    if theirs is None:
        columns += [Column("logprob"), Column("prob", drop=1), Column("rank")]
    else:
        columns += [
            Column("logprob A"),
            Column("logprob B"),
            Column("B − A", drop=1),
            Column("rank A", drop=2),
            Column("rank B", drop=2),
        ]
    rows: list[list[Text | str]] = []
    for number, token in enumerate(ours.tokens):
        text, other = Text(quoted(token.text)), None if theirs is None else theirs.tokens[number]
        if token.logprob is None or (other is not None and other.logprob is None):
            cells = [UNKNOWN] * (3 if other is None else 5)
        elif other is None or other.logprob is None:
            share = math.exp(token.logprob)
            text.stylize(confidence_style(share))
            cells = [f"{token.logprob:.4f}", probability(share), str(token.rank)]
        else:
            apart = f"{other.logprob - token.logprob:+.4f}"
            cells = [f"{token.logprob:.4f}", f"{other.logprob:.4f}", apart]
            cells += [str(token.rank), str(other.rank)]
        rows.append([str(number), str(token.id), *[text for _ in named], *cells])
    return Rows(columns, rows)


@dataclass(frozen=True)
class Surprising:
    """The tokens at `places`, one per line, in brackets within the text around them.

    `models`: the tokens as each of one or two models scored them, with its logprob in each line.
    """

    models: Sequence[Sequence[ScoredToken]]
    places: Sequence[int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tokens, letters = self.models[0], (" A", " B") if len(self.models) > 1 else ("",)
        columns = [["#", *map(str, self.places)]]
        for letter, model in zip(letters, self.models, strict=True):
            logprobs = [f"{model[at].logprob or 0.0:.2f}" for at in self.places]
            columns.append([f"logprob{letter}", *logprobs])
        columns.append([f"rank{letters[0]}", *(str(tokens[at].rank) for at in self.places)])
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
        tokens = self.models[0]

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


def _comparison(comparison: Comparison, ours: str, theirs: str) -> RenderableType:
    """Which of two models, A and B, predicts the text better, and by how much."""
    bits, mean = comparison.bits_per_byte, comparison.mean_logprob
    ours, theirs = f"A, {ours},", f"B, {theirs},"
    if comparison.same_tokens and comparison.largest_difference == 0:
        return Text("identical: every token has the same logprob in both")
    if math.isfinite(bits):
        better = f"{theirs if bits < 0 else ours} is better by {abs(bits):.4f} bits per byte"
        lines = [better if bits else "A and B are equally good: the same bits per byte"]
    elif mean is not None and math.isfinite(mean):
        lines = [f"{theirs if mean > 0 else ours} is better: its mean logprob is higher"]
    else:
        lines = ["nothing was scored that could be compared"]
    if comparison.same_tokens and mean is not None:
        lines.append(
            f"mean logprob differs by {mean:+.6f} nats, "
            f"a single token by at most {comparison.largest_difference or 0.0:.6f}"
        )
    elif not comparison.same_tokens:
        lines.append("A and B split the text into different tokens, so only bits per byte compare")
    return Text("\n".join(lines))


def _number(value: float, why: str = "") -> str:
    """Four decimals, of large numbers fewer: six digits say it all."""
    if math.isnan(value):
        return f"undefined{why}"
    if math.isinf(value):
        return str(value)  # `inf`, `-inf`, as in the table
    digits = len(str(int(abs(value))))
    return f"{value:.6g}" if digits > 9 else f"{value:.{min(4, max(0, 6 - digits))}f}"


def _has_text(score: Score) -> bool:
    return any(token.text for token in score.tokens)
