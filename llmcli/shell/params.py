"""From a function's signature to command-line parameters, and from what was typed to values.

A command takes dataclasses of options (`ModelOptions`, `SamplingOptions` …) instead of forty
arguments: `flatten` spreads their fields out for typer and puts them together again.

The values are converted here, not by typer: it would import pydantic (0.1 s, more than all
the rest of a start), and its messages do not repeat what was typed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from shlex import quote
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.core import TyperArgument, TyperOption

from llmcli.errors import UsageError
from llmcli.records.numbers import did_you_mean, either
from llmcli.records.ranges import LARGEST, Range
from llmcli.shell.configuration import defaults, excluded, from_file, listed, settable


@dataclass(frozen=True)
class Without:
    """Options of the annotated dataclass that a command leaves out: they keep their defaults."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What `opt` or `arg` says of a field, and the field's type, which `flatten` evaluates.

    `panel`: the heading in the help, if another than the class's own. `aliases`: names that are
    accepted and not listed. `hidden`: none of the names is listed, and the configuration file
    cannot set it. `needs`: at least one of these has to be given as well, `excludes`: none of
    these, by their names (`PROMPT` for a positional argument); `--what=state` and
    `--temperature!=0.0`: the value decides. An option is given if it differs from its default. What
    the configuration file sets yields to what excludes it. `once`: it cannot be given twice; of
    other options with one value the last one counts.
    """

    names: tuple[str, ...] = ()
    metavar: str | None = None
    help: str = ""
    default: Any = None
    type: Any = bool
    range: Range | None = None
    panel: str | None = None
    aliases: tuple[str, ...] = ()
    hidden: bool = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    once: bool = False

    @property
    def display(self) -> str:
        """The longest of the names, `PROMPT` for the argument `[PROMPT]`."""
        return max(self.names, key=len) if self.names else str(self.metavar).strip("[]. ")


def opt(
    default: Any,
    spelled: str,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    within: Range | None = None,
    panel: str | None = None,
    aliases: tuple[str, ...] = (),
    hidden: bool = False,
    needs: tuple[str, ...] = (),
    excludes: tuple[str, ...] = (),
    once: bool = False,
) -> Any:
    """A field of a dataclass of options, such as `opt(256, "-n --max N", "Most tokens.")`.

    `spelled`: the names and, for all but flags, what the value is called.
    `at_least` (`above`: more than that) and `at_most`, or `within`, bound a number; for the others
    see `Declared`.
    """
    parts = spelled.split()
    names = tuple(part for part in parts if part.startswith("-"))
    low = at_least if above is None else above
    declared = Declared(
        names=names,
        metavar=parts[-1] if parts[-1] not in names else None,
        help=help,
        default=default,
        range=within if low is None else Range(low, at_most, above is not None),
        panel=panel,
        aliases=aliases,
        hidden=hidden,
        needs=needs,
        excludes=excludes,
        once=once,
    )
    return field(default=default, metadata={"declared": declared})


def arg(default: Any, metavar: str, help: str) -> Any:
    """Declares a positional argument, as `opt` an option."""
    declared = Declared(metavar=metavar, help=help, default=default)
    return field(default=default, metadata={"declared": declared})


def check_rules(values: Mapping[str, Any], options: Mapping[str, Declared]) -> None:
    """Checks the values of options against what these need and exclude, both by their fields.

    Raises UsageError naming both options.
    """
    given = {name: one for name, one in options.items() if values[name] != one.default}
    spelled = {
        spelling: (one.display, values[name])
        for name, one in given.items()
        for spelling in (*one.names, one.display)
    }
    for one in given.values():
        for other, differs, value in map(excluded, one.excludes):
            display, actual = spelled.get(other, ("", ""))
            if display and (not value or (str(actual) == value) != differs):
                shown = f"{display} {actual}" if value else display
                raise UsageError(
                    f"`{one.display}` and `{shown}` exclude each other",
                    hint="leave one of them out",
                )
        if one.needs and spelled.keys().isdisjoint(one.needs):
            raise UsageError(
                f"`{one.display}` needs {either([f'`{need}`' for need in one.needs])}",
                hint=f"add it, or leave `{one.display}` out",
            )


@dataclass(frozen=True)
class Conversion:
    """Converts the text of one parameter: `kind` is str, int, float or bool.

    `several`: the parameter has a list of these.
    """

    kind: type
    choices: tuple[str, ...] = ()
    range: Range | None = None
    several: bool = False

    @classmethod
    def of(cls, base: Any, range: Range | None) -> Conversion:
        """The conversion to a type such as `int | None`, `list[str]` or a Literal."""
        if get_origin(base) in (Union, UnionType):
            base = next(part for part in get_args(base) if part is not NoneType)
        if several := get_origin(base) is list:
            base = get_args(base)[0]
        if get_origin(base) is Literal:
            return cls(str, get_args(base), several=several)
        return cls(base, range=range, several=several)

    def __call__(self, name: str, text: str) -> Any:
        """The value of `text` for the parameter `name`; raises UsageError saying what is wrong."""
        if self.choices:
            return _choice(name, text, self.choices)
        if self.kind is str:
            return text
        pattern, what = _NUMBERS[self.kind]
        value: Any = text
        if self.range is not None and self.range.k:
            what += " (`8k` is 8192)"
            if found := re.fullmatch(r"(\d{1,9})([kKmM])", text, re.ASCII):
                value = int(found[1]) << (10 if found[2] in "kK" else 20)
        if value is text and not re.fullmatch(pattern, text, re.ASCII):
            raise UsageError(f"`{name}` takes {what}, not `{text}`")
        value = self.kind(value) + 0  # -0.0 is 0
        bounds = self.range
        if abs(value) > LARGEST and (bounds is None or (value > 0 and bounds.high is None)):
            raise UsageError(f"`{name}` is too large: `{text}`")
        if self.range is not None and value not in self.range:
            raise UsageError(f"`{name}` must be {self.range}, not `{text}`")
        return value


_NUMBERS: Mapping[type, tuple[str, str]] = {
    int: (r"[+-]?\d{1,99}", "a whole number"),  # int() itself refuses 4,300 digits
    float: (r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", "a number"),
}


# what other programs call the same thing
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}


def _choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    known = ALIASES.get(text.lower(), text)
    if known in choices:
        return known
    close = get_close_matches(text, choices, 1)
    listed = ", ".join(choices)
    hint = f"{did_you_mean(close)} ({listed})" if close else f"choose one of {listed}"
    if "," in text and set(text.split(",")) <= set(choices):
        hint = f"it takes one of them at a time: {listed}"
    elif (ending := text.rpartition(".")[2]) in choices:
        hint = f"it takes a format; for a file: `{name} {ending} > {quote(text)}`"
    raise UsageError(f"`{name}` has no choice `{text}`", hint=hint)


UNUSED: Any = None  # typer's own conversion, which `process_value` below replaces


class Option(TyperOption):
    """An option whose value is converted by `Conversion`; `display` is its longest name.

    `settings` are typer's. A flag that the configuration file may set can be taken back.
    """

    def __init__(self, name: str, declared: Declared, **settings: Any) -> None:
        self.conversion = Conversion.of(declared.type, declared.range)
        self.display, self.aliases = declared.display, declared.aliases
        self.excludes, self.once = declared.excludes, declared.once
        super().__init__(
            param_decls=[name, *declared.names],
            default=declared.default,
            metavar=declared.metavar,
            help=declared.help,
            hidden=declared.hidden,
            rich_help_panel=declared.panel,
            is_flag=self.conversion.kind is bool,
            multiple=self.conversion.several,
            type_descriptor=UNUSED,
            **settings,
        )
        if self.is_flag and settable(self):
            bare = self.display[2:]
            opposite = bare.removeprefix("no-") if bare.startswith("no-") else f"no-{bare}"
            self.secondary_opts = [f"--{opposite}"]

    def add_to_parser(self, parser: Any, ctx: Any) -> None:
        """typer's; the aliases are accepted, too, and `_` for `-` within a name."""
        listed = self.opts
        underscored = (f"--{name[2:].replace('-', '_')}" for name in listed if "-" in name[2:])
        self.opts = [*listed, *self.aliases, *underscored]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = listed

    def consume_value(self, ctx: Any, opts: Any) -> Any:
        """typer's; what the configuration file sets are the defaults of the context.

        The file is read for the first option that is not eager: after `--help`.
        """
        if ctx.default_map is None and not (self.is_eager or ctx.resilient_parsing):
            ctx.default_map = defaults(ctx, opts)
        return super().consume_value(ctx, opts)

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Overrides typer's conversion; a callback (eager options have one) still runs."""
        if from_file(ctx, str(self.name)):  # it is converted
            return value
        words = ctx.meta.get(WORDS, ())
        short = min(self.opts, key=len)
        if self.once and value is not None:
            _, _, order = ctx.command.make_parser(ctx).parse_args(list(words))
            if order.count(self) > 1:
                hint = f"one {self.name} at a time"
                raise UsageError(f"`{self.display}` is given twice", hint=hint)
        given = value if isinstance(value, list | tuple) else [value]
        word = next((w for w in words for v in given if v and w == f"{short}{v}"), "")
        # `-model x` is no `-m odel`, and a list that is glued to its option begins with a number
        glued = isinstance(value, list | tuple) and word[2:3].isalpha()
        if word and (glued or f"-{word}" in _names(ctx)):
            raise unknown_option(word, ctx)
        text = value
        try:
            value = _converted(self.conversion, self.display, value)
        except UsageError as error:
            if word:
                raise unknown_option(word, ctx) from error
            hint = f"see `{ctx.command_path} --help`"
            if self.name == "top_p" and short in words and value[:1] not in "+-.0123456789":
                hint = _prompt_hint(ctx)
            raise UsageError(error.message, hint=error.hint or hint) from error
        if self.name == "temperature" and value and value > 2 and (word or short in words):
            # in many programs `-t` is the number of threads
            threads = f"`--threads {text}` sets the threads; " * (value == int(value))
            raise UsageError(
                f"`{short} {text}` is a temperature, and above 2 little but chance is left",
                hint=f"{threads}`{self.display} {text}` insists",
            )
        return value if self.callback is None else self.callback(ctx, self, value)


WORDS = "llmcli.words"  # in a context's `meta`: the command's words as they were typed


def unknown_option(word: str, ctx: Any) -> UsageError:
    """The error for an option that the command of `ctx` does not have, with the closest ones."""
    name = "--" + word.split("=")[0].lstrip("-").replace("_", "-")
    known = [known for known in _names(ctx) if known.startswith("--")]
    close: list[str] = []
    near = get_close_matches(word, [n for n in _names(ctx) if len(n) > 2 and n not in known], 2)
    if name in known:
        close = [name]
    elif near and not word.startswith("--"):  # options of several letters behind one dash
        close = near
    elif len(name) > 3:  # one letter could be anything
        close = [long for long in known if long.startswith(name)]
        # what is asked of the root is most likely an option of a command
        close = close or get_close_matches(name, known, 3, 0.6 if ctx.parent else 0.8)
    elsewhere = getattr(ctx.command, "elsewhere", {})
    if name in elsewhere:  # what other commands of ours call it
        hint = elsewhere[name]
    elif (foreign := _foreign(name, known)) is not None:
        hint = foreign
    elif close:
        hint = did_you_mean(close[:3])
    elif ctx.parent is None:
        hint = "options follow the command: `llmcli COMMAND [OPTIONS]`"
    elif name == "--prompt" and any(isinstance(p, TyperArgument) for p in ctx.command.params):
        hint = _prompt_hint(ctx)
    else:
        hint = f"see `{ctx.command_path} --help`"
    return UsageError(f"unknown option `{word}`", hint=hint)


# What llama.cpp, transformers and vLLM call an option of ours; a command that has ours names it.
_FOREIGN: Mapping[str, str] = {
    "--seed": "s random-seed",
    "--max-tokens": "predict n-predict num-predict max-new-tokens max-length max-len",
    "--context-length": "ctx-size n-ctx num-ctx ctx max-model-len",
    "--repetition-penalty": "repeat-penalty rep-pen",
    "--num-samples": "num-return-sequences np parallel best-of",
    "--system": "sys system-prompt",
    "--model": "hf hfr hf-repo model-path",
    "--ignore-eos": "no-eos",
    "--stop": "r reverse-prompt stop-string stop-sequence",
    "--draft": "md model-draft draft-model assistant-model",
    "--set": "chat-template-kwargs",
    "--raw": "no-cnv no-conversation",
}
# … and what there is instead of an option that only they have.
_ON_GPU = "`--device cuda` runs all layers on the GPU, `--device cuda,cpu` those that fit"
_INSTEAD: Mapping[str, str] = {
    "i cnv conversation interactive interactive-first": "for a conversation run `llmcli chat`",
    "ngl gpu-layers n-gpu-layers": _ON_GPU,
    "no-display-prompt": "only new text is printed",
    "do-sample": "it samples unless `--greedy` or `-t 0` is given",
}


def _foreign(name: str, known: list[str]) -> str | None:
    """The hint for `--name` of another program; None where it is unknown or ours is not here."""
    bare = name[2:]
    for ours, theirs in _FOREIGN.items():
        if bare in theirs.split() and ours in known:
            return f"it is `{ours}` here"
    return next((hint for names, hint in _INSTEAD.items() if bare in names.split()), None)


def _prompt_hint(ctx: Any) -> str:
    if any(isinstance(parameter, TyperArgument) for parameter in ctx.command.params):
        return f'the prompt is an argument: `{ctx.command_path} "TEXT"`'
    return f'a message is given with `{ctx.command_path} --prompt "TEXT"`'


def _names(ctx: Any) -> list[str]:
    return [name for option in listed(ctx.command.get_params(ctx)) for name in option.opts]


class Argument(TyperArgument):
    """An argument whose value is converted by `Conversion`; raises UsageError when it lacks."""

    def __init__(self, name: str, declared: Declared) -> None:
        self.conversion = Conversion.of(declared.type, None)
        self.display, self.excludes = declared.display, declared.excludes
        required = declared.default is ...
        super().__init__(
            param_decls=[name],
            required=required,
            default=None if required else declared.default,
            metavar=declared.metavar,
            help=declared.help,
            nargs=-1 if self.conversion.several else 1,
            type_descriptor=UNUSED,
        )

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Overrides typer's conversion."""
        if self.required and value is None:
            hint = f"see `{ctx.command_path} --help`"
            raise UsageError(f"`{ctx.command_path}` needs {self.metavar}", hint=hint)
        return _converted(self.conversion, self.display, value)


def _converted(conversion: Conversion, name: str, value: Any) -> Any:
    """`value` as the parser left it (a string, a list of them, a flag) → what it means."""
    if isinstance(value, str):
        return conversion(name, value)
    if isinstance(value, list | tuple):
        return [conversion(name, item) for item in value]
    return value


def flatten(
    function: Callable[..., None],
) -> tuple[list[Option | Argument], Callable[[Any, Mapping[str, Any]], None]]:
    """Parameters of a command from a function of option dataclasses, and what calls it with them.

    They are the fields of every dataclass that a parameter of `function` is annotated with, except
    those in `Without`; a call builds the dataclasses. Another parameter is the context. A name that
    occurs twice is a mistake in the program: ValueError.
    """
    groups: dict[str, tuple[Any, list[str]]] = {}
    options: dict[str, Declared] = {}
    contexts: list[str] = []
    hints = get_type_hints(function, include_extras=True)
    for name in inspect.signature(function).parameters:
        group: Any = hints[name]
        left_out: tuple[str, ...] = ()
        match get_args(group):
            case (kind, Without(names)):
                group, left_out = kind, names
        if not is_dataclass(group):
            contexts.append(name)
            continue
        types, panel = get_type_hints(group), getattr(group, "panel", None)
        kept = [one for one in fields(group) if one.name not in left_out]
        groups[name] = group, [one.name for one in kept]
        for one in kept:
            if one.name in options:
                raise ValueError(f"two options are called {one.name!r}")
            declared: Declared = one.metadata["declared"]
            options[one.name] = replace(
                declared, type=types[one.name], panel=declared.panel or panel
            )

    def call(ctx: Any, values: Mapping[str, Any]) -> None:
        check_rules(values, options)
        built = {
            name: group(**{one: values[one] for one in names})
            for name, (group, names) in groups.items()
        }
        function(**built, **dict.fromkeys(contexts, ctx))

    made = [(Option if one.names else Argument)(name, one) for name, one in options.items()]
    return made, call
