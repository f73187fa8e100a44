"""What holds of a model's files and what does not, in lines with a mark."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from llmcli.commands.load.report import Claim, LoadReport, Shared
from llmcli.reports.numbers import counted
from llmcli.ui.checks import BAD, GOOD, WRONG, Marked, render_checks
from llmcli.ui.layout import SEPARATOR
from llmcli.ui.stats import size
from llmcli.ui.theme import FAINT, one_line

LABEL = "!"  # a label that is not true, which nothing depends on
_DOUBTFUL = "yellow"


def verdicts(report: LoadReport) -> Iterator[RenderableType]:
    """What is shared, then what holds and what does not, the numbers and the whole last."""
    for shared in report.shared:
        yield Text(one_line(_shared(shared)), style=FAINT)
    if report.fault:
        yield Marked(BAD, one_line(report.fault), WRONG)
    elif not any(line.parameter for line in report.lines):
        words = "there is no config.json: of which model these tensors are, is not known"
        yield Text(words, style=FAINT)
    else:
        yield Marked(GOOD, "every parameter has its tensor, and every tensor its place", FAINT)
    yield from map(_claim, report.claims)
    yield render_checks(report.checks)
    for note in report.notes:
        yield Marked(LABEL, one_line(note), _DOUBTFUL)
    if report.not_finite:
        yield Marked(BAD, one_line(report.not_finite), WRONG)
    else:
        words = f"no NaN and no infinity in {counted(report.looked_at, 'number')}"
        yield Marked(GOOD, words, FAINT)
    if report.ok:
        yield _whole(report)


def wrong(report: LoadReport) -> Iterator[RenderableType]:
    """The verdicts that are not good, else the last one."""
    if report.fault:
        yield Marked(BAD, one_line(report.fault), WRONG)
    yield from (_claim(claim) for claim in report.claims if not claim.ok)
    failed = [check for check in report.checks if not check.ok]
    if failed:
        yield render_checks(failed)
    if report.not_finite:
        yield Marked(BAD, one_line(report.not_finite), WRONG)
    if report.ok:
        yield _whole(report)


def _whole(report: LoadReport) -> RenderableType:
    tensors = len({line.source for line in report.lines})
    fitted = any(line.parameter for line in report.lines)  # each has its place
    checks = len(report.checks) + len(report.claims) + fitted + 1  # and each is finite
    return Marked(GOOD, f"whole: {counted(tensors, 'tensor')}, {counted(checks, 'check')}", FAINT)


def _shared(shared: Shared) -> str:
    if shared.kind == "tied":
        return f"{shared.names[0]} is {shared.names[1]}: one matrix of {size(shared.bytes)}"
    names = " and ".join(shared.names[:3])
    more = f" and {len(shared.names) - 3} more" if len(shared.names) > 3 else ""
    return f"{names}{more} hold the same numbers, {size(shared.bytes)} each"


def _claim(claim: Claim) -> RenderableType:
    what = one_line(claim.what)
    says, holds = one_line(claim.says), one_line(claim.holds)
    if claim.ok:
        there = "" if says == holds else SEPARATOR + holds
        return Marked(GOOD, f"{what}: {says}{there}", FAINT)
    words = f"{what}: {says}, but it is {holds}"
    return Marked(BAD, words, WRONG) if claim.must else Marked(LABEL, words, _DOUBTFUL)
