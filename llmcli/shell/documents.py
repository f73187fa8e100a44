"""JSON that a user gives, read into dataclasses; an error names the place of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llmcli.errors import UsageError
from llmcli.shell.params import Range
from llmcli.ui.theme import encodable, one_line

T = TypeVar("T")
Rule = Callable[[Any], str]  # what is wrong with a value, such as "is empty"; empty for nothing

MOST_NESTED = 32  # lists and objects in each other
_SHOWN = 40  # characters of a wrong value in a message
_JSON: Mapping[Any, Any] = {  # how JSON writes what an annotation names; a dataclass is an object
    str: str, int: int | float, float: int | float, bool: bool, NoneType: NoneType, Literal: str,
    tuple: list, list: list,
}  # fmt: skip


def not_empty(value: Any) -> str:
    """A rule: a text or a list has something in it."""
    return "" if value else "is empty"


@dataclass(frozen=True)
class Place:
    """Where a value stands: `path`, such as `messages[3].content`, in the file or line `where`."""

    where: str
    path: str = ""
    hint: str | None = None

    def __str__(self) -> str:
        return f"`{one_line(self.path)}` of {self.where}" if self.path else self.where

    def member(self, name: str) -> Place:
        """A member of the object that stands here."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> Place:
        """An item of the list that stands here."""
        return replace(self, path=f"{self.path}[{index}]")

    def error(self, what: str) -> UsageError:
        """`what` is wrong with the value that stands here."""
        return UsageError(f"{self} {what}", hint=self.hint)


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
    """Reads a value of JSON into the dataclass `kind`.

    The annotations of its fields say what may stand there: str, int, float, bool, Any, a Literal of
    texts, `tuple[X, ...]`, `list[X]`, `Mapping[str, X]`, a dataclass, a union of these, and
    `Annotated[X, …]` with a `Range` of numbers or a `Rule`. Class variables: `hint` of its errors,
    and `others = False` where other keys are refused. Its `__post_init__` may raise ValueError with
    what is wrong with the whole. Raises UsageError: "`messages[3].content` of `x.json` is not a
    text".
    """
    found: T = read_at(kind, value, Place(where))
    return found


def read_field(kind: type, name: str, value: Any) -> Any:
    """Reads a value into the field `name` of a dataclass. Raises UsageError naming the field."""
    return read_at(_hints(kind)[name], value, Place(f"`{name}`"))


def read_at(kind: Any, value: Any, place: Place) -> Any:
    """Reads a value into what any annotation of `read` names."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, rule = args
        if isinstance(rule, Range):
            return _number(base, value, place, rule)
        found = read_at(base, value, place)
        if wrong := rule(found):
            raise place.error(wrong)
        return found
    if origin in (Union, UnionType):
        return read_at(next((one for one in args if _fits(one, value)), args[0]), value, place)
    if kind is Any:
        check_value(value, str(place))
    elif origin is Literal:
        if value not in args:
            listed = "one of " * (len(args) > 1) + ", ".join(f"`{one}`" for one in args)
            raise place.error(f"must be {listed}, not `{_shown(value)}`")
    elif kind in (int, float):
        return _number(kind, value, place)
    elif origin in (tuple, list):
        if not isinstance(value, list):
            raise place.error("is not a list")
        return origin(read_at(args[0], one, place.item(at)) for at, one in enumerate(value))
    elif origin is Mapping or is_dataclass(kind):
        place = replace(place, hint=getattr(kind, "hint", place.hint))
        if not isinstance(value, Mapping):
            raise place.error("is not an object")
        if origin is None:
            return _object(kind, value, place)
        return {name: read_at(args[1], one, place.member(name)) for name, one in value.items()}
    elif not isinstance(value, kind):
        raise place.error("is not a text" if kind is str else "is not true or false")
    else:
        check_value(value, str(place))
    return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether JSON writes a `kind` as it writes this value."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return isinstance(value, _JSON.get(get_origin(base) or base, dict))


def _object(kind: Any, value: Mapping[str, Any], place: Place) -> Any:
    hints = _hints(kind)
    known = {one.name: one for one in fields(kind)}
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None and not getattr(kind, "others", True):
        raise place.error(f"has the unknown key `{one_line(unknown)}`")
    found = {}
    for name, one in known.items():
        if name in value:
            found[name] = read_at(hints[name], value[name], place.member(name))
        elif one.default is MISSING and one.default_factory is MISSING:
            raise place.error(f"has no `{name}`")
    try:
        return kind(**found)
    except ValueError as error:
        raise place.error(str(error)) from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _number(kind: type, value: Any, place: Place, allowed: Range | None = None) -> Any:
    """A number of JSON as an int or float; `1.0` is a whole number, too."""
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if sound and kind is int:
        sound = float(value).is_integer() if isinstance(value, float) else True
    if sound and (allowed is None or value in allowed):
        return int(value) if kind is int else value
    words = "a whole number" if kind is int else "a number"
    if allowed is not None:
        words += f"{' of' * str(allowed).startswith('at least')} {allowed}"
    raise place.error(f"must be {words}, not `{_shown(value)}`")


def _shown(value: Any) -> str:
    text = one_line(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_value(value: Any, where: str) -> None:
    """Raises UsageError for a value of JSON that no template takes, and no JSON of ours can have.

    So are those nested deeper than `MOST_NESTED`, and texts with half a surrogate pair.
    """
    layer = [value]
    for _ in range(MOST_NESTED + 1):
        if any(isinstance(one, str) and encodable(one) != one for one in layer):
            raise UsageError(
                f"{where} has half a surrogate pair, which is not a character",
                hint="write both of `\\ud83d\\ude00`, or the character itself in UTF-8",
            )
        groups = [[*one, *one.values()] if isinstance(one, Mapping) else one for one in layer
                  if isinstance(one, Mapping | list)]  # fmt: skip
        layer = [item for group in groups for item in group]
    if layer:
        raise too_deep(where)


def too_deep(where: str) -> UsageError:
    """The error for a value that is nested deeper than `MOST_NESTED`."""
    return UsageError(
        f"{where} is nested more than {MOST_NESTED} deep",
        hint="give plain values, such as true, 3 or a text",
    )
