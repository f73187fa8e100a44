"""`NAME[INDEX]` as it was typed: a name, and numbers and quoted tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmcli.errors import UsageError

EXAMPLE = "for example `blocks.0.attn.pattern[0,1,0]` or `logits[-1,' the']`"

_ITEM = re.compile(
    r"""\s*(?:(?P<number>[+-]?\d{1,18})|'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)")
    \s*(?P<end>,|$)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class Wanted:
    """What was typed: a name, and its index as numbers and quoted tokens (None: no index)."""

    name: str
    items: tuple[int | str, ...] | None


def parse(text: str) -> Wanted:
    """Reads `NAME[INDEX]`; raises UsageError for what is none."""
    inner = re.match(r"([\w.]*)\[(\d+)\](?=\.)", text.strip(), re.ASCII)
    if inner is not None:  # `blocks[0].attn.q[…]`, as a program would write it
        whole = f"{inner[1]}.{inner[2]}{text.strip()[inner.end():]}"
        raise UsageError(f"`{text}` has an index in its name", hint=f"did you mean `{whole}`?")
    name, bracket, rest = text.strip().partition("[")
    name = name.strip()
    if not name:
        raise UsageError(f"`{text}` has no name", hint=EXAMPLE)
    if not bracket:
        return Wanted(name, None)
    rest = rest.rstrip()
    if not rest.endswith("]"):
        raise split_by_the_shell(text) if "]" not in rest else UsageError(
            f"`{text}` does not end with its `]`", hint=EXAMPLE
        )
    return Wanted(name, _items(rest[:-1], text))


def split_by_the_shell(word: str) -> UsageError:
    """For a word such as `logits[-1,`, which the shell has made of `logits[-1, 'a']`."""
    return UsageError(
        f"`{word}` has no `]`: the shell split NAME[INDEX]",
        hint="quote all of it, with single quotes inside: \"logits[-1,' the']\"",
    )


def _items(inside: str, text: str) -> tuple[int | str, ...]:
    found: list[int | str] = []
    at, more = 0, bool(inside.strip())
    while more:
        item = _ITEM.match(inside, at)
        if item is None:
            wrong = inside[at:].strip() or "nothing"
            raise UsageError(
                f"`{wrong}` in `{text}` is neither a number nor a quoted token",
                hint=_quote(inside, at, text.partition("[")[0].strip()),
            )
        if item["number"] is not None:
            found.append(int(item["number"]))
        else:
            found.append(_unescaped(item["single"] or item["double"] or ""))
        at, more = item.end(), item["end"] == ","
    return tuple(found)


def _quote(inside: str, at: int, name: str) -> str:
    """What to type instead of the item at `at`; a bare word is a token without its quotes."""
    word, comma, rest = inside[at:].partition(",")
    if not re.fullmatch(r"\s*\w+\s*", word) or word.strip()[0].isdecimal():
        return EXAMPLE + "; the shell needs quotes around all of it"
    whole = f"{name}[{inside[:at]}'{word.rstrip()}'{comma}{rest}]"
    return f"a token needs quotes, and so does all of it for the shell: \"{whole}\""


def _unescaped(text: str) -> str:
    return re.sub(
        r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text, flags=re.DOTALL
    )
