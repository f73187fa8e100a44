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
from llmcli.ui.layout import SEPARATOR, Column, Line, Rows, in_words
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
    """Lines of both scores, of the tokens in both, and of the divergence."""
    same, pairs = report.same_tokens, []
    for name, unit in (("perplexity", ""), ("bits_per_byte", ""), ("mean_logprob", " nats")):
        x, y = getattr(a, name), getattr(b, name)
        compares = same or (name == "bits_per_byte" and report.alignment is None)
        change = f" ({y - x:+.4g})" if compares and math.isfinite(y - x) else ""
        shown = f"{score_number(x)} → {score_number(y)}{unit}{change}"
        pairs.append(f"{name.replace('_', ' ')} {shown}")
    yield [*pairs, f"{a.tokens_scored:,} scored"]
    if report.alignment is not None:
        first, last = report.alignment
        total = f"{a.tokens_scored + 1} and {b.tokens_scored + 1}"
        end = f" and the last {last}" * (last > 0)
        yield [f"aligned: the first {counted(first, 'token')}{end}, of {total}"]
    elif not same:
        yield ["A and B split the text into different tokens: only bits per byte compare"]
    elif (most := report.largest_difference) is not None:
        alike = "identical: every token has the same logprob in both"
        yield [f"a token's logprob differs by at most {most:.6f}" if most else alike]
    if (of := report.divergence) is not None:
        quantiles = {"median": of.median, "90 %": of.p90, "99 %": of.p99, "99.9 %": of.p999}
        interval = f"{number(of.mean_low)} to {number(of.mean_high)}"
        low, high = 100 * of.same_top_low, 100 * of.same_top_high
        yield [
            f"KL(A‖B) mean {number(of.mean)} nats ({interval})",
            *(f"{words} {number(value)}" for words, value in (quantiles | {"max": of.max}).items()),
            f"KL(B‖A) mean {number(of.reverse_mean)}",
            f"same top token {100 * of.same_top:.1f} % ({low:.1f} to {high:.1f}) "
            f"of {of.predictions:,}",
        ]


def _layers(report: DiffReport, every: bool) -> RenderableType:
    """A row per layer, or some of them: relative errors of the stream, and its worst token."""
    layers: dict[int, dict[str, StreamDiff]] = {}
    for one in report.streams:
        layers.setdefault(one.layer, {})[one.name.rpartition(".resid_")[2]] = one
    shown = list(layers.items())
    if not every and len(shown) > LAYERS:
        shown = [shown[round(at)] for at in np.linspace(0, len(shown) - 1, LAYERS)]
    names = sorted({name for of in layers.values() for name in of} - {"pre", "post"})
    columns = [
        Column("layer"), Column("‖Δ‖/‖A‖ pre"), *(Column(name, drop=1) for name in names),
        Column("post"), Column("cosine"), Column("worst", drop=2), Column("at", drop=3),
    ]  # fmt: skip
    rows = []
    for layer, of in shown:
        last = [*of.values()][-1]
        errors = [number(of[one].error) if one in of else "–" for one in ("pre", *names, "post")]
        at = int(last.errors.argmax())
        worst = number(float(last.errors[at])), str(report.tokens[at].position - 1)
        rows.append([str(layer), *errors, f"{last.cosine:.6f}", *worst])
    return Rows(columns, rows)


def _nodes(report: DiffReport, every: bool) -> Iterator[list[str]]:
    """The first activation that rounding does not explain, or the largest errors introduced."""
    most = None if every else NAMES
    faults = [one for one in report.nodes if one.differs]
    if faults:
        first, *others = faults
        why = [
            f"{one.name} differs in {one.differing_rows:,} of {counted(one.rows, 'row')}, first "
            f"{one.first_row}: ‖Δ‖/‖A‖ {number(one.error)}"
            for one in first.parameters
        ] + [f"its formula: {words}" for words in first.formula]
        share = f"{first.share:,.3g} × what rounding explains"
        own = "its formula and parameters are A's: an edit, or another kernel"
        yield [f"first difference: {first.where}, {share}", *(why or [own])]
        if others:
            left = f" and {len(others) - NAMES} more" * (not every and len(others) > NAMES)
            yield [f"then {', '.join(one.name for one in others[:most])}{left}"]
    elif report.alignment is not None or not any(one.error for one in report.streams):
        yield ["no difference but rounding: B's activations are what A makes of their inputs"]
    else:
        ranked = sorted(report.nodes, key=lambda one: -one.error)[:most]
        largest, *rest = (f"{one.name} {number(one.error)}" for one in ranked)
        known = all(one.share is not None for one in report.nodes)
        yield [*["rounding explains every activation"] * known, f"largest errors: {largest}", *rest]


def _tokens(tokens: Sequence[TokenDiff], every: bool) -> RenderableType:
    """The tokens with the largest divergence, or all in their order."""

    def row(of: TokenDiff) -> list[str]:
        token = "–" if of.id is None else in_words(Token(id=of.id, text=of.text))
        logprobs = ["–" if one is None else f"{one:.2f}" for one in (of.a, of.b)]
        tops = [
            in_words(top) + f" ({rank:,})" * (rank > 1)
            for top, rank in ((of.top_a, of.top_a_in_b), (of.top_b, of.top_b_in_a))
        ]
        return [str(of.position), token, number(of.kl), number(of.reverse_kl), *logprobs, *tops]

    columns = [
        Column("#"), Column("token", right=False, cut=True, drop=3), Column("KL"),
        Column("KL(B‖A)", drop=4), Column("A", drop=2), Column("B", drop=2),
        *(Column(f"top of {side}", right=False, cut=True, drop=1) for side in "AB"),
    ]  # fmt: skip
    shown = tokens if every else sorted(tokens, key=lambda one: -one.kl)[:TOKENS]
    return Rows(columns, [row(one) for one in shown])


def _parameters(found: Sequence[ParameterDiff], every: bool) -> Iterator[RenderableType]:
    """Those that differ, in execution order."""
    differ = [one for one in found if one.error != 0]
    shown = differ if every else differ[:PARAMETERS]
    yield Line([f"{len(found) - len(differ)} of {counted(len(found), 'parameter')} are equal"])
    columns = [
        Column("parameter", right=False, cut=True), Column("‖Δ‖/‖A‖"), Column("rows"),
        Column("first", drop=1), *(Column(side, right=False, drop=2) for side in "AB"),
    ]  # fmt: skip
    if shown:
        yield Rows(columns, [
            [one.name, number(one.error), f"{one.differing_rows:,} of {one.rows:,}",
             "–" if one.first_row is None else str(one.first_row),
             one.format_a or "–", one.format_b or "–"]
            for one in shown
        ])  # fmt: skip
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
