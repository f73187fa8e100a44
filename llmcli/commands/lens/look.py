"""`/look lens`: the likeliest tokens after every layer."""

from __future__ import annotations

from shutil import get_terminal_size
from typing import Any

from llmcli.commands.lens.command import LensOptions, lens_report
from llmcli.shell.looking import InChat, Shown


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """The last positions that fit the screen, unless others are named."""
    from llmcli.commands.lens.view.screen import render_lens

    options = LensOptions(**dict[str, Any](given))
    options.check(chat.model.config)
    report = lens_report(chat.model, chat.ids, 0, options, chat.out)
    height = get_terminal_size().lines
    shown = render_lens(report, chat.title, ranks=options.target != "output", height=height)
    return shown, report.checks
