"""`/look`: what `attention`, `experts`, `lens` and `timing` show, of the conversation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import import_module

from llmcli.cli.exits import SIGNALS
from llmcli.cli.looking import IN_CHAT, InChat, Shown
from llmcli.cli.output import require
from llmcli.commands.chat.talk import Talk
from llmcli.errors import UsageError
from llmcli.ui.theme import one_line

MOST = 1024  # tokens that are looked at, the last ones
_HINT = "`llmcli explain` finds the formula that does not hold"


def look(talk: Talk, argument: str) -> None:
    """Shows one of `IN_CHAT` of the conversation so far, which a pass of its own reads once more.

    Raises UsageError for another name or option, and what measuring raises.
    """
    try:
        name, *words = shlex.split(argument) or [""]
    except ValueError:  # a quote without its other half
        name, words = "", []
    if name not in IN_CHAT:
        raise UsageError(f"`/look` takes {', '.join(IN_CHAT)}", hint="such as `/look attention`")
    given = _options(name, words, IN_CHAT[name])
    ids = talk.conversation.ids()
    if not ids:
        raise UsageError("there is nothing to look at: nothing was said yet")
    if len(ids) > MOST:
        talk.out.note(f"the last {MOST:,} of {len(ids):,} tokens are looked at, on their own")
    chat = InChat(
        model=talk.conversation.model, ids=ids[-MOST:], answer=talk.conversation.last_answer,
        room=talk.conversation.room, out=talk.out,
    )  # fmt: skip
    from rich.text import Text

    from llmcli.ui.checks import render_checks

    view: Shown = import_module(f"llmcli.commands.{name}.look").look(chat, given)
    shown, checks = view
    with SIGNALS.held():  # stdout is needed for the next answer
        ending = [Text(), render_checks(checks, full=False)] if checks else []
        (talk.out.aside if talk.out.json else talk.out.show)(shown, *ending)
    require(checks, _HINT)


def _options(name: str, words: Sequence[str], allowed: Sequence[str]) -> dict[str, str]:
    """`--layer 3 --head 2` → by name."""
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    flags = {f"--{option.replace('_', '-')}": option for option in allowed}
    wrong = next((flag for flag in words[::2] if flag not in flags), None)
    if wrong is not None or len(words) % 2:
        takes = ", ".join(f"`{flag} …`" for flag in flags) or "no options"
        raise UsageError(f"`/look {name}` takes {takes}, not `{one_line(' '.join(words))}`")
    return {flags[flag]: value for flag, value in pairs.items()}
