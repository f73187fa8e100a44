"""Files that a user gives: text, and JSON read into dataclasses. Errors name the place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llmcli.errors import UsageError
from llmcli.records.numbers import did_you_mean
from llmcli.records.ranges import Range
from llmcli.ui.theme import encodable, one_line

T = TypeVar("T")
Rule = Callable[[Any], str]  # what is wrong with a value, such as "is empty"; empty for nothing

MOST = 64 << 20  # bytes of a file: more than any context has; `/dev/zero` never ends
MOST_NESTED = 32  # lists and objects in each other
_SHOWN = 40  # characters of a wrong value in a message
_JSON: Mapping[Any, Any] = {  # how JSON writes what an annotation names; a dataclass is an object
    str: str, int: int | float, float: int | float, NoneType: NoneType, Literal: str, tuple: list,
    list: list,
}  # fmt: skip


def read_text(path: str) -> str:
    """A file as text, less one trailing newline.

    Raises UsageError naming the file where it cannot be read, is not UTF-8, or has more than
    64 MiB.
    """
    hint = "give the path of a file of text; a text itself goes in quotes, without an option"
    return decoded(read_bytes(path, hint, MOST + 1), f"`{path}`")


def read_bytes(path: str, hint: str, most: int) -> bytes:
    """The first `most` bytes of a file; raises UsageError with `hint`."""
    if not path:
        raise UsageError("the name of the file is empty", hint="give its path, or leave it out")
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read(most)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        system = error.strerror if isinstance(error, OSError) else None
        near = _near(path) if isinstance(error, FileNotFoundError) else ()
        raise UsageError(
            f"cannot read `{path}`: {(system or str(error)).lower()}",
            hint=did_you_mean(near, hint),
        ) from error


def _near(path: str) -> Sequence[str]:
    """The file in the same directory with the most similar name."""
    folder, name = os.path.split(path)
    try:
        there = os.listdir(os.path.expanduser(folder) or ".")
    except OSError:
        return ()
    return [os.path.join(folder, other) for other in get_close_matches(name, there, 1)]


def decoded(data: bytes, name: str) -> str:
    """UTF-8 as text, less one trailing newline; raises UsageError calling it `name`."""
    if len(data) > MOST:
        raise UsageError(
            f"{name} has more than {MOST >> 20} MiB, which is too much text for a model",
            hint="give a part of it, for example with `head -c 100000`",
        )
    refuse_wide(data, name)
    try:
        text = data.decode("utf-8-sig")  # a mark in front is no part of the text
    except UnicodeDecodeError as error:
        at = len(data) - len(error.object) + error.start  # which does not count the mark
        raise UsageError(
            f"{name} is not UTF-8 text: byte 0x{data[at]:02x} at offset {at}",
            hint="convert it first, for example with `iconv -f latin1 -t utf-8`",
        ) from error
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def refuse_wide(data: bytes, name: str) -> None:
    """Raises UsageError for UTF-16 and UTF-32, recognized by their byte order mark or NULs."""
    head, wide = data[:64], ""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        wide = "utf-32"
    elif data.startswith((b"\xff\xfe", b"\xfe\xff")):
        wide = "utf-16"
    elif len(head) > 3 and any(head[::2]) != any(head[1::2]):
        wide = "utf-16le" if any(head[::2]) else "utf-16be"
    if wide:
        raise UsageError(
            f"{name} is {wide.upper()} text, not UTF-8",
            hint=f"convert it first: `iconv -f {wide} -t utf-8`",
        )


def not_empty(value: Any) -> str:
    """A rule: a text or a list has something in it."""
    return "" if value else "is empty"


def parse(text: str | bytes, where: str, hint: str | None = None) -> Any:
    """The value of a JSON text. Raises UsageError naming the line and the column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = f"{error.msg[:1].lower()}{error.msg[1:]} at {line}column {error.colno}"
    except (ValueError, RecursionError) as error:  # not a text, too many digits, too deep
        reason = str(error)
    raise UsageError(f"{where} is not JSON: {reason}", hint=hint)


def read(kind: type[T], value: Any, where: str) -> T:
    """Reads a value of JSON into the dataclass `kind`; `where` names its file or line in errors.

    The annotations of its fields say what may stand there: str, int, float, Any, a Literal of
    texts, `tuple[X, ...]`, `list[X]`, `Mapping[str, X]`, a dataclass, a union of these, and
    `Annotated[X, …]` with a `Range` of numbers or a `Rule`. Class variables: `hint` of its errors,
    and `others = False` where other keys are refused. Its `__post_init__` may raise ValueError with
    what is wrong with the whole. Raises UsageError: "`messages[3].content` of `x.json` is not a
    text".
    """
    found: T = _Reader(where).value(kind, value, "")
    return found


def read_field(kind: type, name: str, value: Any) -> Any:
    """Reads a value into the field `name` of a dataclass. Raises UsageError naming the field."""
    return _Reader("").value(_hints(kind)[name], value, name)


class _Reader:
    """Reads values by their annotations; each stands at a `path` such as `messages[3].content`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._hint: str | None = None

    def value(self, kind: Any, value: Any, path: str) -> Any:
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated and isinstance(args[1], Range):
            return self._number(args[0], value, path, args[1])
        if origin is Annotated:
            found = self.value(args[0], value, path)
            if wrong := args[1](found):
                raise self._error(path, wrong)
            return found
        if origin in (Union, UnionType):
            fitting = (one for one in args if _fits(one, value))
            return self.value(next(fitting, args[0]), value, path)
        if kind in (int, float):
            return self._number(kind, value, path)
        if origin is Literal:
            if value not in args:
                listed = "one of " * (len(args) > 1) + ", ".join(f"`{one}`" for one in args)
                raise self._error(path, f"must be {listed}, not `{_shown(value)}`")
            return value
        if origin in (tuple, list):
            if not isinstance(value, list):
                raise self._error(path, "is not a list")
            return origin(self.value(args[0], v, f"{path}[{at}]") for at, v in enumerate(value))
        if kind not in (str, NoneType, Any):
            return self._object(kind, value, path)
        if kind is str and not isinstance(value, str):
            raise self._error(path, "is not a text")
        check_value(value, self._place(path))
        return value

    def _object(self, kind: Any, value: Any, path: str) -> Any:
        outer, self._hint = self._hint, getattr(kind, "hint", self._hint)
        if not isinstance(value, Mapping):
            raise self._error(path, "is not an object")
        inside = {name: f"{path}.{name}" if path else name for name in value}
        if get_origin(kind) is Mapping:
            inner = get_args(kind)[1]
            return {name: self.value(inner, one, inside[name]) for name, one in value.items()}
        known = {one.name: one for one in fields(kind)}
        unknown = next((name for name in value if name not in known), None)
        if unknown is not None and not getattr(kind, "others", True):
            raise self._error(path, f"has the unknown key `{one_line(unknown)}`")
        found = {}
        for name, one in known.items():
            if name in value:
                found[name] = self.value(_hints(kind)[name], value[name], inside[name])
            elif one.default is MISSING and one.default_factory is MISSING:
                raise self._error(path, f"has no `{name}`")
        try:
            whole = kind(**found)
        except ValueError as error:
            raise self._error(path, str(error)) from None
        self._hint = outer
        return whole

    def _number(self, kind: type, value: Any, path: str, allowed: Range | None = None) -> Any:
        """A number of JSON as an int or float; `1.0` is a whole number, too."""
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if sound and kind is int and isinstance(value, float):
            sound = value.is_integer()
        if sound and (allowed is None or value in allowed):
            return int(value) if kind is int else value
        words = "a whole number" if kind is int else "a number"
        if allowed is not None:
            words += f"{' of' * str(allowed).startswith('at least')} {allowed}"
        raise self._error(path, f"must be {words}, not `{_shown(value)}`")

    def _place(self, path: str) -> str:
        return " of ".join(filter(None, [f"`{one_line(path)}`" if path else "", self._where]))

    def _error(self, path: str, what: str) -> UsageError:
        return UsageError(f"{self._place(path)} {what}", hint=self._hint)


def _fits(kind: Any, value: Any) -> bool:
    """Whether JSON writes a `kind` as it writes this value."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return isinstance(value, _JSON.get(get_origin(base) or base, dict))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _shown(value: Any) -> str:
    text = one_line(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_value(value: Any, where: str) -> None:
    """Raises UsageError for a value that neither templates nor our own JSON can have.

    These are values nested deeper than `MOST_NESTED`, and texts with half a surrogate pair.
    """
    layer = [value]
    for _ in range(MOST_NESTED + 1):
        if any(isinstance(one, str) and encodable(one) != one for one in layer):
            raise UsageError(
                f"{where} has half a surrogate pair, which is not a character",
                hint="write both of `\\ud83d\\ude00`, or the character itself in UTF-8",
            )
        layer = [
            item
            for one in layer
            if isinstance(one, Mapping | list)
            for item in ([*one, *one.values()] if isinstance(one, Mapping) else one)
        ]
    if layer:
        raise too_deep(where)


def too_deep(where: str) -> UsageError:
    """The error for a value that is nested deeper than `MOST_NESTED`."""
    return UsageError(
        f"{where} is nested more than {MOST_NESTED} deep",
        hint="give plain values, such as true, 3 or a text",
    )
