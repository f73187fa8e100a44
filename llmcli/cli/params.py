"""From a function's signature to command-line parameters, and from what was typed to values.

A command takes dataclasses of options (`ModelOptions`, `SamplingOptions` …) instead of forty
arguments: `flatten` spreads their fields out for typer and puts them together again.

The values are converted here, not by typer: it would import pydantic (0.1 s, more than all
the rest of a start), and its messages do not repeat what was typed.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.core import TyperArgument, TyperOption

from llmcli.errors import UsageError


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts: from `low` to `high`, ends included unless `above`.

    `above`: the lower end itself is excluded. None is no bound. NaN and infinity never pass.
    """

    low: float
    high: float | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        low = value > self.low if self.above else value >= self.low
        return low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"{'greater than' if self.above else 'at least'} {self.low:g}"
        if self.above:
            return f"greater than {self.low:g} and at most {self.high:g}"
        return f"between {self.low:g} and {self.high:g}"


@dataclass(frozen=True)
class Conversion:
    """How the text of one parameter becomes a value: `kind` is str, int, float or bool."""

    kind: type
    choices: tuple[str, ...] = ()
    range: Range | None = None

    @classmethod
    def of(cls, hint: Any) -> Conversion:
        """Reads an annotation such as `Annotated[int | None, typer.Option(), Range(1)]`."""
        base: Any = hint
        extras: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            base, *rest = get_args(hint)
            extras = tuple(rest)
        allowed = next((extra for extra in extras if isinstance(extra, Range)), None)
        if get_origin(base) in (Union, UnionType):
            base = next(part for part in get_args(base) if part is not NoneType)
        if get_origin(base) is list:
            base = get_args(base)[0]
        if get_origin(base) is Literal:
            return cls(str, choices=get_args(base))
        return cls(base, range=allowed)

    def __call__(self, name: str, text: str) -> Any:
        """The value of `text` for the parameter `name`; raises UsageError saying what is wrong."""
        if self.choices:
            return _choice(name, text, self.choices)
        if self.kind is str:
            return text
        pattern, what = _NUMBERS[self.kind]
        if not re.fullmatch(pattern, text, re.ASCII):
            raise UsageError(f"`{name}` takes {what}, not `{text}`")
        value = self.kind(text)
        if self.range is not None and value not in self.range:
            raise UsageError(f"`{name}` must be {self.range}, not `{text}`")
        return value


_NUMBERS: Mapping[type, tuple[str, str]] = {
    int: (r"[+-]?\d+", "a whole number"),
    float: (r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", "a number"),
}


def _choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text in choices:
        return text
    close = get_close_matches(text, choices, 1)
    listed = ", ".join(choices)
    raise UsageError(
        f"`{name}` has no choice `{text}`",
        hint=f"did you mean `{close[0]}`? ({listed})" if close else f"choose one of {listed}",
    )


class Option(TyperOption):
    """An option whose value is converted by `Conversion`; `display` is its longest name."""

    conversion: Conversion
    display: str

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Overrides typer's conversion; a callback (eager options have one) still runs."""
        value = _converted(self.conversion, self.display, value)
        return value if self.callback is None else self.callback(ctx, self, value)


class Argument(TyperArgument):
    """An argument whose value is converted by `Conversion`; raises UsageError when it lacks."""

    conversion: Conversion
    display: str

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Overrides typer's conversion."""
        if self.required and value is None:
            raise UsageError(f"`{ctx.command_path}` needs {self.display}")
        return _converted(self.conversion, self.display, value)


def _converted(conversion: Conversion, name: str, value: Any) -> Any:
    """`value` as the parser left it (a string, a list of them, a flag) → what it means."""
    if isinstance(value, str):
        return conversion(name, value)
    if isinstance(value, list | tuple):
        return [conversion(name, item) for item in value]
    return value


def adopt(parameter: Any, hints: Mapping[str, Any]) -> None:
    """Makes typer's own parameter object convert by our rules.

    typer builds its parameters itself and offers no hook for their class, so the class of the
    finished object is changed; the classes have the same layout (no mixin, no slots).
    """
    if isinstance(parameter, TyperOption):
        parameter.__class__ = Option
        display = max(parameter.opts, key=len)
    else:
        parameter.__class__ = Argument
        display = parameter.metavar or str(parameter.name).upper()
    parameter.conversion = Conversion.of(hints[str(parameter.name)])
    parameter.display = display


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """A function of single options from a function of option dataclasses.

    Every parameter of `function` that is annotated with a dataclass is replaced by that
    dataclass's fields; a call builds the dataclasses and calls `function`. A name that occurs
    twice is a mistake in the program: ValueError.
    """
    groups: dict[str, type] = {}
    flat: dict[str, inspect.Parameter] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if not (isinstance(hint, type) and is_dataclass(hint)):
            _add(flat, name, hint, parameter.default)
            continue
        groups[name] = hint
        types = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            _add(flat, field.name, types[field.name], default)

    @functools.wraps(function)
    def call(**values: Any) -> None:
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**values, **built)

    call.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    del call.__wrapped__
    return call


def _add(flat: dict[str, inspect.Parameter], name: str, hint: Any, default: Any) -> None:
    if name in flat:
        raise ValueError(f"two options are called {name!r}")
    flat[name] = inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default
    )
