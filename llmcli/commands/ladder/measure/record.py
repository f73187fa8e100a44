"""What a rung ran: the source of its functions, with the value of every name; matrix products.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmcli.commands.ladder.report import AXES, NEXT, Line, Listing, Step, Work

EMITTED = "what the decoder emits"
WHOLE = 8  # rows and columns up to which a matrix is kept whole
CORNER = 4  # … and how many of each are kept of a larger one
AXED = re.compile(rf"\b\w+_[{''.join(AXES)}]+\b")  # a name with axes
PLAIN = re.compile(r"return [\w, ]+|\w+ = [\w.]+")  # a line that computes nothing
# an expression that only changes the layout, which gives a view or a copy; group 1 is its source
RESHAPING = r"transpose|view|flatten|unbind|split_with_sizes|repeat_interleave|cat|stack"
RESHAPED = re.compile(rf"([\w.]+?)(?:\.mT|\.(?:{RESHAPING})\([^()]*\)|\[[^]]*\])+")

_ATEN = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_ATTENTION = _ATEN.scaled_dot_product_attention
_PRODUCTS = {
    *(_ATEN.dot, _ATEN.mv, _ATEN.mm, _ATEN.bmm),
    *(_ATEN.addmv, _ATEN.addmm, _ATEN.baddbmm),  # their first operand is the bias
}
NOTHING = Work(gemv=0, gemm=0, flops=0, bytes=0)

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
    """Line `first` of a file and more, which assign `targets`: each a name and its expression."""

    first: int
    text: str
    targets: tuple[tuple[str, str], ...]
    inner: range  # the lines of its body, where it has one


# of each statement that ran, its names with their values and all names before it
Values = dict[Statement, dict[str, tuple[Any, dict[str, Any]]]]


@cache
def statements(function: Callable[..., Any]) -> dict[int, Statement]:
    """The statement of every line of a function, in their order, without its docstring."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    above = tree.body[0].lineno
    body = textwrap.dedent("".join(lines[above - 1 :])).split("\n")
    found: dict[int, Statement] = {}
    for node in ast.walk(ast.Module(tree.body[1:], [])):
        if isinstance(node, ast.stmt):
            inner = getattr(node, "body", None)
            end = node.end_lineno or node.lineno
            last = inner[0].lineno - 1 if inner else end
            one = Statement(
                first=first - 1 + node.lineno,
                text="\n".join(body[node.lineno - above : last + 1 - above]),
                targets=tuple(_targets(node)),
                inner=range(first + last, first + end),
            )
            found |= dict.fromkeys(range(one.first, first + last), one)
    return found


def _targets(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """The names that a statement assigns; of `a, b = c, d` each with its own expression."""
    match node:
        case ast.Assign(targets=[target], value=value) | ast.For(target=target, iter=value):
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(names)
            for name, expression in zip(names, values, strict=True):
                if isinstance(name, ast.Name) and not isinstance(expression, ast.List):
                    yield name.id, ast.unparse(expression)


class Recorder:
    """While it is entered, and `on`, records the first run of each shown function of a rung.

    `extend` reads one more token. Where it is a shown function of its own, not a whole pass again,
    what runs in it is recorded once more.
    """

    def __init__(self, extend: Callable[..., Any], *, on: bool) -> None:
        self._extend = inspect.unwrap(extend).__code__
        self.on, self._next = on, False
        self._ran: dict[tuple[bool, CodeType], Listing] = {}
        self._callers: dict[tuple[bool, CodeType], object] = {}  # what called these
        self._running: list[object] = [None]  # from the outermost in
        self._emitted: dict[bool, dict[str, Line]] = {False: {}, True: {}}

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        if self.on:
            sys.settrace(self._call)

    def __exit__(self, *raised: object) -> None:
        sys.settrace(self._before)

    @property
    def listings(self) -> tuple[Listing, ...]:
        """The functions in the order in which they were first called, then what was emitted."""
        emitted = [
            Listing(title=EMITTED, words="", later=later, lines=tuple(lines.values()))
            for later, lines in self._emitted.items()
            if lines
        ]
        return (*self._ran.values(), *emitted)

    def tap(self, name: str, value: Tensor) -> None:
        """Records what the decoder emits: in its first block, before and behind the blocks."""
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            step = Step(
                name=name,
                formula=name,
                section=_section(EMITTED, self._next),
                shape=tuple(value.shape),
                strides=tuple(value.stride()),
                values=_corner(value),
            )
            self._emitted[self._next][name] = Line(text=name, steps=(step,))

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in SHOWN:
            return None
        self._next = self._next or code is self._extend
        key, caller, later = (self._next, code), self._running[-1], self._next
        if key in self._ran and not (code in LAST and self._callers[key] is caller):
            return None
        function, line, before = SHOWN[code], 0, dict[str, Any]()
        values: Values = {}

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            """A line is about to run, or the function returns: the one before has run."""
            nonlocal line, before
            names, done = frame.f_locals, statements(function).get(line)
            if done is not None:
                known = values.setdefault(done, {})
                known |= {one: (names[one], before) for one, _ in done.targets if one in names}
            line, before = frame.f_lineno, dict(names)
            if event == "return":
                lines = tuple(_lines(values, _section(function.__name__, later)))
                self._ran[key] = replace(self._ran[key], lines=lines)
                values.clear()
                before.clear()
                self._running.pop()
            return trace

        words = inspect.cleandoc(function.__doc__ or "")
        self._ran[key] = Listing(title=function.__name__, words=words, later=later, lines=())
        self._callers[key] = caller
        self._running.append(trace)
        return trace


def _named(
    one: Statement, values: Mapping[str, tuple[Any, dict[str, Any]]], section: str
) -> Iterator[Step]:
    """The names that a statement assigned, of those that are numbers."""
    note = re.search(r"  # (.*)$", one.text)
    for name, expression in one.targets:
        value, before = values.get(name, (None, {}))
        if not isinstance(value, float) and not AXES.keys() >= {*_letters(name)}:
            continue
        try:
            tensor = _numbers(value)
        except (TypeError, ValueError, RuntimeError):
            continue
        reshaped, source = _reshaped(expression, before)
        if not reshaped and isinstance(value, Tensor):
            source = _whole(value, before)
        moved = source is None or not shares_memory(tensor, source)
        yield Step(
            name=name,
            formula=one.text,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()) if isinstance(value, Tensor) else (),
            source=None if source is None else (tuple(source.shape), tuple(source.stride())),
            moved=moved if reshaped or source is not None else None,
            values=_corner(tensor),
            section=section,
            axes=_axes(name, tensor.ndim),
            note=note[1] if note else "",
            token=_token(expression, before),
        )


def _lines(values: Values, section: str) -> Iterator[Line]:
    """The lines that ran and are about numbers; of a loop or a condition those of its body."""
    lines: dict[int, Line] = {}
    for one in sorted(values, key=lambda ran: ran.first, reverse=True):
        steps = tuple(_named(one, values[one], section))
        about = steps or (AXED.search(one.text) and not PLAIN.fullmatch(one.text.strip()))
        if any(number in lines for number in one.inner) or (about and not one.inner):
            lines[one.first] = Line(text=one.text, steps=steps)
    return reversed(lines.values())


def _section(title: str, later: bool) -> str:
    return f"{NEXT}: {title}" if later else title


def _numbers(value: Any) -> Tensor:
    """A float, rows of floats or of tensors as one tensor.

    Raises TypeError, ValueError or RuntimeError for anything else.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list) and not (value and isinstance(value[0], float)):
        return torch.stack([_numbers(row) for row in value])
    return torch.tensor(value, dtype=torch.float64)


def _letters(name: str) -> str:
    """`hnm` of `s_hnm`; a name without any is no tensor's."""
    return name.rpartition("_")[2] if "_" in name else "?"


def _axes(name: str, count: int) -> str:
    """`h × n × d/h` of `q_hnk`: the last axes where there are fewer, `…` in front where more."""
    letters = [AXES[letter][0] for letter in _letters(name)] if count else []
    return " × ".join([*["…"] * (count > len(letters)), *letters[-count:]])


def _reshaped(expression: str, values: Mapping[str, Any]) -> tuple[bool, Tensor | None]:
    """Whether an expression only changes the layout of a tensor, and that tensor.

    Of several at once, as in `torch.cat`, there is no such tensor.
    """
    match = RESHAPED.fullmatch(expression)
    if match is None:
        return False, None
    name, *attributes = match[1].split(".")
    source = reduce(lambda of, one: getattr(of, one, None), attributes, values.get(name))
    return (True, source) if isinstance(source, Tensor) else (name == "torch", None)


def _whole(part: Tensor, values: Mapping[str, Any]) -> Tensor | None:
    """The tensor of the lines above that `part` is a piece of in memory, if there is one."""
    for one in values.values():
        if isinstance(one, Tensor) and one.is_contiguous() and shares_memory(part, one):
            begin, more = part.storage_offset() - one.storage_offset(), one.numel() - part.numel()
            if more > 0 and 0 <= begin <= more:
                return one
    return None


def _token(expression: str, values: Mapping[str, Any]) -> int | None:
    """The token of an expression that names `i`, or `j` in a loop over keys."""
    names = re.findall(r"\w+", expression)
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


def count(call: Callable[[], object]) -> Work:
    """The products that `call` runs."""
    products = _Products()
    with products:
        call()
    return products.work


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, adds up every product that a kernel is called for.

    A call is a GEMV where one side has a single row or column (a dot product counts as one),
    else a GEMM; a batched call counts once, as it is launched once. The fused attention kernel
    is two products in one call, `Q Kᵀ` and `A V`, over the full square. Bytes are those of the
    operands and results: nothing is assumed to stay in a cache.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Work = NOTHING

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's: nothing is compiled here, and to keep the compiler out would import it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs `func` and counts it where it is a product; composite ones are taken apart."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is not _ATTENTION and packet not in _PRODUCTS:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
                return func(*args, **kwargs)
            # `matmul`, `linear` and `einsum` arrive whole in inference mode; `func.decompose` would
            # do it in Python, and import sympy for that
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        out = func(*args, **kwargs)
        operands = [a for a in args if isinstance(a, Tensor)]
        if packet is _ATTENTION:
            q, k, v = operands[:3]
            rows, adds = q.shape[-2], q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        else:  # `[…, m, k] × […, k, n]`, where a vector has no m or n
            a, b = operands[-2:]
            columns = b.shape[-1] if b.ndim > 1 else 1
            rows, adds = min(columns, a.shape[-2] if a.ndim > 1 else 1), a.numel() * columns
        self.work += Work(
            gemv=rows == 1,
            gemm=rows != 1,
            flops=2 * adds,
            bytes=sum(one.numel() * one.element_size() for one in (*operands, out)),
        )
        return out
