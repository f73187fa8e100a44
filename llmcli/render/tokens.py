"""Tables of tokens: what a text was cut into, and how well each token was predicted."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.render.stats import SEPARATOR
from llmcli.render.theme import FAINT, HEADING, SPECIAL, confidence_style, printable, quoted
from llmcli.reports import Comparison, Score, TokensReport


def render_tokens(report: TokensReport) -> RenderableType:
    """The rendered template where there is one, a row per token, and a line of totals."""
    table = _table(("#", "right"), ("id", "right"), ("token", "left"), ("bytes", "right"))
    for number, token in enumerate(report.tokens):
        mark = Text("  special", style=SPECIAL) if token.special else Text()
        table.add_row(
            str(number),
            str(token.id),
            Text.assemble(Text(quoted(token.text), overflow="fold"), mark),
            f"{token.start}–{token.end}",
        )
    count = len(report.tokens)
    parts = [
        f"{count} token{'' if count == 1 else 's'}",
        f"{report.bytes} bytes, {report.bytes / count:.2f} a token" if count else "no tokens",
        f"vocabulary {report.vocabulary}",
        _bos(report),
        f"ends at {', '.join(map(str, report.eos)) or 'no token'}",
    ]
    parts_text = Text(SEPARATOR.join(parts), style=FAINT)
    shown: list[RenderableType] = [table, parts_text]
    if report.rendered is not None:
        text = printable(report.rendered).removesuffix("\n")
        shown = [Text("rendered template", style=HEADING), Text(text), Text(), *shown]
    return Group(*shown)


def _bos(report: TokensReport) -> str:
    if report.adds_bos:
        return f"BOS {report.bos} is put in front"
    return "no BOS is put in front"


def render_score(score: Score) -> RenderableType:
    """A row per token with its log-probability, probability and rank, then the totals."""
    table = _table(
        ("#", "right"), ("id", "right"), ("token", "left"),
        ("logprob", "right"), ("probability", "right"), ("rank", "right"),
    )  # fmt: skip
    for number, token in enumerate(score.tokens):
        text = Text(quoted(token.text), overflow="fold")
        if token.logprob is None:
            row = ("–", "–", "–")
        else:
            probability = math.exp(token.logprob)
            text.stylize(confidence_style(probability))
            row = (f"{token.logprob:.4f}", f"{probability:.2%}", str(token.rank))
        table.add_row(str(number), str(token.id), text, *row)
    return Group(table, Text(), render_summary(score))


def render_summary(score: Score, name: str | None = None) -> RenderableType:
    """Perplexity, bits per byte and mean log-probability of one model."""
    grid = Table.grid(padding=(0, 2))
    if name is not None:
        grid.add_row(Text(name, style=HEADING), Text())
    scored = f"{score.tokens_scored} of {len(score.tokens)} tokens, {score.bytes_scored} bytes"
    for label, value in (
        ("scored", scored),
        ("mean logprob", _number(score.mean_logprob)),
        ("perplexity", _number(score.perplexity)),
        ("bits per byte", _number(score.bits_per_byte)),
    ):
        grid.add_row(Text(label), Text(value))
    if score.tokens_scored and len(score.tokens) > score.window:
        windows = f"windows of {score.window} tokens, {score.stride} apart"
        grid.add_row(Text("context"), Text(windows))
    return grid


def render_comparison(comparison: Comparison, ours: str, theirs: str) -> RenderableType:
    """Which of two models predicts the text better, and by how much."""
    bits = comparison.bits_per_byte
    better = theirs if bits < 0 else ours
    lines = [f"{better} needs {abs(bits):.4f} bits per byte fewer"]
    if not bits:
        lines = ["both need the same bits per byte"]
    if not math.isfinite(bits):
        lines = ["nothing was scored, so there is nothing to compare"]
    if comparison.same_tokens and comparison.mean_logprob is not None:
        lines.append(
            f"mean logprob differs by {comparison.mean_logprob:+.6f}, "
            f"a single token by at most {comparison.largest_difference or 0.0:.6f}"
        )
    elif not comparison.same_tokens:
        lines.append("their tokens differ: only bits per byte compare them")
    return Text("\n".join(lines))


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style=HEADING, pad_edge=False, show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left")
    return table


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "undefined: nothing was scored"
