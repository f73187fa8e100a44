"""The footer of a view: each of its checks, how far it is off, and how far it might be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType

from llmcli.render.layout import Dotted
from llmcli.render.theme import FAINT, one_line
from llmcli.reports.checks import ViewCheck

GOOD, BAD = "✓", "✗"
WRONG = "bold red"


def render_checks(checks: Sequence[ViewCheck]) -> RenderableType:
    """A line for each check, the place of the worst difference where one does not hold."""
    return Group(*(_line(check) for check in checks))


def _line(check: ViewCheck) -> RenderableType:
    if check.ok:
        parts = [f"{GOOD} {one_line(check.words)}", _apart(check)]
        return Dotted(parts, FAINT)
    parts = [f"{BAD} not so: {one_line(check.words)}", _apart(check)]
    if check.where:
        parts.append(f"worst at {one_line(check.where)}")
    return Dotted(parts, WRONG)


def _apart(check: ViewCheck) -> str:
    """`exactly`, or how far it is off and what is allowed."""
    if check.value == 0 and check.ok:
        return "exactly"
    if math.isnan(check.value):
        return "nan"
    return f"{_number(check.value)} of {_number(check.tolerance)} allowed"


def _number(value: float) -> str:
    return f"{value:.2g}"
