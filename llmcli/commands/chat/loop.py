"""Line after line of a conversation: what is typed, and what becomes of it."""

from __future__ import annotations

from llmcli.cli.exits import SIGNALS, tell
from llmcli.commands.chat.commands import COMMANDS, Draft, Exit, completions, dispatch, recall
from llmcli.commands.chat.mentions import with_files
from llmcli.commands.chat.talk import Talk
from llmcli.commands.chat.typed import Lines, lines_of
from llmcli.errors import LlmcliError, as_out_of_memory
from llmcli.reports.numbers import counted

_ENDS = ("exit", "quit", "bye")  # what is typed by who knows other programs


def converse(talk: Talk) -> None:
    """Asks for lines and does what they say, until `/exit` or Ctrl-D."""
    name = talk.conversation.model.name
    if not talk.out.quiet:
        talk.out.aside(f"{name} · /help lists the commands, Ctrl-D ends")
        if said := [one for one in talk.conversation.messages if one.role != "system"]:
            talk.aside(f"{counted(len(said), 'message')} so far")
            recall(talk)
    lines = lines_of(tuple(COMMANDS), lambda command: completions(talk, command), talk.aside)
    talk.choose = lines.choose
    draft = Draft()
    while True:
        try:
            draft = _line(talk, lines, draft)
        except Exit:
            return
        except KeyboardInterrupt:
            SIGNALS.forget()
            talk.aside("interrupted")
            draft = Draft()


def _line(talk: Talk, lines: Lines, draft: Draft) -> Draft:
    """Asks for a line and does what it says; returns what the next one is to begin with."""
    line = lines.ask(draft.text, "" if talk.out.quiet else talk.meter())
    if line is None:
        raise Exit
    talk.out.fit()
    try:
        return _done(talk, line, draft)
    except LlmcliError as error:
        _tell(error)
    except (MemoryError, RuntimeError) as exception:
        hint = "take something back with `/undo`, or begin anew with `/clear`"
        known = as_out_of_memory(SIGNALS.cause(exception), hint=hint)
        if known is None:
            raise
        _tell(known)
    return Draft()


def _done(talk: Talk, line: str, draft: Draft) -> Draft:
    """Does it, and the file follows."""
    try:
        if line.startswith("/") and not line.startswith("//"):
            return dispatch(talk, line.strip()) or Draft()
        if line.strip() in _ENDS:
            talk.out.note("`/exit` ends")
        elif line.strip():
            text = with_files(line.removeprefix("/"), talk.out.note)
            if text != line:
                talk.typed[text] = line
            talk.say(text, instead=draft.instead)
        return Draft()
    finally:
        talk.follow()


def _tell(error: LlmcliError) -> None:
    """One line and its hint, as at the end of a run; the conversation goes on."""
    tell(f"error: {error.message}")
    if error.hint:
        tell(f"hint: {error.hint}")
