"""The process that renders chat templates: one-line requests on stdin, answers on stdout.

A template is an untrusted program. It runs in Jinja's immutable sandbox with the settings, filters
and functions of transformers (utils/chat_template_utils.py), so that it gives the same text. The
operating system limits its resources, because nothing inside a process interrupts a loop in C: CPU
time by a timer whose signal ends the process, memory by a limit on private pages where the system
enforces one (Linux).

Started as a script by `llmcli.text.template_renderer`. It imports nothing of llmcli, to start in
milliseconds.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_REASON = 1000  # characters of an error's message
_Base: Any = Environment().globals["namespace"]  # the class required by `{% set x.y = … %}`


def serve() -> None:
    """Answer requests until stdin ends (when the parent has ended).

    A request is a JSON object: `source`, `variables`, CPU `seconds`, bytes of `memory`, and output
    `characters`. With null variables the text is the names that the template looks up, one per
    line. The answer is `{"text": …}` or `{"error": …}`. Both are UTF-8 with lone surrogates kept.
    """
    # A child inherits a blocked or ignored signal.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_answer(json.loads(line.decode("utf-8", "surrogatepass"))))
        sys.stdout.buffer.flush()


def _answer(request: Mapping[str, Any]) -> bytes:
    _limit_memory(request["memory"])
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        return _line({"text": _render(request)})
    except MemoryError:
        return _line({"error": f"it needs more than {request['memory'] >> 20} MiB of memory"})
    except Exception as error:  # a template can raise any exception
        reason = " ".join(str(error)[:_MAX_REASON].split())
        return _line({"error": reason or type(error).__name__})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(size: int) -> None:
    # Not RLIMIT_AS: mapped libraries and locales can be hundreds of MiB of address space.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _line(answer: Mapping[str, str]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _render(request: Mapping[str, Any]) -> str:
    if request["variables"] is None:
        from jinja2.meta import find_undeclared_variables

        return "\n".join(sorted(find_undeclared_variables(_environment().parse(request["source"]))))
    chunks, size = [], 0
    for chunk in _compiled(request["source"]).generate(request["variables"]):
        size += len(chunk)
        if size > request["characters"]:
            raise OverflowError(f"it writes more than {request['characters']} characters")
        chunks.append(chunk)
    return "".join(chunks)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(_Base):  # type: ignore[misc]  # a class at run time
    """Jinja's namespace, without names that Python or its libraries would call (`__html__`)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is positional only, as in Jinja: `namespace(self=…)` is valid
        _Base.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


if __name__ == "__main__":
    serve()
