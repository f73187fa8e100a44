"""`selftest` on a terminal: a line for each property, then rates and memory of real sizes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.selftest.report import (
    GroupResult,
    MemoryResult,
    RateResult,
    Receipt,
    SelftestReport,
    compare,
    shape_words,
)
from llmcli.ui.facts import ceiling_words
from llmcli.ui.layout import BAD, GOOD, WRONG, Column, Line, Rows
from llmcli.ui.numbers import duration, percent, size
from llmcli.ui.theme import FAINT, HEADING


def render_selftest(
    report: SelftestReport, title: str, receipt: Receipt | None = None, *, same_machine: bool = True
) -> RenderableType:
    """The verdict, the properties, rates, memory, and what differs from a `receipt`."""
    parts: list[RenderableType] = [
        Text(title, style=HEADING),
        _verdict(report.groups),
        Text(),
        _groups(report.groups),
    ]
    if report.rates:
        memory = [_memory_words(one) for one in report.memory]
        parts += [Text(), _rates(report.rates), Line(memory, FAINT)]
    if report.ceilings is not None:
        parts.append(Line(list(ceiling_words(report.ceilings)), FAINT))
    if report.refused:
        parts.append(Line([f"not run: {why}" for why in report.refused], FAINT))
    if receipt is not None:
        differences = compare(receipt, report, same_machine=same_machine)
        words = differences or ["as in the receipt"]
        parts += [Text(), Text(f"receipt of {receipt.processor}", style=HEADING)]
        parts += [Text(f"{BAD if differences else GOOD} {line}") for line in words]
    return Group(*parts)


def _verdict(groups: tuple[GroupResult, ...]) -> Text:
    if wrong := sum(not group.check.ok for group in groups):
        words = f"{wrong} of {len(groups)} properties do not hold: do not trust its numbers"
        return Text(f"{BAD} {words}", style=WRONG)
    return Text(f"{GOOD} this machine computes correctly: {len(groups)} properties hold")


def _groups(groups: tuple[GroupResult, ...]) -> Rows:
    columns = [
        Column("", right=False), Column("property", right=False), Column("cases"),
        Column("worst"), Column("allowed", drop=2), Column("time", drop=1),
    ]  # fmt: skip
    rows = [
        (
            Text(GOOD) if group.check.ok else Text(BAD, style=WRONG),
            group.check.words,
            str(group.cases),
            f"{group.check.value:.2g}",
            Text(f"{group.check.tolerance:.2g}", style=FAINT),
            Text(duration(group.seconds), style=FAINT),
        )
        for group in groups
    ]
    return Rows(columns, rows)


def _rates(rates: tuple[RateResult, ...]) -> Rows:
    columns = [
        Column("shape", right=False),
        Column("phase", right=False),
        Column("weights", right=False, drop=2),
        Column("tok/s"),
        Column("share", right=False),
        Column("÷ transformers", labelled=True, drop=1),
    ]
    rows = [
        (
            shape_words(rate.shape, rate.layers, rate.all_layers),
            rate.phase,
            rate.format,
            f"{rate.tokens_per_s:,.1f}",
            f"{percent(rate.share)} of {'read' if rate.phase == 'decode' else 'matrix'} rate",
            "" if rate.versus is None else f"{rate.versus:.2f}",
        )
        for rate in rates
    ]
    return Rows(columns, rows)


def _memory_words(one: MemoryResult) -> str:
    words = f"{one.shape}: estimated {size(one.estimated)}"
    if one.measured:
        off = one.estimated / one.measured - 1
        words += f", held {size(one.measured)} ({100 * off:+.0f} %)"
    return words
