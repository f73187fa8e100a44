"""Lists and ranges of numbers, as llama-bench spells them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmcli.errors import UsageError

_RANGE = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
_DIGITS = 18  # Python refuses to read thousands of them
MOST = 10_000  # values of one option: nobody waits for more, and a typo is quickly that long
LARGEST = 2**31 - 1
_FLAGS = {"0": False, "1": True}

Given = Sequence[str] | None


def numbers(
    option: str, given: Given, default: Sequence[int], *, least: int = 0, most: int = LARGEST
) -> tuple[int, ...]:
    """`16,32`, `1-4`, `1-9+2`, `1-8*2`, or several of these: the values in the order given.

    Raises UsageError for what is none of these, and for values that are out of bounds.
    """
    if given is None:
        return tuple(default)
    found: list[int] = []
    for text in given:
        for part in text.split(","):
            found += _range(option, part, most)
            if len(found) > MOST:
                raise UsageError(f"`{option} {text}` are more than {MOST:,} values")
    for value in found:
        if not least <= value <= most:
            bounds = f"at least {least}" if value < least else f"at most {most}"
            raise UsageError(f"`{option}` must be {bounds}, not `{value}`")
    return tuple(found)


def _range(option: str, part: str, most: int) -> list[int]:
    match = _RANGE.fullmatch(part.strip())
    if not part.strip():
        raise UsageError(f"`{option}` has an empty value", hint=f"write `{option} 16,32`")
    if match is None:
        raise UsageError(
            f"`{option}` takes numbers, not `{part}`",
            hint=f"write `{option} 16,32`, `1-4`, `1-9+2` or `1-8*2`",
        )
    for digits in filter(None, match.group(1, 2, 4)):
        if len(digits) > _DIGITS:
            raise UsageError(f"`{option}` must be at most {most}, not `{digits[:_DIGITS]}…`")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    multiply, step = match[3] == "*", int(match[4] or 1)
    if last < first:
        raise UsageError(f"`{option} {part}` ends before it begins")
    found = [first]
    while True:
        value = found[-1] * step if multiply else found[-1] + step
        if value <= found[-1]:
            if last == first:
                return found
            raise UsageError(f"the steps of `{option} {part}` lead nowhere")
        if value > last or len(found) > MOST:
            return found
        found.append(value)


def pairs(option: str, given: Given) -> tuple[tuple[int, int], ...]:
    """`512,128` of every `-pg`: a prompt, and tokens after it. Raises UsageError."""
    found = []
    for text in given or ():
        parts = text.split(",")
        if len(parts) != 2:
            raise UsageError(
                f"`{option}` takes two numbers, not `{text}`",
                hint=f"write `{option} 512,128`, once for each pair",
            )
        for part in parts:
            if not re.fullmatch(r"\d+", part.strip(), re.ASCII):
                raise UsageError(
                    f"`{option}` takes two numbers and no ranges, not `{text}`",
                    hint=f"write `{option} 512,128`, once for each pair",
                )
        (prompt,), (new,) = (numbers(option, [part], ()) for part in parts)
        found.append((prompt, new))
    return tuple(found)


def flags(option: str, given: Given, default: bool) -> tuple[bool, ...]:
    """`0`, `1`, or `0,1`. Raises UsageError."""
    texts = [part.strip() for text in given or () for part in text.split(",")]
    for text in texts:
        if text not in _FLAGS:
            raise UsageError(f"`{option}` takes 0 or 1, not `{text}`")
    return tuple(_FLAGS[text] for text in texts) or (default,)


def words(
    option: str,
    given: Given,
    default: str,
    *,
    allowed: Sequence[str] = (),
    separator: str = ",",
) -> tuple[str, ...]:
    """Names separated by commas; only those `allowed`, where any are. Raises UsageError."""
    texts = [part.strip() for text in given or () for part in text.split(separator)]
    for text in texts:
        if not text:
            raise UsageError(f"`{option}` has an empty value")
        if allowed and text not in allowed:
            raise UsageError(
                f"`{option}` has no choice `{text}`", hint=f"choose from {', '.join(allowed)}"
            )
    return tuple(texts) or (default,)
