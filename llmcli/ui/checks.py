"""The footer of a view: each of its checks, how far it is off, and how far it might be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.records.document import ViewCheck
from llmcli.records.numbers import counted
from llmcli.ui.layout import SEPARATOR
from llmcli.ui.theme import FAINT, one_line

GOOD, BAD = "✓", "✗"
_PLAIN = {GOOD: "ok", BAD: "FAIL"}  # where the terminal has ASCII alone
WRONG = "bold red"


def render_checks(
    checks: Sequence[ViewCheck], *, full: bool = True, option: str = "--checks"
) -> RenderableType:
    """A line for each check, with the place of the worst difference where one fails.

    Not `full`: one line for all that pass, and the `option` that shows them, if there is one.
    """
    wrong = [check for check in checks if not check.ok]
    if full or not checks:
        return Group(*(_line(check) for check in checks))
    passed = len(checks) - len(wrong)
    count = SEPARATOR.join(filter(None, (counted(passed, "check"), option)))
    lines = [Marked(GOOD, count, FAINT)] if passed else []
    return Group(*(_line(check) for check in wrong), *lines)


def _line(check: ViewCheck) -> RenderableType:
    if check.ok:
        return Marked(GOOD, SEPARATOR.join([one_line(check.words), _apart(check)]), FAINT)
    parts = [f"check failed: {one_line(check.words)}", _apart(check)]
    if check.where:
        parts.append(f"worst at {one_line(check.where)}")
    return Marked(BAD, SEPARATOR.join(parts), WRONG)


@dataclass(frozen=True)
class Marked:
    """A mark, and a text whose further lines begin below its first word."""

    mark: str
    text: str
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        mark = _PLAIN.get(self.mark, self.mark) if options.ascii_only else self.mark
        indent = len(mark) + 1
        lines = Text(self.text).wrap(console, max(8, options.max_width - indent))
        joined = Text("\n" + " " * indent).join(Text(line.plain.rstrip()) for line in lines)
        yield Text.assemble(f"{mark} ", joined, style=self.style)


def _apart(check: ViewCheck) -> str:
    """`exactly`, or how far it is off and what is allowed."""
    if check.value == 0 and check.ok:
        return "exactly"
    if math.isnan(check.value):
        return "nan"
    return f"{check.value:.2g} of {check.tolerance:.2g} allowed"
