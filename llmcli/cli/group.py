"""Commands: imported when they are named, help by headings, typer's errors in our words.

Only typer's public classes are used. Contexts and parameters are typed `Any`: their classes
are private to typer.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from typer.core import TyperArgument, TyperCommand

from llmcli.errors import LlmcliError, UsageError
from llmcli.shell.configuration import listed, name_file
from llmcli.shell.exits import SIGNALS
from llmcli.shell.params import WORDS, Declared, Option, flatten, unknown_option
from llmcli.shell.streams import columns, write

EVERYTHING_ELSE = "Help"
# modules whose libraries our imports open: they come first, or they would wait for PyTorch's
OPENED = (
    "array", "binascii", "contextvars", "csv", "hashlib", "json", "mmap", "random", "socket",
    "unicodedata",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of the root's help, known without importing the command."""

    module: str
    summary: str
    heading: str


class OurHelp:
    """Keeps the words of a command line for messages; its `--help` may go through the pager."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """typer's; the words are kept, and every error knows its command."""
        ctx.meta[WORDS] = tuple(args)
        try:
            found: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        return found

    def get_help_option(self, ctx: Any) -> Any:
        """Ours in place of typer's."""
        return HELP


class Command(OurHelp, TyperCommand):
    """A command whose help lists the options under their headings."""

    configured: tuple[str, ...] = ()  # a command by itself is in no tree: see `tree.Root`

    def invoke(self, ctx: Any) -> None:
        """Calls the command; an error about what the configuration file sets names the file."""
        try:
            self.callback(ctx, ctx.params)  # type: ignore[misc]
        except LlmcliError as error:
            name_file(error, ctx)
            raise

    def get_help(self, ctx: Any) -> str:
        """Usage, what the command does, options by heading, examples, as wide as the terminal."""
        arguments = [p for p in self.get_params(ctx) if isinstance(p, TyperArgument)]
        names = " ".join(str(p.metavar) for p in arguments)
        lines = [f"usage: {ctx.command_path} [OPTIONS] {names}".rstrip(), ""]
        lines += paragraphs(self.help or "")
        rows: dict[str, list[tuple[str, str]]] = {}
        for argument in arguments:
            row = (str(argument.metavar), argument.help or "")
            rows.setdefault("Arguments", []).append(row)
        for option in listed(self.get_params(ctx)):
            rows.setdefault(option.rich_help_panel or EVERYTHING_ELSE, []).append(_row(option))
        lines += sections(rows)
        return "\n".join([*lines, "", *paragraphs(self.epilog or "")]).rstrip()


@cache
def imported(module: str, name: str) -> Any:
    """The command `name` of a module, `command` or one of its `NESTED`.

    Built once, also where its options are read beforehand.
    """
    with SIGNALS.abrupt():
        of = import_module(module)
        own = of.command, getattr(of, "EPILOG", "")
        function, epilog = getattr(of, "NESTED", {}).get(name, own)
        found = build(name, function, epilog, getattr(of, "CONTEXT", {}))
        found.elsewhere = getattr(of, "ELSEWHERE", {})  # for `params.unknown_option`
        found.tolerant = getattr(of, "TOLERANT", False)  # for `configuration.defaults`
        return found


def asks_for_help(words: Iterable[str]) -> bool:
    """Whether `--help` is among the words of a command line."""
    return not set(HELP.opts).isdisjoint(words)


def read_ahead() -> None:
    """Starts to open what `import torch` will, on a thread; nothing where that cannot be done.

    Mapping and relocating them takes 150 ms on one processor (a second with CUDA's) and needs no
    Python. ctypes keeps the interpreter's lock while it opens one: so the system's own `dlopen`.
    """
    if sys.platform != "linux":
        return
    try:
        os.getcwd()
    except OSError:  # MKL ends the process: `running.require_cwd` says so
        return
    import ctypes

    for name in OPENED:
        import_module(name)
    spec = find_spec("torch")
    if spec is None or spec.origin is None or "torch" in sys.modules:
        return
    folder = os.path.join(os.path.dirname(spec.origin), "lib")
    open_library = ctypes.CDLL(None).dlopen
    open_library.argtypes, open_library.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def work() -> None:
        # as torch does: the first gives its symbols to all that follow
        for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", 0)):
            open_library(os.fsencode(os.path.join(folder, name)), os.RTLD_NOW | mode)

    try:
        # no daemon: Python's own end, unlike ours, must not come while the libraries are opened
        Thread(target=work).start()
    except RuntimeError:  # no more threads may be started
        return


def build(
    name: str,
    function: Callable[..., None],
    epilog: str = "",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The command object for a function of option dataclasses; its help ends with `epilog`.

    `settings` are more of typer's for the command's context.
    """
    parameters, call = flatten(function)
    return Command(
        name,
        params=list(parameters),
        callback=call,
        help=inspect.getdoc(function),
        epilog=epilog,
        context_settings=dict(settings),
    )


def show_help(ctx: Any, option: Any, value: Any) -> None:
    """The callback of `--help`: a text that is taller than the terminal goes through the pager."""
    if not value or ctx.resilient_parsing:
        return
    text = ctx.get_help()
    if sys.stdout is not None and sys.stdout.isatty():
        from llmcli.shell.options import OutputOptions
        from llmcli.shell.output import Output

        Output("help", OutputOptions()).print(f"{text}\n", paged=True)
    else:  # a pipe needs none of these imports
        write(f"{text}\n")
    ctx.exit()


HELP = Option(
    "help",
    Declared(names=("-h", "--help"), help="Show this message and exit.", default=False),
    callback=show_help,
    is_eager=True,
    expose_value=False,
)


def _row(option: Any) -> tuple[str, str]:
    """`-t, --temperature X` and its help with the default where one is worth telling."""
    names = ", ".join(sorted(option.opts, key=len))
    if not any(len(name) == 2 for name in option.opts):
        names = "    " + names
    if option.metavar and not option.is_flag:
        names += f" {option.metavar}"
    text = option.help or ""
    if option.default not in (None, False, "", ()) and "[default" not in text:
        text += f" [default: {option.default}]"
    return names, text


def width() -> int:
    """Columns of a help text: as of other results, 80 where nothing bounds them; from 40 to 100."""
    return max(40, min(columns(sys.stdout, os.environ) or 80, 100))


def paragraphs(text: str) -> list[str]:
    """Paragraphs wrapped, lines that begin with two blanks kept as they are."""
    out: list[str] = []
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        if paragraph.startswith("  "):
            out += [*paragraph.splitlines(), ""]
        elif paragraph:
            out += [*textwrap.wrap(" ".join(paragraph.split()), width()), ""]
    return out


def sections(rows: Mapping[str, list[tuple[str, str]]]) -> list[str]:
    """Lines of names and what they are, under headings."""
    out: list[str] = []
    for heading, section in rows.items():
        column = min(28, max(len(name) for name, _ in section)) + 4
        out.append(f"{heading}:")
        for name, text in section:
            wrapped = textwrap.wrap(text, width() - column) or [""]
            if len(name) + 4 > column:
                out.append(f"  {name}")
            else:
                out.append(f"  {name:<{column - 2}}{wrapped.pop(0)}".rstrip())
            out += [" " * column + line for line in wrapped]
        out.append("")
    return out[:-1]


def usage_error(exception: Any) -> UsageError:
    """typer's message in our style: lower case, backticks, a suggestion as the hint."""
    context = getattr(exception, "ctx", None)
    path = context.command_path if context is not None else "llmcli"
    hint = f"see `{path} --help`"
    option = getattr(exception, "option_name", None)
    message = exception.format_message().rstrip(".")
    if option is not None and context is not None:
        if type(exception).__name__ == "NoSuchOption":
            if len(option) == 2:  # the parser names `-s` of a word `-seed`
                words = context.meta.get(WORDS, ())
                option = next((word for word in words if word.startswith(option)), option)
            return unknown_option(option, context)
        if message.endswith("requires an argument"):
            message = f"`{option}` takes a value"
            named = (own for own in listed(context.command.params) if option in own.opts)
            if choices := next((own.conversion.choices for own in named), ()):
                hint = f"choose one of {', '.join(choices)}"
    extra = re.fullmatch(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", message, re.DOTALL)
    if extra:
        split = "" if context is None else _split_index(context)
        if split:
            from llmcli.graph.indexed import split_by_the_shell

            return split_by_the_shell(split)
        message = f"unexpected argument `{extra[1]}`"
        hint = f"{_instead(extra[1].split(), context)}see `{path} --help`"
    message = re.sub(r"'([^']*)'", r"`\1`", message)
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _instead(words: list[str], context: Any) -> str:
    """What may have been meant by words that a command has no place for."""
    parameters = () if context is None else context.command.params
    takes_model = context is None or any(parameter.name == "model" for parameter in parameters)
    model = next(filter(names_a_model, words), None) if takes_model else None
    if model is not None:
        return f"for that model write `-m {model}`; "
    text = next((parameter for parameter in parameters if parameter.name == "prompt"), None)
    if text is not None and text.param_type_name == "option":
        said = " ".join(words).replace('"', "'")
        path = context.command_path
        return f"send it with `{path} --prompt \"{said}\"`, or start with just `{path}`; "
    return "put a text of several words in quotes; " if text is not None else ""


def names_a_model(word: str) -> bool:
    """Whether the word is a catalog name, or looks like a path to weights or a hub id."""
    from llmcli.checkpoints.catalog import CATALOG
    from llmcli.checkpoints.names import parse

    try:
        found = parse(word)
    except LlmcliError:
        return False
    if isinstance(found, str):
        return found in CATALOG or (Path(found) / "config.json").is_file()
    return True


def _split_index(context: Any) -> str:
    """`logits[-1,`, the part of a NAME[INDEX] that the shell has split, empty where it has not."""
    if not any("[INDEX]" in str(parameter.metavar) for parameter in context.command.params):
        return ""
    return next((w for w in context.meta[WORDS] if re.search(r"\[[^\]]*$", w)), "")
