"""`selftest` on a terminal: a line for each property, then rates and memory of real sizes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.selftest.report import Receipt, SelftestReport, compare
from llmcli.records.machine import Environment
from llmcli.ui.facts import ceiling_words
from llmcli.ui.layout import BAD, GOOD, WRONG, Column, Line, table
from llmcli.ui.numbers import duration, percent, size
from llmcli.ui.theme import FAINT, HEADING


def render_selftest(
    report: SelftestReport, receipt: Receipt | None, machine: Environment
) -> RenderableType:
    """The verdict, the properties, rates, memory, and what differs from a `receipt`."""
    verdict = Text(f"{GOOD} this machine computes correctly: {len(report.groups)} properties hold")
    if wrong := sum(not group.check.ok for group in report.groups):
        words = f"{wrong} of {len(report.groups)} properties do not hold: do not trust its numbers"
        verdict = Text(f"{BAD} {words}", style=WRONG)
    groups = table(report.groups, [
        (
            Column("", right=False),
            lambda one: Text(GOOD) if one.check.ok else Text(BAD, style=WRONG),
        ),
        (Column("property", right=False), lambda one: one.check.words),
        (Column("cases"), lambda one: str(one.cases)),
        (Column("worst"), lambda one: f"{one.check.value:.2g}"),
        (Column("allowed", drop=2), lambda one: Text(f"{one.check.tolerance:.2g}", style=FAINT)),
        (Column("time", drop=1), lambda one: Text(duration(one.seconds), style=FAINT)),
    ])  # fmt: skip
    parts: list[RenderableType] = [
        Text(f"selftest on {report.device}", style=HEADING), verdict, Text(), groups
    ]  # fmt: skip
    if report.rates:
        read = {"decode": "read", "prefill": "matrix"}
        rates = table(report.rates, [
            (Column("shape", right=False), lambda rate: rate.words),
            (Column("phase", right=False), lambda rate: rate.phase),
            (Column("weights", right=False, drop=2), lambda rate: rate.format),
            (Column("tok/s"), lambda rate: f"{rate.tokens_per_s:,.1f}"),
            (
                Column("share", right=False),
                lambda rate: f"{percent(rate.share)} of {read[rate.phase]} rate",
            ),
            (
                Column("÷ transformers", drop=1),
                lambda rate: "" if rate.versus is None else f"{rate.versus:.2f}",
            ),
        ])  # fmt: skip
        memory = []
        for one in report.memory:
            memory.append(f"{one.shape}: estimated {size(one.estimated)}")
            if one.measured:
                off = f"{100 * (one.estimated / one.measured - 1):+.0f} %"
                memory[-1] += f", held {size(one.measured)} ({off})"
        parts += [Text(), rates, Line(memory, FAINT)]
    if report.ceilings is not None:
        parts.append(Line(list(ceiling_words(report.ceilings)), FAINT))
    if report.refused:
        parts.append(Line([f"not run: {why}" for why in report.refused], FAINT))
    if receipt is not None:
        differences = compare(receipt, report, machine)
        lines = differences or ["as in the receipt"]
        parts += [Text(), Text(f"receipt of {receipt.processor}", style=HEADING)]
        parts += [Text(f"{BAD if differences else GOOD} {line}") for line in lines]
    return Group(*parts)
