"""What a rung ran: the source of its functions, line by line, with the value of every name.

A function marked `shown` is recorded the first time that it runs: the lines that ran, and of each
name that a line assigns the shape, the place in memory and some numbers, as they were the last
time that the line ran. A name ends in the letters of its axes: `s_hnm` is `[h, n, m]`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from llmcli.commands.ladder.report import NEXT, Line, Listing, Step

EMITTED = "what the decoder emits"
WHOLE = 8  # rows and columns up to which a matrix is kept whole
CORNER = 4  # … and how many of each are kept of a larger one
# the last letters of a name → the axes as the formulas write them
AXES = {
    **{letter: letter for letter in "bnmdhv1ij"},
    "g": "h_kv", "k": "d/h", "e": "d_v", "c": "h·d_v", "f": "F",
}
AXED = re.compile(rf"\b\w+_[{''.join(AXES)}]+\b")  # a name with axes
PLAIN = re.compile(r"return [\w, ]+|\w+ = [\w.]+")  # a line that computes nothing
# what only changes how numbers lie: each gives a view or a copy
RESHAPING = {
    *("mT", "transpose", "view", "flatten", "unbind", "split_with_sizes"),
    *("repeat_interleave", "cat", "stack"),
}

Run = TypeVar("Run", bound=Callable[..., Any])
SHOWN: dict[CodeType, Callable[..., Any]] = {}
LAST: set[CodeType] = set()


def shown(function: Run) -> Run:
    """Marks a function whose source is part of what a rung shows."""
    SHOWN[function.__code__] = function
    return function


def shown_last(function: Run) -> Run:
    """Marks one that runs token by token: the last token, which sees all others, is recorded."""
    LAST.add(function.__code__)
    return shown(function)


@dataclass(frozen=True, eq=False)
class Statement:
    """Lines `first` to `last` of a file, which assign `targets`: each a name and its expression."""

    first: int
    last: int
    text: str
    targets: tuple[tuple[str, ast.expr], ...]
    inner: range  # the lines of its body, where it has one

    @property
    def note(self) -> str:
        """The comment behind it."""
        found = re.search(r"  # (.*)$", self.text)
        return found[1] if found else ""


@cache
def statements(function: Callable[..., Any]) -> tuple[Statement, ...]:
    """All statements of a function in their order, without its docstring."""
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    body = textwrap.dedent("".join(lines[tree.body[0].lineno - 1 :])).split("\n")
    begin, above, found = first - 1, tree.body[0].lineno, []
    for node in ast.walk(ast.Module(tree.body[1:], [])):
        if isinstance(node, ast.stmt):
            inner = getattr(node, "body", None)
            last = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
            end = node.end_lineno or last
            found.append(Statement(
                first=begin + node.lineno,
                last=begin + last,
                text="\n".join(body[node.lineno - above : last + 1 - above]),
                targets=tuple(_targets(node)),
                inner=range(begin + last + 1, begin + end + 1) if inner else range(0),
            ))  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.first))


def _targets(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns; of `a, b = c, d` each with its own expression."""
    match node:
        case ast.Assign(targets=[target], value=value):
            pass
        case ast.For(target=target, iter=value):
            pass
        case _:
            return
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(names)
    for name, expression in zip(names, values, strict=True):
        if isinstance(name, ast.Name) and not isinstance(expression, ast.List):
            yield name.id, expression


class Recorder:
    """While it is entered, and `on`, records the first run of each shown function of a rung.

    `extend` reads one more token, where a rung does that otherwise than by a whole pass: what runs
    in it is recorded once more.
    """

    def __init__(self, extend: Callable[..., Any] | None, *, on: bool) -> None:
        self._extend = None if extend is None else inspect.unwrap(extend).__code__
        self.on, self._next = on, False
        self._calls: dict[tuple[bool, CodeType], _Call] = {}
        self._running: list[_Call | None] = [None]  # from the outermost in
        self._emitted: dict[tuple[bool, str], Line] = {}

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        if self.on:
            sys.settrace(self._call)

    def __exit__(self, *raised: object) -> None:
        sys.settrace(self._before)

    @property
    def listings(self) -> tuple[Listing, ...]:
        """The functions in the order in which they were first called."""
        own = [call.listing() for call in self._calls.values()]
        for later in (False, True):
            lines = [line for (after, _), line in self._emitted.items() if after is later]
            if lines:
                own.append(Listing(title=EMITTED, words="", later=later, lines=tuple(lines)))
        return tuple(own)

    def tap(self, name: str, value: Tensor) -> None:
        """Records what the decoder emits: in its first block, before and behind the blocks."""
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            step = Step(
                name=name, formula=name, note="", section=_section(EMITTED, self._next), axes="",
                shape=tuple(value.shape), strides=tuple(value.stride()), values=_corner(value),
                source=None, moved=None, token=None,
            )  # fmt: skip
            self._emitted[self._next, name] = Line(text=name, steps=(step,))

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        self._next = self._next or code is self._extend
        if code not in SHOWN:
            return None
        known, caller = self._calls.get((self._next, code)), self._running[-1]
        if known is not None and not (code in LAST and known.caller is caller):
            return None
        call = self._calls[self._next, code] = _Call(SHOWN[code], self._next, caller, self._running)
        self._running.append(call)
        return call.trace


class _Call:
    """One run of a function, line by line."""

    def __init__(
        self, function: Callable[..., Any], later: bool, caller: _Call | None,
        running: list[_Call | None],
    ) -> None:  # fmt: skip
        self._function, self._later = function, later
        self.caller, self._running = caller, running
        self._line, self._before = 0, dict[str, Any]()
        self._at = {
            number: one
            for one in statements(function)
            for number in range(one.first, one.last + 1)
        }
        self._values: dict[tuple[Statement, str], tuple[Any, Mapping[str, Any]]] = {}
        self._ran: set[Statement] = set()
        self._steps: dict[Statement, tuple[Step, ...]] = {}

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """A line is about to run, or the function returns: the one before has run."""
        done = self._at.get(self._line)
        if done is not None:
            self._ran.add(done)
            for name, _ in done.targets:
                if name in frame.f_locals:
                    self._values[done, name] = frame.f_locals[name], self._before
        self._line, self._before = frame.f_lineno, dict(frame.f_locals)
        if event == "return":
            self._steps = {one: tuple(self._named(one)) for one in self._ran}
            self._values.clear()
            self._running.pop()
            self._before = {}
        return self.trace

    def _named(self, one: Statement) -> Iterator[Step]:
        """The names that a statement assigned, of those that are numbers."""
        for name, expression in one.targets:
            value, before = self._values.get((one, name), (None, {}))
            if not isinstance(value, float) and not AXES.keys() >= {*_letters(name)}:
                continue
            if (tensor := _numbers(value)) is None:
                continue
            reshaped, source = _reshaped(expression, before)
            moved = (source is None or not shares_memory(tensor, source)) if reshaped else None
            yield Step(
                name=name,
                formula=one.text,
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()) if isinstance(value, Tensor) else (),
                source=None if source is None else (tuple(source.shape), tuple(source.stride())),
                moved=moved,
                values=_corner(tensor),
                section=_section(self._title, self._later),
                axes=_axes(name, tensor),
                note=one.note,
                token=_token(expression, before),
            )

    @property
    def _title(self) -> str:
        return self._function.__name__

    def listing(self) -> Listing:
        """The lines that ran and are about numbers; of a loop or a condition those of its body."""
        lines: dict[int, Line] = {}
        for one in sorted(self._ran, key=lambda one: one.first, reverse=True):
            steps = self._steps.get(one, ())
            about = steps or (AXED.search(one.text) and not PLAIN.fullmatch(one.text.strip()))
            if any(number in lines for number in one.inner) or (about and not one.inner):
                lines[one.first] = Line(text=one.text, steps=steps)
        return Listing(
            title=self._title,
            words=inspect.cleandoc(self._function.__doc__ or ""),
            later=self._later,
            lines=tuple(reversed(lines.values())),
        )


def _section(title: str, later: bool) -> str:
    return f"{NEXT}: {title}" if later else title


def _numbers(value: Any) -> Tensor | None:
    """Numbers as a tensor: a float, rows of floats or of tensors; None for anything else."""
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, list) and value and isinstance(value[0], Tensor | list):
            rows = [_numbers(row) for row in value]
            return None if None in [*map(type, rows)] else torch.stack(rows)  # type: ignore[arg-type]
        if isinstance(value, float) or (isinstance(value, list) and value):
            return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None


def _letters(name: str) -> str:
    """`hnm` of `s_hnm`; a name without any is no tensor's."""
    return name.rpartition("_")[2] if "_" in name else "?"


def _axes(name: str, tensor: Tensor) -> str:
    """`h × n × d/h` of `q_hnk`, without what it has in front here or with `…` for what is more."""
    if not tensor.ndim:
        return ""
    letters = [AXES[letter] for letter in _letters(name)]
    more = ["…"] * (tensor.ndim > len(letters))
    return " × ".join([*more, *letters[-tensor.ndim :]])


def _reshaped(expression: ast.expr, values: Mapping[str, Any]) -> tuple[bool, Tensor | None]:
    """Whether an expression only changes how numbers lie, and the tensor that it begins with."""
    found = False
    parts = [arg for arg in getattr(expression, "args", ()) if isinstance(arg, ast.Tuple)]
    if any(isinstance(node, ast.BinOp) for arg in parts for node in ast.walk(arg)):
        return False, None  # a concatenation of what is computed there
    while True:
        match expression:
            case ast.Call(func=ast.Attribute(attr=name) as function) if name in RESHAPING:
                expression, found = function.value, True
            case ast.Attribute(attr="mT", value=value) | ast.Subscript(value=value):
                expression, found = value, True
            case _:
                break
    source = _value(expression, values)
    if not found or not (isinstance(source, Tensor) or source is torch):
        return False, None
    return True, source if isinstance(source, Tensor) else None


def _value(expression: ast.expr, values: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, was."""
    match expression:
        case ast.Name(id=name):
            return torch if name == "torch" else values.get(name)
        case ast.Attribute(value=value, attr=name):
            return getattr(_value(value, values), name, None)
    return None


def _token(expression: ast.expr, values: Mapping[str, Any]) -> int | None:
    """Whose it is, where an expression is about token `i`, or `j` of a loop over keys."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    return next((values[name] for name in ("j", "i") if name in names and name in values), None)


def shares_memory(tensor: Tensor, source: Tensor) -> bool:
    """Whether `tensor` is a view of `source`'s storage: nothing was moved to make it."""
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _corner(tensor: Tensor) -> tuple[tuple[float, ...], ...]:
    """The last two axes at the first index of the others, whole where they are small."""
    while tensor.ndim > 2:
        tensor = tensor[0]
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor
    rows, columns = (size if size <= WHOLE else CORNER for size in matrix.shape)
    return tuple(tuple(row) for row in matrix[:rows, :columns].tolist())
