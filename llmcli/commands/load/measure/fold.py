"""Lines of a ledger with the layers that are alike in one row."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from llmcli.commands.load.report import LedgerLine, pooled
from llmcli.reports.numbers import spans

# Between dots or in brackets; at most six digits, for names are a stranger's.
_NUMBER = re.compile(r"(?<![^.\[])(?:0|[1-9][0-9]{0,5})(?![^.\]])")


def folded(lines: Iterable[LedgerLine]) -> tuple[LedgerLine, ...]:
    """A row for tensors that differ in nothing but the first two numbers of their names.

    These are the layer's and, in it, the expert's. What else is different, such as a stored format
    or where a number is not finite, stays apart; the numbers are of all of them, and bytes add up.
    """
    return _folded(_folded(lines, 1), 0)


def _folded(lines: Iterable[LedgerLine], which: int) -> tuple[LedgerLine, ...]:
    """Lines that differ in that number alone, in one each."""
    rows: dict[Hashable, list[LedgerLine]] = {}
    for line in lines:
        template = replace(
            line, parameter=_open(line.parameter, which)[0], source=_open(line.source, which)[0],
            reason=_open(line.reason, which)[0], bytes=0, numbers=None,
        )  # fmt: skip
        names = (line.parameter, line.source, line.reason)
        numbers = {_open(name, which)[1] for name in names if name}
        alike = len(numbers - {None}) < 2
        rows.setdefault((template, _bad(line), alike or line.source), []).append(line)
    return tuple(_row(row, which) for row in rows.values())


def _row(lines: Sequence[LedgerLine], which: int) -> LedgerLine:
    if len(lines) == 1:
        return lines[0]
    parts = [line.numbers for line in lines if line.numbers is not None]
    return replace(
        lines[0],
        parameter=_together([line.parameter for line in lines], which),
        source=_together([line.source for line in lines], which),
        reason=_together([line.reason for line in lines], which),
        bytes=sum(line.bytes for line in lines),
        numbers=pooled(parts) if parts else None,
        tensors=sum(line.tensors for line in lines),
    )


def _bad(line: LedgerLine) -> Hashable:
    """What is not finite in it; None where it was not checked."""
    found = line.numbers
    return found and (found.nan, found.infinite, found.negative, found.first_bad)


def _together(names: Sequence[str], which: int) -> str:
    """`blocks.{0-3,5}.ln1.w` for names of layers; without numbers the one that they all have."""
    template, _ = _open(names[0], which)
    numbers = sorted({number for name in names if (number := _open(name, which)[1]) is not None})
    return template.replace("{}", f"{{{spans(numbers)}}}", 1) if numbers else names[0]


def _open(name: str, which: int) -> tuple[str, int | None]:
    """The name with `{}` for its number `which` (0: the first), and that number.

    As it is where it has fewer.
    """
    found = next(islice(_NUMBER.finditer(name), which, None), None)
    if found is None:
        return name, None
    return f"{name[: found.start()]}{{}}{name[found.end() :]}", int(found[0])
