"""`llmcli help`: commands and topics; a topic; the help of a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from llmcli.cli.group import sections, width
from llmcli.cli.topics import TOPICS, Topic, spellings, topic_of
from llmcli.errors import UsageError
from llmcli.shell.options import OutputOptions
from llmcli.shell.output import Output, make_console
from llmcli.shell.params import arg, opt

EPILOG = """
Examples:

  llmcli help
  llmcli help sampling
  llmcli help models pull
  llmcli help attention | less
"""


@dataclass(frozen=True, kw_only=True)
class HelpOptions:
    """The topic or command to explain."""

    subject: list[str] | None = arg(
        None, "[TOPIC|COMMAND]", "A topic, or a command. [default: all are listed]"
    )
    no_pager: bool = opt(False, "--no-pager", "Show a long text without a pager.")


def command(requested: HelpOptions) -> None:
    """Explains a topic, or lists the options of a command.

    `help COMMAND` is `COMMAND --help`. A topic that is called as a command (models, shapes,
    attention) is about what the command works with, and names its `--help`.
    """
    words = requested.subject or []
    out = Output("help", OutputOptions())
    if not words:
        rows = [(topic.name, topic.summary) for topic in TOPICS.values()]
        topics = "\n".join(sections({"Topics (`llmcli help TOPIC`)": rows}))
        out.print(f"{_help_of([])}\n\n{topics}\n", paged=not requested.no_pager)
    elif topic := topic_of(words):
        out.print(_explained(topic, out), paged=not requested.no_pager)
    else:
        out.print(f"{_help_of(words)}\n", paged=not requested.no_pager)


def _explained(topic: Topic, out: Output) -> str:
    """A topic, with its tables, as wide as the terminal."""
    from llmcli.cli.help.view import drawn

    text = topic.text()
    if "<!-- table: " in text:
        from llmcli.cli.vocabulary import filled

        text = filled(text)
    screen = out.out
    console = make_console(screen)
    console.width = screen.width if screen.terminal else width()
    return drawn(text, console)


def _help_of(words: Sequence[str]) -> str:
    """What `llmcli WORDS --help` prints. Raises UsageError for what is no command."""
    from llmcli.cli.tree import root  # which names this module

    top: Any = root()
    context = top.make_context("llmcli", [], resilient_parsing=True)
    if not words:
        return str(top.get_help(context))
    name = " ".join(words)
    if name not in top.entries and name not in top.nested:
        raise _unknown(name, [*top.entries, *top.nested])
    found = top.get_command(context, name)
    inner = found.make_context(name, [], parent=context, resilient_parsing=True)
    return str(found.get_help(inner))


def _unknown(name: str, commands: Sequence[str]) -> UsageError:
    """For what is neither a topic nor a command."""
    named = spellings()
    close = get_close_matches(name.lower(), [*named, *commands], 1)
    if close:
        topic = topic_of(close) if close[0] in named else None
        hint = f"did you mean `llmcli help {topic.name if topic else close[0]}`?"
    else:
        hint = f"the topics are {', '.join(TOPICS)}; `llmcli help` lists the commands, too"
    return UsageError(f"unknown topic or command `{name}`", hint=hint)
