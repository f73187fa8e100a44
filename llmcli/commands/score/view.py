"""How well a model predicts a text: the totals, and the tokens that surprised it most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.score.report import Comparison, Score, ScoredToken
from llmcli.records.numbers import counted
from llmcli.ui.layout import SEPARATOR, Column, Line, Rows
from llmcli.ui.numbers import probability
from llmcli.ui.theme import FAINT, HEADING, confidence_style, one_line, quoted

SHORT = 18  # so many tokens are shown one after the other, of more the surprising ones
SURPRISING, WITH_ANOTHER = 20, 15  # so many, fewer below the comparison of two models
UNKNOWN = "–"
CONTEXT = 64  # columns of a token with what is around it, at most


def render_score(score: Score, title: str, *, every: bool = False) -> RenderableType:
    """The totals of one model, then its tokens; `title` is the model's line."""
    return Group(*_totals(score, title, every), _tokens(score, SURPRISING, every))


def render_versus(
    ours: tuple[Score, str],
    theirs: tuple[Score, str],
    comparison: Comparison,
    names: tuple[str, str],
    *,
    every: bool = False,
) -> RenderableType:
    """The totals of two models, A and B, each with its line, which is better, and the tokens: of
    both where they are the same, else A's.
    """
    (first, title), (second, other) = ours, theirs
    return Group(
        *_totals(first, f"A  {title}", every), *_totals(second, f"B  {other}", every),
        render_comparison(comparison, *names),
        _tokens(first, WITH_ANOTHER, every, second if comparison.largest_difference else None),
    )  # fmt: skip


def _totals(score: Score, title: str, every: bool) -> list[RenderableType]:
    """The model's line, and perplexity, bits per byte and mean log-probability."""
    nothing = "undefined: nothing was scored"
    no_bytes = nothing
    if score.tokens_scored:
        why = "the scored tokens have" if _has_text(score) else "no tokenizer, so"
        no_bytes = f"undefined: {why} no bytes"
    if score.tokens_scored and len(score.tokens) > score.window:
        windows = f"windows of {counted(score.window, 'token')}, {score.stride} apart"
        title += f"{SEPARATOR}{windows}"
    parts = [
        f"perplexity {_number(score.perplexity, nothing)}",
        f"bits per byte {_number(score.bits_per_byte, no_bytes)}",
        f"mean logprob {_number(score.mean_logprob, nothing)}",
        f"{score.tokens_scored:,} scored",
    ]
    if every and _has_text(score):
        parts.append(counted(score.bytes_scored, "byte"))
    if score.tokens_scored > 1 and len(score.tokens) <= SHORT:  # of more there is a list
        worst = min(score.tokens, key=lambda token: token.logprob or 0.0)
        text = quoted(worst.text) if worst.text else str(worst.id)
        parts.append(f"most surprising {text} {worst.logprob:.2f}")
    return [Text(one_line(title), style=HEADING), Line(parts)]


def _tokens(
    score: Score, most: int, every: bool, other: Score | None = None
) -> RenderableType:
    """`other`: the score of the same tokens by another model, which is shown beside it."""
    if every or len(score.tokens) <= SHORT:
        return _table(score, other)
    scored = [at for at, token in enumerate(score.tokens) if token.logprob is not None]
    worst = sorted(scored, key=lambda at: score.tokens[at].logprob or 0.0)[:most]
    return Surprising(score.tokens, worst, () if other is None else other.tokens)


def _table(ours: Score, theirs: Score | None) -> RenderableType:
    """A row per token, with what A and B make of it where there are two models.

    Where the width is too little, the probability goes first: the log-probability says the same; of
    two models the ranks, then the difference. Without a tokenizer there is no column of tokens.
    """
    named = _has_text(ours)
    columns = [Column("#"), Column("id"), *[Column("token", right=False, cut=True)] * named]
    if theirs is None:
        columns += [Column("logprob"), Column("prob", drop=1), Column("rank")]
    else:
        columns += [Column("logprob A"), Column("logprob B"), Column("B − A", drop=1),
                    Column("rank A", drop=2), Column("rank B", drop=2)]  # fmt: skip
    rows: list[list[Text | str]] = []
    for number, token in enumerate(ours.tokens):
        text, cells = Text(quoted(token.text)), list(_values(token))
        if theirs is None and token.logprob is not None:
            text.stylize(confidence_style(math.exp(token.logprob)))
        elif theirs is not None:
            other, apart = theirs.tokens[number], UNKNOWN
            if token.logprob is not None and other.logprob is not None:
                apart = f"{other.logprob - token.logprob:+.4f}"
            first, _, rank = cells
            second, _, other_rank = _values(other)
            cells = [first, second, apart, rank, other_rank]
        rows.append([str(number), str(token.id), *[text] * named, *cells])
    return Rows(columns, rows)


def _values(token: ScoredToken) -> tuple[str, str, str]:
    """Log-probability, probability and rank, dashes for a token that was not scored."""
    if token.logprob is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    return f"{token.logprob:.4f}", probability(math.exp(token.logprob)), str(token.rank)


@dataclass(frozen=True)
class Surprising:
    """Tokens at some `places`, a line each, in brackets between what is around them.

    `others`: a second model's scores of the same tokens; each line then has both logprobs.
    """

    tokens: Sequence[ScoredToken]
    places: Sequence[int]
    others: Sequence[ScoredToken] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        both = [(" A", self.tokens), (" B", self.others)] if self.others else [("", self.tokens)]
        columns = [["#", *map(str, self.places)]]
        for name, tokens in both:
            found = [f"{tokens[at].logprob or 0.0:.2f}" for at in self.places]
            columns.append([f"logprob{name}", *found])
        ranks = [str(self.tokens[at].rank) for at in self.places]
        columns.append([f"rank{both[0][0]}", *ranks])
        widths = [max(map(len, column)) for column in columns]
        room = max(12, min(CONTEXT, options.max_width - sum(widths) - 2 * len(widths)))
        heading = f"most surprising {len(self.places)} of {len(self.tokens)}: --all or --json"
        lines = [Text(heading[:room], style=FAINT), *(self._around(at, room) for at in self.places)]
        for line, *cells in zip(lines, *columns, strict=True):
            front = "".join(f"{cell:>{width}}  " for cell, width in zip(cells, widths, strict=True))
            whole = Text(front, style=line.style, no_wrap=True, overflow="ignore")
            yield whole.append_text(line)

    def _around(self, at: int, room: int) -> Text:
        """What stands before a token, the token in brackets, and what stands after it."""
        token = self.tokens[at]
        own = _cut(f"[{self._text(at)}]", max(6, room // 2))
        free = room - cell_len(own)
        before = "".join(self._text(n) for n in range(max(0, at - free), at))
        first = _cut(before[::-1], max(free // 2, 2))
        after = "".join(self._text(n) for n in range(at + 1, min(len(self.tokens), at + free)))
        last = _cut(after, free - cell_len(first))
        style = f"bold {confidence_style(math.exp(token.logprob or 0.0))}"
        return Text.assemble((first[::-1], FAINT), (own, style), (last, FAINT))

    def _text(self, at: int) -> str:
        """A token on one line; its id where it has no text."""
        token = self.tokens[at]
        return one_line(token.text) if token.text else f" {token.id}"


def _cut(text: str, columns: int) -> str:
    """As much of its beginning as fits."""
    return next(iter(chop_cells(text, columns)), "")


def render_comparison(comparison: Comparison, ours: str, theirs: str) -> RenderableType:
    """Which of two models, A and B, predicts the text better, and by how much."""
    bits, mean = comparison.bits_per_byte, comparison.mean_logprob
    ours, theirs = f"A, {one_line(ours)},", f"B, {one_line(theirs)},"
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
            f"mean logprob differs by {mean:+.6f}, "
            f"a single token by at most {comparison.largest_difference or 0.0:.6f}"
        )
    elif not comparison.same_tokens:
        lines.append("A and B split the text into different tokens, so only bits per byte compare")
    return Text("\n".join(lines))


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
