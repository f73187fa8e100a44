"""What begins with a slash in a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from textwrap import wrap
from typing import TYPE_CHECKING, get_args

from llmcli.cli.looking import IN_CHAT
from llmcli.cli.transcript import check_replaceable
from llmcli.cli.variables import value_of
from llmcli.cli.wrap import wrapped
from llmcli.commands.chat.look import look
from llmcli.commands.chat.screen import ReasoningMode, write_reasoning
from llmcli.commands.chat.settings import NAMES
from llmcli.commands.chat.talk import Talk
from llmcli.errors import UsageError
from llmcli.reports.numbers import counted
from llmcli.ui.theme import one_line

if TYPE_CHECKING:
    from llmcli.text.chat import ChatTemplate

_PATHS = ("load", "save")  # commands that take the path of a file
_WIDEST = 200  # columns of a message that is recalled
_ALIASES = {"bye": "exit", "quit": "exit", "?": "help"}


class Exit(Exception):
    """`/exit`."""


@dataclass(frozen=True)
class Draft:
    """What the next line begins with; `instead`: it is said instead of the last message."""

    text: str = ""
    instead: bool = False


@dataclass(frozen=True)
class SlashCommand:
    """`run(talk, argument)` returns what the next line is to begin with, or None.

    `values(talk)` are what its argument may be.
    """

    usage: str
    words: str
    run: Callable[[Talk, str], Draft | None]
    values: Callable[[Talk], Iterable[str]] = lambda talk: ()


def completions(talk: Talk, name: str) -> Iterable[str] | None:
    """What may stand behind `/name`; None for paths."""
    return None if name in _PATHS else COMMANDS[name].values(talk) if name in COMMANDS else ()


def dispatch(talk: Talk, line: str) -> Draft | None:
    """Runs `/name argument`. Raises UsageError for a name that is none, and the command's errors.

    Raises Exit for `/exit`.
    """
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean `/{near[0]}`?" if near else "`/help` lists the commands;"
        hint += " `//…` says `/…` to the model"
        raise UsageError(f"there is no command `/{one_line(name)}`", hint=hint)
    return command.run(talk, argument.strip())


def _help(talk: Talk, argument: str) -> None:
    indent = max(len(command.usage) for command in COMMANDS.values()) + 2
    width = (talk.out.err if talk.out.json else talk.out.out).width
    for command in COMMANDS.values():
        first, *more = wrap(command.words, max(20, width - indent))
        _say(talk, f"{command.usage:<{indent}}{first}")
        for line in more:
            _say(talk, " " * indent + line)
    _say(talk, "@PATH puts a file's text into a message, Tab completes commands and paths.")
    _say(talk, "A backslash before Enter, or Esc Enter, begins a new line, and so does Enter "
         'between """ and """. A message that begins with // is said with one slash.')  # fmt: skip
    _say(talk, "Ctrl-C stops an answer, Ctrl-Z suspends, Ctrl-D ends.")


def _system(talk: Talk, argument: str) -> None:
    conversation = talk.conversation
    if argument:
        conversation.set_system(None if argument == "none" else argument)
    if conversation.system is None and (own := _template(talk).own_system(conversation.variables)):
        _say(talk, f"system: none, so the template's own: {one_line(own)}")
    else:
        _say(talk, f"system: {one_line(conversation.system or 'none')}")


def _set(talk: Talk, argument: str) -> None:
    settings = talk.settings
    name, _, text = argument.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if text:
        value = value_of(text, f"`/set {one_line(name)}`")
        if name in NAMES:
            settings.change(name, value, text)
        elif name == "system":
            raise UsageError("`/set` has no `system`", hint="`/system TEXT` sets that message")
        else:
            talk.set_variable(name, value)
        talk.chosen[name] = "/set"
    elif name:
        raise UsageError("`/set` takes a name and a value", hint="such as `/set temperature 0.5`")
    rows = settings.rows()
    for key, found in talk.conversation.variables.items():
        rows[key] = f"{one_line(str(found))}  (of the template)"
    for key in [name] if name else rows:
        _say(talk, f"{one_line(key):<20}{rows[key]}")


def _stats(talk: Talk, argument: str) -> None:
    if argument in ("on", "off"):
        talk.stats = argument == "on"
    elif argument:
        raise UsageError(f"`/stats` takes on or off, not `{one_line(argument)}`")
    _say(talk, talk.stats_line())


def _reasoning(talk: Talk, argument: str) -> None:
    modes = {mode: mode for mode in get_args(ReasoningMode)}
    if argument:
        if argument not in modes:
            raise UsageError(
                f"`/reasoning` takes {', '.join(modes)} or nothing, not `{one_line(argument)}`"
            )
        talk.reasoning = modes[argument]
        _say(talk, f"reasoning: {argument}")
        return
    answers = [one for one in talk.conversation.messages if one.role == "assistant"]
    if not answers or not answers[-1].reasoning:
        raise UsageError("the last answer has no reasoning")
    write_reasoning(talk.out, answers[-1].reasoning)


def _tokens(talk: Talk, argument: str) -> None:
    conversation, tokenizer = talk.conversation, talk.conversation.model.tokenizer
    assert tokenizer is not None
    ids, known = conversation.ids(), 0
    whole = tokenizer.decode(ids, skip_special=False)
    for one in conversation.messages:
        kept = one.ids and one.written in whole  # a template may leave out past reasoning
        count = len(one.ids if kept else tokenizer.encode(one.content, add_bos=False))
        known += count
        text = one_line(one.content)
        _say(talk, f"{one.role:<10}{count:>7,}  {text[:40]}{'…' * (len(text) > 40)}")
    if ids:
        own = not conversation.system and _template(talk).own_system(conversation.variables)
        beside = "its own system message and " * bool(own)
        _say(talk, f"{'template':<10}{len(ids) - known:>7,}  {beside}what it puts around these")
    _say(talk, f"{'context':<10}{len(ids):>7,}  of {conversation.room:,}")


def _undo(talk: Talk, argument: str) -> None:
    text = talk.conversation.undo()
    if text is None:
        raise UsageError("there is nothing to take back")
    _say(talk, f"taken back: {one_line(_typed(talk, text))}")


def _regen(talk: Talk, argument: str) -> None:
    talk.again()


def _edit(talk: Talk, argument: str) -> Draft:
    users = [one.content for one in talk.conversation.messages if one.role == "user"]
    if not users:
        raise UsageError("there is nothing to edit")
    return Draft(_typed(talk, users[-1]), instead=True)


def _typed(talk: Talk, text: str) -> str:
    """What is typed to say this."""
    return talk.typed.get(text, "/" * text.startswith("/") + text)


def _save(talk: Talk, argument: str) -> None:
    path = argument or talk.file
    if not path:
        raise UsageError("`/save` takes the path of a file", hint="such as `/save talk.json`")
    check_replaceable(path)
    talk.save(path)
    talk.file = path
    _say(talk, f"saved to {one_line(path)}, and again after every change")


def _load(talk: Talk, argument: str) -> None:
    if not argument:
        raise UsageError("`/load` takes the path of a file", hint="such as `/load talk.json`")
    found = talk.load(argument)
    _say(talk, f"{counted(len(found.messages), 'message')} of {one_line(argument)}")
    recall(talk)


def recall(talk: Talk) -> None:
    """The last exchange, faint, a line for each of its messages."""
    messages, width = talk.conversation.messages, min(talk.out.err.width, _WIDEST)
    for one in messages[-2:]:
        line = f"{one.role}: {one_line(one.content)}"
        if one.role != "system":
            talk.aside(line if len(line) < width else f"{line[: width - 2]}…")
    if messages and messages[-1].role == "user":
        talk.out.note("the last message has no answer: `/regen` gives it one")


def _clear(talk: Talk, argument: str) -> None:
    talk.conversation.clear()
    _say(talk, "cleared: only the system message stays" if talk.conversation.system else "cleared")


def _exit(talk: Talk, argument: str) -> None:
    raise Exit


def _template(talk: Talk) -> ChatTemplate:
    tokenizer = talk.conversation.model.tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template


def _say(talk: Talk, line: str) -> None:
    if talk.out.json:  # stdout has the answers, a line each
        talk.out.aside(line)
    else:
        talk.out.write(wrapped(line, talk.out.out.width) + "\n")


COMMANDS = {
    "help": SlashCommand("/help", "this list", _help),
    "system": SlashCommand("/system [TEXT|none]", "shows or replaces the system message", _system),
    "set": SlashCommand(
        "/set [NAME VALUE]", "sampling, max_tokens, seed, variables of the template", _set,
        lambda talk: sorted({*NAMES, *talk.conversation.template_variables()}),
    ),
    "stats": SlashCommand(
        "/stats [on|off]", "tokens and speed of the last answer, or of every one", _stats,
        lambda talk: ("on", "off"),
    ),
    "reasoning": SlashCommand(
        "/reasoning [show|fold|hide]", "that of the last answer, or how it is shown", _reasoning,
        lambda talk: get_args(ReasoningMode),
    ),
    "tokens": SlashCommand("/tokens", "tokens of every message", _tokens),
    "undo": SlashCommand("/undo", "takes back your last message and its answer", _undo),
    "regen": SlashCommand("/regen", "another answer to your last message", _regen),
    "edit": SlashCommand("/edit", "your last message once more, to change it", _edit),
    "look": SlashCommand(
        f"/look {'|'.join(IN_CHAT)}", "what the model computes of the conversation", look,
        lambda talk: IN_CHAT,
    ),
    "save": SlashCommand(
        "/save FILE", "the conversation as JSON, now and after every change", _save
    ),
    "load": SlashCommand("/load FILE", "goes on with one that was saved", _load),
    "clear": SlashCommand("/clear", "forgets everything but the system message", _clear),
    "exit": SlashCommand("/exit", "ends; so does Ctrl-D", _exit),
}
