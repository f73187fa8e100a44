"""What one run of a chat template may use: time, characters made, items of `range`.

Python's own operations cannot be interrupted, so those that write more than they are given are
looked at before they run. Without jinja2: `llmcli.text.sandbox` says where the checks stand.
"""

from __future__ import annotations

import re
import string
import time
import types
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from typing import Any

MAX_OUTPUT = 1 << 24  # characters beyond what the messages themselves bring
MAX_MADE = 16  # times the limit of one string: what all of a run's strings have together
MAX_SECONDS = 2.0  # and one for every million characters; real templates need milliseconds
MAX_ITEMS = 100_000  # of all a run's ranges together; Jinja's own bound is for each
MAX_WIDTH = 9999  # to which a text is padded
MAX_BITS = 1 << 16
ITEM = 32  # characters that one item of a list counts for: it takes about as many bytes
_LONG_NUMBER = re.compile(r"\d{5,}")
_PADDING = {"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "to_bytes", "batch",
            "slice", "wordwrap", "round"}  # fmt: skip

_HOLDERS = ("LoopContext", "Cycler")
_LISTS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class Meter:
    """Counts for one run; every method raises OverflowError or TimeoutError at its bound."""

    def __init__(self, content: int) -> None:
        """`content`: characters of the messages, on top of which the bounds lie."""
        self.limit = MAX_OUTPUT + 8 * content
        self._left = MAX_MADE * self.limit
        self._items = MAX_ITEMS
        self._seconds = MAX_SECONDS + content / 1e6
        self._end = time.monotonic() + self._seconds

    def tick(self) -> bool:
        """True while there is time."""
        if time.monotonic() > self._end:
            raise TimeoutError(f"it takes more than {self._seconds:.3g} seconds")
        return True

    def ticking(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, as long as there is time and room for a list of them."""
        for count, item in enumerate(items):
            self.tick()
            self.check(ITEM * count)
            yield item

    def check(self, size: int) -> None:
        """Room for one string of that many characters."""
        if size > self.limit:
            raise OverflowError(f"it makes a string of more than {self.limit} characters")

    def made(self, value: Any) -> Any:
        """Count the value, without what its items hold, and hand it back."""
        self._count(_size(value))
        return value

    def written(self, value: Any) -> Any:
        """Count the value as the text that `str` makes of it, and hand it back."""
        self._count(weight(value))
        return value

    def compared(self, *values: Any) -> None:
        """Before they are compared, sorted or hashed: bounds what those that hold others hold."""
        for value in values:
            if isinstance(value, (dict, *_LISTS)):
                self.check(weight(value))

    def _count(self, size: int) -> None:
        self.check(size)
        self._left -= size
        if self._left < 0:
            raise OverflowError("its strings together are too long")

    def range(self, *bounds: int) -> range:
        """Python's range, out of the run's one budget."""
        found = range(*bounds)
        self._items -= len(found)
        if self._items < 0:
            raise OverflowError(f"its ranges have more than {MAX_ITEMS} items")
        return found

    def binary(self, operator: str, left: Any, right: Any) -> None:
        """Before an operator runs."""
        if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise OverflowError("a power that is too large")
        if operator == "*":
            numbers = [item for item in (left, right) if isinstance(item, int)]
            if len(numbers) == 2 and sum(map(int.bit_length, numbers)) > MAX_BITS:
                raise OverflowError("a number that is too large")
            for item, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    self.check(_size(item) * count)
        elif operator == "+":
            self.check(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self.growth("%", left, right if isinstance(right, tuple) else (right,), {})

    def method(self, called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call: where it is a method of a string or a number that can write a lot."""
        called = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        if is_text_method(called):
            self.growth(called.__name__, called.__self__, args, kwargs)

    def growth(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a method or a filter of that name writes `value` with these arguments."""
        given = [*args, *kwargs.values()]
        widest = max((abs(item) for item in given if isinstance(item, int)), default=0)
        if name in _PADDING and widest > MAX_WIDTH:
            raise OverflowError(f"`{name}` with a number above {MAX_WIDTH}")
        longest = max(map(weight, given), default=0)
        if name in ("%", "format", "format_map"):
            text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
            fields = _percent(text, widest) if name == "%" else _braces(text)
            self.check(len(text) + fields * (longest + MAX_WIDTH))
        elif name == "replace":
            whole: Any = value if isinstance(value, str | bytes) else str(value)
            old = kwargs.get("old", args[0] if args else "")
            found = isinstance(old, str) and isinstance(whole, str) and old
            count = whole.count(old) if found else len(whole) + 1
            self.check(len(whole) + count * longest)
        elif name == "join":
            items = given[0] if isinstance(value, str | bytes) and given else value
            between = weight(value) if items is not value else longest
            count = len(items) if isinstance(items, list | tuple | dict | str) else 0
            self.check(weight(items) + count * between)
        elif name == "expandtabs":
            tabs = value.count(b"\t" if isinstance(value, bytes) else "\t")
            self.check(len(value) + tabs * (widest or 8))
        elif name in ("translate", "wordwrap"):
            self.check((1 + weight(value)) * (1 + longest))
        elif name == "title":
            self.check(8 * weight(value))  # a list of its words, each an object
        elif name == "indent":
            self.check(weight(value) + len(str(value).splitlines()) * (longest + widest))


def is_text_method(called: Any) -> bool:
    """Whether it is a method of a string or a number."""
    bound = isinstance(called, types.BuiltinMethodType | types.MethodType)
    return bound and isinstance(called.__self__, str | bytes | int)


CURRENT: ContextVar[Meter] = ContextVar("meter of the template that runs")


def weight(value: Any) -> int:
    """About the characters that `str` would write: an object in a list twice counts twice."""
    return len(value) if isinstance(value, str | bytes) else _weight(value, {})


def _weight(value: Any, known: dict[int, tuple[int, Any]]) -> int:
    if type(value).__name__ in _HOLDERS:
        return 1 << 40  # a format could reach what it holds
    if id(value) in known:
        return known[id(value)][0]
    parts = _parts(value)
    if parts is None:
        return _size(value) + 8
    known[id(value)] = 0, parts
    # The parts are kept: a view makes new ones, whose ids others would have after them.
    known[id(value)] = 8 + sum(_weight(part, known) for part in parts), parts
    return known[id(value)][0]


def _parts(value: Any) -> Sequence[Any] | None:
    """What a container holds, None for what is none."""
    if type(value).__name__ == "Namespace":  # Jinja's; it hides all other attributes
        value = value._Namespace__attrs
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return value
    return list(value) if isinstance(value, _LISTS) else None


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple | dict | set) else 0


def _percent(text: str, widest: int) -> int:
    """Fields of a `%` format, each at most MAX_WIDTH wide."""
    if _LONG_NUMBER.search(text) or ("*" in text and widest > MAX_WIDTH):
        raise OverflowError("a format that is too wide")
    return text.count("%")


def _braces(text: str) -> int:
    """Fields of a `str.format` format, each at most MAX_WIDTH wide."""
    specs = [spec for _, field, spec, _ in string.Formatter().parse(text) if field is not None]
    if any("{" in (spec or "") or _LONG_NUMBER.search(spec or "") for spec in specs):
        raise OverflowError("a format that is too wide")
    return len(specs)
