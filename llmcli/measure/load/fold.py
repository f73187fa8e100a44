"""Lines of a ledger with the layers that are alike in one row."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from llmcli.reports.load import LedgerLine, pooled
from llmcli.reports.numbers import spans


def folded(lines: Iterable[LedgerLine]) -> tuple[LedgerLine, ...]:
    """A row for tensors that differ in nothing but the first number of their names.

    That is the layer's. What else is different, such as a stored format or where a number is not
    finite, stays apart; the numbers are of all of them, and bytes add up.
    """
    rows: dict[Hashable, list[LedgerLine]] = {}
    for line in lines:
        template = replace(
            line, parameter=_open(line.parameter)[0], source=_open(line.source)[0],
            reason=_open(line.reason)[0], bytes=0, numbers=None,
        )  # fmt: skip
        layers = {_open(name)[1] for name in (line.parameter, line.source, line.reason) if name}
        alike = len(layers - {None}) < 2
        rows.setdefault((template, _bad(line), alike or line.source), []).append(line)
    return tuple(_row(row) for row in rows.values())


def _row(lines: Sequence[LedgerLine]) -> LedgerLine:
    if len(lines) == 1:
        return lines[0]
    parts = [line.numbers for line in lines if line.numbers is not None]
    return replace(
        lines[0],
        parameter=_together([line.parameter for line in lines]),
        source=_together([line.source for line in lines]),
        reason=_together([line.reason for line in lines]),
        bytes=sum(line.bytes for line in lines),
        numbers=pooled(parts) if parts else None,
        tensors=len(lines),
    )


def _bad(line: LedgerLine) -> Hashable:
    """What is not finite in it; None where nobody looked."""
    found = line.numbers
    return found and (found.nan, found.infinite, found.negative, found.first_bad)


def _together(names: Sequence[str]) -> str:
    """`blocks.{0-3,5}.ln1.w` for names of layers; without numbers the one that they all have."""
    template, _ = _open(names[0])
    numbers = sorted({number for name in names if (number := _open(name)[1]) is not None})
    return template.replace("{}", f"{{{spans(numbers)}}}", 1) if numbers else names[0]


def _open(name: str) -> tuple[str, int | None]:
    """The name with `{}` for its first number, and that number; as it is without one.

    At most six digits: names are a stranger's.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isascii() and part.isdigit() and len(part) <= 6 and part == str(int(part)):
            return ".".join((*parts[:at], "{}", *parts[at + 1 :])), int(part)
    return name, None
