"""`/look lens`: the likeliest tokens after every layer."""

from __future__ import annotations

from shutil import get_terminal_size
from typing import Any

from llmcli.commands.lens.command import LensOptions
from llmcli.shell.looking import InChat, Shown


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """The last positions that fit the screen, unless others are named."""
    from llmcli.commands.lens.view import render_lens

    options = LensOptions(**dict[str, Any](given))
    options.check(chat.model.config)
    report = options.measure(chat)
    height = get_terminal_size().lines
    return render_lens(report, chat.title, ranks=options.ranks, height=height), report.checks
