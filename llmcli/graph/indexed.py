"""Parses `NAME[INDEX]`: a name, and numbers and quoted tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmcli.errors import UsageError
from llmcli.records.numbers import did_you_mean

EXAMPLE = "for example `blocks.0.attn.pattern[0,1,0]` or `logits[-1,' the']`"

_ITEM = re.compile(
    r"""\s*(?:(?P<number>[+-]?\d+)|'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)")
    \s*(?P<end>,|$)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[\da-fA-F]{2})|u(?P<u>[\da-fA-F]{4})|U(?P<U>[\da-fA-F]{8})|(?P<one>.))",
    re.DOTALL | re.ASCII,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_WHOLE = "quote all of it, with single quotes inside: \"logits[-1,' the']\""
_ONE = "a number is meant, no globs or ranges"


@dataclass(frozen=True)
class NumberRef:
    """A parsed reference: a name, and its index as numbers and quoted tokens (None: no index)."""

    name: str
    items: tuple[int | str, ...] | None

    @property
    def parameter(self) -> bool:
        """Whether the name is a parameter's (`W_q`, `b`, or `weight`), which needs no prompt."""
        return re.fullmatch(r"[Wb](_\w+)?|w|weight|bias", self.name.rpartition(".")[2]) is not None


def parse(text: str) -> NumberRef:
    """Parse `NAME[INDEX]`; raises UsageError for invalid text."""
    inner = re.match(r"([\w.]*)\[(\d+)\](?=\.)", text.strip(), re.ASCII)
    if inner is not None:  # `blocks[0].attn.q[…]`, as in code
        whole = f"{inner[1]}.{inner[2]}{text.strip()[inner.end() :]}"
        raise UsageError(f"`{text}` has an index in its name", hint=did_you_mean([whole]))
    name, bracket, rest = text.strip().partition("[")
    name = name.strip()
    if name[:1] in ("'", '"'):
        raise UsageError(f"`{text}` begins with a quote that the shell has left", hint=_WHOLE)
    if re.search(r"[*?{}:]", name):
        raise UsageError(f"`{name}` does not name one tensor", hint=f"{_ONE}; {EXAMPLE}")
    if re.search(r"\s", name):
        raise UsageError(f"`{text}` is not a name: it comes first, then the text", hint=EXAMPLE)
    if not name:
        raise UsageError(f"`{text}` has no name", hint=EXAMPLE)
    if not bracket:
        return NumberRef(name, None)
    rest = rest.rstrip()
    if not rest.endswith("]"):
        raise (
            split_by_the_shell(text)
            if "]" not in rest
            else UsageError(f"`{text}` does not end with its `]`", hint=EXAMPLE)
        )
    return NumberRef(name, _items(rest[:-1], text))


def split_by_the_shell(word: str) -> UsageError:
    """The error for a word such as `logits[-1,`, split by the shell from `logits[-1, 'a']`."""
    return UsageError(
        f"`{word}` has no `]`: the shell split NAME[INDEX]",
        hint=_WHOLE,
    )


def _items(inside: str, text: str) -> tuple[int | str, ...]:
    found: list[int | str] = []
    at, more = 0, bool(inside.strip())
    while more:
        item = _ITEM.match(inside, at)
        if item is None:
            raise _unread(inside, at, text)
        if item["number"] is not None:
            if len(item["number"]) > 18:
                raise UsageError(
                    f"`{item['number'][:40]}…` is outside the axis: none is as long", hint=EXAMPLE
                )
            found.append(int(item["number"]))
        else:
            found.append(_ESCAPE.sub(_character, item["single"] or item["double"] or ""))
        at, more = item.end(), item["end"] == ","
    return tuple(found)


def _unread(inside: str, at: int, text: str) -> UsageError:
    """The error for an invalid item, from `at` to the next comma."""
    wrong = inside[at:].partition(",")[0].strip() or "nothing"
    if re.search(r"[*:?]|\.\.", wrong) or re.fullmatch(r"\d+\s*-\s*\d+", wrong):
        return UsageError(f"`{wrong}` in `{text}` is not one number", hint=f"{_ONE}; {EXAMPLE}")
    return UsageError(
        f"`{wrong}` in `{text}` is neither a number nor a quoted token",
        hint=_quote(inside, at, text.partition("[")[0].strip()),
    )


def _quote(inside: str, at: int, name: str) -> str:
    """A hint for the item at `at`; a bare word is taken as an unquoted token."""
    word, comma, rest = inside[at:].partition(",")
    if not re.fullmatch(r"\s*\w+\s*", word) or word.strip()[0].isdecimal():
        return EXAMPLE + "; the shell needs quotes around all of it"
    whole = f"{name}[{inside[:at]}'{word.rstrip()}'{comma}{rest}]"
    return f'a token needs quotes, and so does all of it for the shell: "{whole}"'


def _character(escape: re.Match[str]) -> str:
    hexadecimal = escape["x"] or escape["u"] or escape["U"]
    try:
        return chr(int(hexadecimal, 16)) if hexadecimal else _ESCAPES[escape["one"]]
    except (KeyError, ValueError, OverflowError):
        raise UsageError(
            f"unknown escape `{escape[0]}`",
            hint="these are: \\n \\t \\r \\\\ \\' \\\" \\xNN \\uNNNN \\UNNNNNNNN; for part of a "
            "character give its position or id",
        ) from None
