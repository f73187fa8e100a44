"""Formatting of numbers and names."""

from __future__ import annotations

import re
from collections.abc import Sequence


def spans(numbers: Sequence[int]) -> str:
    """`0-3,5,7-8` for ascending numbers."""
    out: list[list[int]] = []
    for number in numbers:
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """`layer 3`, `layers 0-3,5` for ascending numbers."""
    return f"{noun}{'s' * (len(numbers) != 1)} {spans(numbers)}"


def together(names: Sequence[str]) -> str:
    """`h.{0-3,5}.w` for names that differ in one number only; else the first name."""
    split = [re.split(r"([0-9]+)", name) for name in names]
    differ = [at for at, parts in enumerate(zip(*split, strict=False)) if len(set(parts)) > 1]
    if len({len(parts) for parts in split}) > 1 or len(differ) != 1 or differ[0] % 2 == 0:
        return names[0]
    numbers = sorted({int(parts[differ[0]]) for parts in split})
    split[0][differ[0]] = f"{{{spans(numbers)}}}"
    return "".join(split[0])


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `1,200 tensors`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(names: Sequence[str], otherwise: str = "") -> str:
    """A hint that names what may have been meant, or `otherwise` where there are no such names."""
    return f"did you mean {either([f'`{name}`' for name in names])}?" if names else otherwise


def best_groups(kept: int, groups: int, best: int) -> str:
    """The eligible groups of experts, in words: `2 of 4 groups by their largest`."""
    return f"{kept} of {groups} groups by {scored(best)}"


def scored(best: int) -> str:
    """The definition of a group's score, in words."""
    return "their largest" if best == 1 else f"the sum of their {best} largest"
