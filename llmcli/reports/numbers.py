"""Numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def spans(numbers: Sequence[int]) -> str:
    """`0-3,5,7-8` for rising numbers."""
    out: list[list[int]] = []
    for number in numbers:
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `1,200 tensors`."""
    return f"{number:,} {noun}" + "s" * (number != 1)
