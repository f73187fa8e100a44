"""The lines of a chat: messages, and slash commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from textwrap import wrap
from typing import get_args

from llmcli.commands.chat.chat import NAMES, Chat
from llmcli.commands.chat.screen import ReasoningMode, write_reasoning
from llmcli.commands.chat.typed import EditedLines, Lines, with_files
from llmcli.errors import LlmcliError, UsageError, as_out_of_memory
from llmcli.records.numbers import counted, did_you_mean
from llmcli.records.ranges import SAMPLING
from llmcli.shell.conversations import check_replaceable
from llmcli.shell.encoding import value_of
from llmcli.shell.exits import SIGNALS, tell_error
from llmcli.shell.inspection import IN_CHAT, InChat, Shown
from llmcli.shell.output import EXPLAIN, require
from llmcli.shell.sampling import ALIASES
from llmcli.shell.streams import wrapped
from llmcli.ui.theme import one_line

_INSPECTED = 1024  # the last tokens of a longer conversation
_WIDEST = 200  # columns of a message that is recalled
_ALIASES = {"bye": "exit", "quit": "exit", "?": "help"}
_ENDS = ("exit", "quit", "bye")  # words that end other programs


class Exit(Exception):
    """`/exit`."""


@dataclass(frozen=True)
class NextLine:
    """The text that the next line begins with; `instead`: it replaces the last message."""

    text: str = ""
    instead: bool = False


@dataclass(frozen=True)
class SlashCommand:
    """`run(chat, argument)` returns what the next line is to begin with, or None.

    `values(chat)`: what Tab completes its argument to; None: paths of files.
    """

    usage: str
    words: str
    run: Callable[[Chat, str], NextLine | None]
    values: Callable[[Chat], Iterable[str]] | None = lambda chat: ()


def dispatch(chat: Chat, line: str) -> NextLine | None:
    """Runs `/name argument`. Raises UsageError for an unknown name, and the command's errors.

    Raises Exit for `/exit`.
    """
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        near = get_close_matches(name, COMMANDS, 1)
        setting = name.replace("-", "_")
        if (setting := ALIASES.get(setting, setting)) in NAMES:
            near = [f"set {setting}"]
        hint = did_you_mean([f"/{one}" for one in near], "`/help` lists the commands;")
        hint += " `//…` says `/…` to the model"
        raise UsageError(f"unknown command `/{one_line(name)}`", hint=hint)
    return command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    indent = max(len(command.usage) for command in COMMANDS.values()) + 2
    width = (chat.out.err if chat.out.json else chat.out.out).width
    beside = width - indent >= 30  # columns for the words; else they stand below
    for command in COMMANDS.values():
        if not beside:
            _say(chat, command.usage)
        lines = wrap(command.words, width - (indent if beside else 4))
        for number, line in enumerate(lines):
            start = command.usage if beside and not number else ""
            _say(chat, f"{start:<{indent if beside else 4}}{line}")
    _say(chat, "@PATH inserts the text of a file; Tab completes commands and paths.")
    _say(chat, 'New line: a backslash before Enter, Esc Enter, or anywhere between """ and """.')
    _say(chat, "A message that starts with // is sent with one slash.")
    _say(chat, "Ctrl-C stops an answer, Ctrl-Z suspends, Ctrl-D ends.")


def _system(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument:
        conversation.set_system(None if argument == "none" else argument)
    template, variables = conversation.template, conversation.variables
    if conversation.system is None and (own := template.own_system(variables)):
        _say(chat, f"system: none, so the template's own: {one_line(own)}")
    else:
        _say(chat, f"system: {one_line(conversation.system or 'none')}")


def _set(chat: Chat, argument: str) -> None:
    name, _, text = argument.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    name = ALIASES.get(name, name)
    if text and name == "edit":
        chat.edit(text)
    elif text:
        value = value_of(text, f"`/set {one_line(name)}`")
        if name in NAMES:
            chat.settings = chat.settings.change(name, value)
            chat.chosen.add(name)
        elif name == "system":
            raise UsageError("`/set` has no `system`", hint="`/system TEXT` sets that message")
        else:
            chat.set_variable(name, value)
    elif name:
        raise UsageError("`/set` takes a name and a value", hint="such as `/set temperature 0.5`")
    rows = {key: f"{getattr(chat.settings, key):g}" for key in SAMPLING}
    rows |= {key: str(getattr(chat.settings, key)) for key in ("max_tokens", "seed")}
    if edits := chat.conversation.model.edits:
        rows["edit"] = ", ".join(one_line(edit.text) for edit in edits)
    for key, found in chat.conversation.variables.items():
        rows[key] = f"{one_line(str(found))}  (of the template)"
    for key in [name] if name else rows:
        _say(chat, f"{one_line(key):<20}{rows.get(key, 'none')}")


def _stats(chat: Chat, argument: str) -> None:
    if argument in ("on", "off"):
        chat.stats = argument == "on"
    elif argument:
        raise UsageError(f"`/stats` takes on or off, not `{one_line(argument)}`")
    _say(chat, chat.stats_line())


def _reasoning(chat: Chat, argument: str) -> None:
    modes = {mode: mode for mode in get_args(ReasoningMode)}
    if argument:
        if argument not in modes:
            raise UsageError(
                f"`/reasoning` takes {', '.join(modes)} or nothing, not `{one_line(argument)}`"
            )
        chat.reasoning = modes[argument]
        _say(chat, f"reasoning: {argument}")
        return
    answers = [one for one in chat.conversation.messages if one.role == "assistant"]
    if not answers or not answers[-1].reasoning:
        raise UsageError("the last answer has no reasoning")
    write_reasoning(chat.out, answers[-1].reasoning)


def _tokens(chat: Chat, argument: str) -> None:
    conversation, tokenizer = chat.conversation, chat.conversation.tokenizer
    ids, known = conversation.ids(), 0
    whole = tokenizer.decode(ids, skip_special=False)
    for one in conversation.messages:
        kept = one.ids and one.written in whole  # a template may leave out past reasoning
        count = len(one.ids if kept else tokenizer.encode(one.content, add_bos=False))
        known += count
        text = one_line(one.content)
        _say(chat, f"{one.role:<10}{count:>7,}  {text[:40]}{'…' * (len(text) > 40)}")
    if ids:
        own = not conversation.system and conversation.template.own_system(conversation.variables)
        beside = "its own system message and " * bool(own)
        _say(chat, f"{'template':<10}{len(ids) - known:>7,}  {beside}what it puts around these")
    _say(chat, f"{'context':<10}{len(ids):>7,}  of {conversation.room:,}")


def _undo(chat: Chat, argument: str) -> None:
    text = chat.conversation.undo()
    if text is None:
        raise UsageError("there is nothing to undo")
    _say(chat, f"undone: {one_line(_typed(chat, text))}")


def _regen(chat: Chat, argument: str) -> None:
    chat.regenerate()


def _edit(chat: Chat, argument: str) -> NextLine:
    users = [one.content for one in chat.conversation.messages if one.role == "user"]
    if not users:
        raise UsageError("there is nothing to edit")
    return NextLine(_typed(chat, users[-1]), instead=True)


def _typed(chat: Chat, text: str) -> str:
    """The typed line of a message."""
    return chat.typed.get(text, "/" * text.startswith("/") + text)


def _save(chat: Chat, argument: str) -> None:
    path = argument or chat.file
    if not path:
        raise UsageError("`/save` takes the path of a file", hint="such as `/save talk.json`")
    check_replaceable(path)
    chat.save(path)
    chat.file = path
    _say(chat, f"saved to {one_line(path)}, and again after every change")


def _load(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("`/load` takes the path of a file", hint="such as `/load talk.json`")
    found = chat.load(argument)
    _say(chat, f"{counted(len(found.messages), 'message')} of {one_line(argument)}")
    recall(chat)


def recall(chat: Chat) -> None:
    """Shows the last exchange, faint, one line per message."""
    messages, width = chat.conversation.messages, min(chat.out.err.width, _WIDEST)
    for one in messages[-2:]:
        line = f"{one.role}: {one_line(one.content)}"
        if one.role != "system":
            chat.aside(line if len(line) < width else f"{line[: width - 2]}…")
    if messages and messages[-1].role == "user":
        chat.out.note("the last message has no answer: `/regen` gives it one")


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    _say(chat, "cleared: only the system message stays" if chat.conversation.system else "cleared")


def _exit(chat: Chat, argument: str) -> None:
    raise Exit


def look(chat: Chat, argument: str) -> None:
    """Shows one of the views `IN_CHAT` of the conversation so far, by a forward pass of its own.

    Raises UsageError for another name or option, and what measuring raises.
    """
    try:
        name, *words = shlex.split(argument) or [""]
    except ValueError:  # a quote without its other half
        name, words = "", []
    if name not in IN_CHAT:
        raise UsageError(f"`/look` takes {', '.join(IN_CHAT)}", hint="such as `/look attention`")
    flags = {f"--{option.replace('_', '-')}": option for option in IN_CHAT[name]}
    if len(words) % 2 or not flags.keys() >= set(words[::2]):
        takes = ", ".join(f"`{flag} …`" for flag in flags) or "no options"
        raise UsageError(f"`/look {name}` takes {takes}, not `{one_line(' '.join(words))}`")
    given = {flags[flag]: value for flag, value in zip(words[::2], words[1::2], strict=True)}
    ids = chat.conversation.ids()
    if not ids:
        raise UsageError("there is nothing to look at: the conversation is empty")
    if len(ids) > _INSPECTED:
        chat.out.note(f"the last {_INSPECTED:,} of {len(ids):,} tokens are inspected, on their own")
    view_of = InChat(
        model=chat.conversation.model,
        ids=ids[-_INSPECTED:],
        answer=chat.conversation.last_answer,
        room=chat.conversation.room,
        out=chat.out,
    )
    from rich.text import Text

    from llmcli.ui.layout import render_checks

    view: Shown = import_module(f"llmcli.commands.{name}.command").look(view_of, given)
    shown, checks = view
    with SIGNALS.held():  # stdout is needed for the next answer
        ending = [Text(), render_checks(checks, full=False, option="")] if checks else []
        (chat.out.aside if chat.out.json else chat.out.show)(shown, *ending)
    require(checks, EXPLAIN)


def _say(chat: Chat, line: str) -> None:
    if chat.out.json:  # stdout has the answers, a line each
        chat.out.aside(line)
    else:
        chat.out.write(wrapped(line, chat.out.out.width) + "\n")


COMMANDS = {
    "help": SlashCommand("/help", "lists these commands", _help),
    "system": SlashCommand("/system [TEXT|none]", "shows or replaces the system message", _system),
    "set": SlashCommand(
        "/set [NAME VALUE]", "shows or sets sampling, seed, template variables, edits", _set,
        lambda chat: sorted({*NAMES, "edit", *chat.conversation.template_variables()}),
    ),
    "stats": SlashCommand(
        "/stats [on|off]", "tokens and speed: of the last or of every answer", _stats,
        lambda chat: ("on", "off"),
    ),
    "reasoning": SlashCommand(
        "/reasoning [show|fold|hide]", "the last reasoning, or how reasoning is shown", _reasoning,
        lambda chat: get_args(ReasoningMode),
    ),
    "tokens": SlashCommand("/tokens", "tokens of every message", _tokens),
    "undo": SlashCommand("/undo", "removes the last message and its answer", _undo),
    "regen": SlashCommand("/regen", "generates another answer", _regen),
    "edit": SlashCommand("/edit", "edits the last message", _edit),
    "look": SlashCommand(
        "/look VIEW", f"{', '.join(IN_CHAT)} of the chat", look, lambda chat: IN_CHAT
    ),
    "save": SlashCommand("/save FILE", "saves as JSON, now and after every change", _save, None),
    "load": SlashCommand("/load FILE", "continues a saved conversation", _load, None),
    "clear": SlashCommand("/clear", "forgets all but the system message", _clear),
    "exit": SlashCommand("/exit", "ends the chat; so does Ctrl-D", _exit),
}


def converse(chat: Chat) -> None:
    """Reads lines and runs or sends them, until `/exit` or Ctrl-D."""
    if not chat.out.quiet:
        name = chat.conversation.model.name
        chat.out.aside(f"{name} · /help lists the commands, Ctrl-D ends")
        if said := [one for one in chat.conversation.messages if one.role != "system"]:
            chat.aside(f"{counted(len(said), 'message')} so far")
            recall(chat)
    values = {
        name: None if command.values is None else partial(command.values, chat)
        for name, command in COMMANDS.items()
    }
    dumb = os.environ.get("TERM") == "dumb"
    lines = Lines(chat.aside) if dumb else EditedLines(values, chat.aside)
    chat.choose = lines.choose
    draft = NextLine()
    while True:
        try:
            draft = _line(chat, lines, draft)
        except Exit:
            return
        except KeyboardInterrupt:
            SIGNALS.forget()
            chat.aside("interrupted")
            draft = NextLine()


def _line(chat: Chat, lines: Lines, draft: NextLine) -> NextLine:
    """Reads a line and runs or sends it; returns the text to begin the next line with.

    Saves the changes to the file. Errors are printed, and the conversation continues.
    """
    line = lines.ask(draft.text, "" if chat.out.quiet else chat.meter())
    if line is None:
        raise Exit
    chat.out.fit()
    try:
        try:
            if line.startswith("/") and not line.startswith("//"):
                return dispatch(chat, line.strip()) or NextLine()
            if line.strip() in _ENDS:
                chat.out.note("`/exit` ends")
            elif line.strip():
                text = with_files(line.removeprefix("/"), chat.out.note)
                if text != line:
                    chat.typed[text] = line
                chat.say(text, instead=draft.instead)
        finally:
            chat.save_changes()
    except LlmcliError as error:
        tell_error(error)
    except (MemoryError, RuntimeError) as exception:
        hint = "remove a turn with `/undo`, or start over with `/clear`"
        known = as_out_of_memory(SIGNALS.cause(exception), hint=hint)
        if known is None:
            raise
        tell_error(known)
    return NextLine()
