"""Jinja's immutable sandbox with a meter at every place where a template can use much.

The environment is transformers' (utils/chat_template_utils.py): the same template gives the
same text. The meter stands at the operators, at calls and filters, at every turn of a loop, at
slices, at what is compared, joined and written. Imported when a template is rendered: jinja2
takes 0.07 s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import Environment, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

from llmcli.text.meter import CURRENT, is_text_method
from llmcli.text.templatetree import Generation, Metered, Short

_MAX_PATTERN = 1000  # characters of a date's pattern
# Filters that write their value as text, or add it up, whatever it holds.
_WRITING = {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower",
            "pprint", "replace", "string", "striptags", "sum", "title", "trim", "truncate", "upper",
            "urlencode", "wordcount", "wordwrap", "xmlattr", "tojson"}  # fmt: skip

# Filters and tests that compare what they are given, all of it.
_ORDERING = {"sort", "min", "max", "unique", "groupby", "dictsort"}
_SEARCHING = {"index", "count", "changed", "isdisjoint", "fromkeys"}  # methods that do
_HASHING = {"dict", "fromkeys", "isdisjoint"}  # numbers can be chosen so that all hashes collide
_COMPARING = {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=",
              "gt", "greaterthan", ">", "ge", ">="}  # fmt: skip


def environment() -> Environment:
    """A fresh one, with transformers' settings, filters and functions."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Short, Generation, loopcontrols],
        finalize=_finalize,
    )
    made.filters["tojson"] = _to_json
    del made.filters["urlize"]  # a gigabyte for 8 million brackets, and no model's template has it
    for name in _COMPARING:
        made.tests[name] = _compared(made.tests[name])
    for name, function in list(made.filters.items()):
        made.filters[name] = _metered(name, function)
    del made.globals["lipsum"]
    made.globals["range"] = lambda *bounds: CURRENT.get().range(*bounds)
    made.globals["raise_exception"] = _fail
    made.globals["strftime_now"] = _now
    return made


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Metered().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        CURRENT.get().binary(operator, left, right)
        return CURRENT.get().made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = CURRENT.get()
        meter.tick()
        if is_text_method(__obj) and __obj.__name__ == "join" and args:
            args = (list(args[0]), *args[1:])  # a generator has no length
        name = getattr(__obj, "__name__", "")
        if name in _SEARCHING:
            meter.compared(getattr(__obj, "__self__", None), *args)
        if name in _HASHING and args and not isinstance(args[0], dict):
            args = (meter.ticking(args[0]), *args[1:])
        meter.method(__obj, args, kwargs)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        CURRENT.get().tick()  # `sort(attribute='a,a,…')` looks for each of them in every item
        return super().getitem(obj, argument)

    def concat(self, parts: Iterable[str]) -> str:
        chunks, size = [], 0
        for part in parts:
            size += len(part)
            CURRENT.get().check(size)
            chunks.append(part)
        text: str = CURRENT.get().made("".join(chunks))
        return text

    def tick(self) -> bool:
        return CURRENT.get().tick()

    def made(self, value: Any) -> Any:
        return CURRENT.get().made(value)

    def written(self, value: Any) -> Any:
        return CURRENT.get().written(value)

    def compared(self, value: Any) -> Any:
        CURRENT.get().compared(value)
        return value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with a meter. That it takes the context keeps it out of the compiler."""
    wants = _PassArg.from_obj(function)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = CURRENT.get()
        meter.tick()
        if name in _ORDERING and not isinstance(value, dict):
            value = meter.made(list(meter.ticking(value)))
        elif name in ("join", "sum") and not isinstance(value, str | dict):
            value = list(value)
        if name in _WRITING:
            meter.written(value)
        if name in _ORDERING:
            meter.compared(value)
        meter.growth("%" if name == "format" else name, value, args, kwargs)
        first: dict[Any, Any] = {
            _PassArg.context: context,
            _PassArg.eval_context: context.eval_ctx,
            _PassArg.environment: context.environment,
        }
        before = () if wants is None else (first[wants],)
        if name in ("unique", "sum"):
            value = meter.ticking(value)
        return meter.made(function(*before, value, *args, **kwargs))

    return run


def _compared(test: Any) -> Callable[..., bool]:
    """The test with a meter: it stands in `select` and the like, for every item of a list."""

    def run(*values: Any) -> bool:
        CURRENT.get().tick()
        CURRENT.get().compared(*values)
        return bool(test(*values))

    return run


def _fail(message: str) -> str:
    raise TemplateError(message)


def _finalize(value: Any) -> Any:
    """What `{{ … }}` writes: a string has been counted where it was made."""
    return value if isinstance(value, str) else CURRENT.get().written(value)


def _now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN:
        raise OverflowError("a date's pattern that is too long")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter: the model reads it as it stands."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if (isinstance(indent, int) and indent > 1000) or (isinstance(indent, str) and indent[1000:]):
        raise OverflowError("an indent that is too wide")
    chunks, size = [], 0
    for chunk in encoder.iterencode(value):  # dumps would write it all in one go
        size += len(chunk)
        CURRENT.get().check(size)
        CURRENT.get().tick()
        chunks.append(chunk)
    return "".join(chunks)
