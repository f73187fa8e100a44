"""Two models side by side: scores, divergence, layers, the first difference, the worst tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.diff.report import DiffReport, ParameterDiff, StreamDiff, TokenDiff
from llmcli.records.numbers import counted
from llmcli.records.text import TextScore, Token
from llmcli.ui.facts import model_line, score_number
from llmcli.ui.layout import SEPARATOR, Column, Line, in_words, table
from llmcli.ui.numbers import number
from llmcli.ui.page import checks, page
from llmcli.ui.theme import FAINT, HEADING, one_line

LAYERS, TOKENS, NAMES, PARAMETERS = 4, 3, 3, 14  # shown without --all


def side_line(report: DiffReport) -> str:
    """B: the model, or the engine, and what tells it from A."""
    b = report.b
    if "engine" in b:
        return f"{b['engine']} ({b['engine_version']}, {b['weight_format']} on {b['device']})"
    if not report.how:
        return model_line(b)
    return f"{b['name']} {report.how} ({b['weight_format']} on {b['device']})"


def render_diff(report: DiffReport, title: str, *, every: bool) -> RenderableType:
    """The whole report; `title` is A's line."""
    parts: list[RenderableType] = [
        Text(f"{letter}  {one_line(line)}", style=HEADING)
        for letter, line in (("A", title), ("B", side_line(report)))
    ]
    if report.score_a is None or report.score_b is None:
        return Group(*parts, *_parameters(report.parameters, every))
    parts += map(Line, _scores(report, report.score_a, report.score_b))
    if report.streams:
        parts += [_layers(report, every), *map(Line, _nodes(report, every))]
    elif "engine" not in report.b:
        parts.append(Line(["activations are not compared: other tokens or other architectures"]))
    if report.tokens:
        parts.append(_tokens(report.tokens, every))
    return Group(*parts)


def _scores(report: DiffReport, a: TextScore, b: TextScore) -> Iterator[list[str]]:
    """Lines of both scores, of which one is better, of two prompts, and of the divergence."""
    of, pairs = report.divergence, []
    for words, unit in (("perplexity", ""), ("bits_per_byte", ""), ("mean_logprob", " nats")):
        ours, theirs = getattr(a, words), getattr(b, words)
        off = difference(ours, theirs)
        change = f" ({off:+.4g})" if report.same_tokens and math.isfinite(off) else ""
        shown = f"{score_number(ours)} → {score_number(theirs)}{unit}{change}"
        pairs.append(f"{words.replace('_', ' ')} {shown}")
    yield [*pairs, f"{a.tokens_scored:,} scored"]
    bits = difference(a.bits_per_byte, b.bits_per_byte)
    nats = difference(a.mean_logprob, b.mean_logprob)
    if (both := report.alignment) is not None:
        first, rest = counted(both.beginning, "token"), f" and the last {both.end}" * (both.end > 0)
        total = f"{a.tokens_scored + 1} and {b.tokens_scored + 1}"
        yield [f"aligned: the first {first}{rest}, of {total}"]
    elif report.same_tokens and report.largest_difference == 0:
        yield ["identical: every token has the same logprob in both"]
    else:
        better = "nothing was scored that could be compared"
        if math.isfinite(bits):
            better = f"{'B' if bits < 0 else 'A'} is better by {abs(bits):.4f} bits per byte"
        elif report.same_tokens and math.isfinite(nats):
            better = f"{'B' if nats > 0 else 'A'} is better: its mean logprob is higher"
        most = report.largest_difference
        yield [better, *([] if most is None else [f"a token's logprob by at most {most:.6f}"])]
        if not report.same_tokens:
            yield ["A and B split the text into different tokens: only bits per byte compare"]
    if of is not None:
        quantiles = {"median": of.median, "90 %": of.p90, "99 %": of.p99, "99.9 %": of.p999}
        interval = f"{number(of.mean_low)} to {number(of.mean_high)}"
        yield [
            f"KL(A‖B) mean {number(of.mean)} nats ({interval})",
            *(f"{words} {number(value)}" for words, value in (quantiles | {"max": of.max}).items()),
            f"KL(B‖A) mean {number(of.reverse_mean)}",
            f"same top token {100 * of.same_top:.1f} % ({100 * of.same_top_low:.1f} to "
            f"{100 * of.same_top_high:.1f}) of {of.predictions:,}",
        ]


def difference(a: float, b: float) -> float:
    """B's value minus A's; 0 where both are the same infinity."""
    return 0.0 if a == b else b - a


def _layers(report: DiffReport, every: bool) -> RenderableType:
    """A row per layer, or some of them: relative errors of the stream, and its worst token."""
    layers: dict[int, dict[str, StreamDiff]] = {}
    for one in report.streams:
        layers.setdefault(one.layer, {})[one.name.rpartition(".resid_")[2]] = one
    numbers = sorted(layers)
    if not every and len(numbers) > LAYERS:
        numbers = [numbers[round(at)] for at in np.linspace(0, len(numbers) - 1, LAYERS)]
    names = sorted({name for one in layers.values() for name in one} - {"pre", "post"})

    def error(name: str) -> Any:
        return lambda of: number(layers[of][name].error) if name in layers[of] else "–"

    def last(of: int) -> StreamDiff:
        return list(layers[of].values())[-1]

    columns: list[tuple[Column, Any]] = [
        (Column("layer"), str),
        (Column("‖Δ‖/‖A‖ pre"), error("pre")),
        *((Column(name, drop=1), error(name)) for name in names),
        (Column("post"), error("post")),
        (Column("cosine"), lambda of: f"{last(of).cosine:.6f}"),
        (Column("worst", drop=2), lambda of: number(last(of).worst)),
        (Column("at", drop=3), lambda of: str(last(of).worst_at)),
    ]
    return table(numbers, columns)


def _nodes(report: DiffReport, every: bool) -> Iterator[list[str]]:
    """The first activation that rounding does not explain, or the largest errors introduced."""
    most = None if every else NAMES
    faults = [one for one in report.nodes if one.differs]
    if faults:
        first, *others = faults
        yield [
            f"first difference: {first.where}, {first.share:,.3g} × what rounding explains",
            *(f"{one.name} differs in {one.differing_rows:,} of {counted(one.rows, 'row')}, first "
              f"{one.first_row}: ‖Δ‖/‖A‖ {number(one.error)}" for one in first.parameters),
            *(f"its formula: {words}" for words in first.formula),
            *["its formula and parameters are A's: an edit, or another kernel"]
            * (not first.parameters and not first.formula),
        ]  # fmt: skip
        if others:
            left = len(others) - len(others[:most])
            yield [f"then {', '.join(one.name for one in others[:most])}"
                   + f" and {left} more" * (left > 0)]
    elif report.alignment is not None or not any(one.error for one in report.streams):
        yield ["no difference but rounding: B's activations are what A makes of their inputs"]
    else:
        ranked = sorted(report.nodes, key=lambda one: -one.error)[:most]
        largest, *rest = (f"{one.name} {number(one.error)}" for one in ranked)
        known = all(one.share is not None for one in report.nodes)
        explained = ["rounding explains every activation"] * known
        yield [*explained, f"largest errors: {largest}", *rest]


def _tokens(tokens: Sequence[TokenDiff], every: bool) -> RenderableType:
    """The tokens with the largest divergence, or all in their order."""
    shown = tokens if every else sorted(tokens, key=lambda one: -one.kl)[:TOKENS]

    def logprob(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    def top(of: Token, rank: int) -> str:
        return in_words(of) + (f" ({rank:,})" if rank > 1 else "")

    columns: list[tuple[Column, Any]] = [
        (Column("#"), lambda of: str(of.position)),
        (Column("token", right=False, cut=True, drop=3),
         lambda of: "–" if of.id is None else in_words(Token(id=of.id, text=of.text))),
        (Column("KL"), lambda of: number(of.kl)),
        (Column("KL(B‖A)", drop=4), lambda of: number(of.reverse_kl)),
        (Column("A", drop=2), lambda of: logprob(of.a)),
        (Column("B", drop=2), lambda of: logprob(of.b)),
        (Column("top of A", right=False, cut=True, drop=1),
         lambda of: top(of.top_a, of.top_a_in_b)),
        (Column("top of B", right=False, cut=True, drop=1),
         lambda of: top(of.top_b, of.top_b_in_a)),
    ]  # fmt: skip
    return table(shown, columns)


def _parameters(found: Sequence[ParameterDiff], every: bool) -> Iterator[RenderableType]:
    """Those that differ, in execution order."""
    differ = [one for one in found if one.error != 0]
    shown = differ if every else differ[:PARAMETERS]
    yield Line([f"{len(found) - len(differ)} of {counted(len(found), 'parameter')} are equal"])
    columns: list[tuple[Column, Any]] = [
        (Column("parameter", right=False, cut=True), lambda of: of.name),
        (Column("‖Δ‖/‖A‖"), lambda of: number(of.error)),
        (Column("rows"), lambda of: f"{of.differing_rows:,} of {of.rows:,}"),
        (Column("first", drop=1), lambda of: "–" if of.first_row is None else str(of.first_row)),
        (Column("A", right=False, drop=2), lambda of: of.format_a or "–"),
        (Column("B", right=False, drop=2), lambda of: of.format_b or "–"),
    ]
    if shown:
        yield table(shown, columns)
    if len(shown) < len(differ):
        yield Text(f"… {len(differ) - len(shown)} more: --all or --json", style=FAINT)


def diff_page(report: DiffReport, title: str, document: Mapping[str, Any]) -> bytes:
    """The whole report, in JSON's types as `document`, as one HTML file; `title` is A's line."""
    lines = [f"A {title} · B {side_line(report)}"]
    if report.score_a is not None and report.score_b is not None:
        lines += map(SEPARATOR.join, _scores(report, report.score_a, report.score_b))
        lines += map(SEPARATOR.join, _nodes(report, every=False) if report.nodes else ())
    return page(
        "diff", f"Diff: {title}", {**document, "lines": lines, "checks": checks(report.checks)}
    )
