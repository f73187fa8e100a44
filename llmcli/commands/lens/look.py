"""`/look lens`: the likeliest tokens after every layer."""

from __future__ import annotations

from typing import Any

from llmcli.cli.looking import InChat, NewTokensOptions, Shown
from llmcli.commands.lens.command import lens_report
from llmcli.commands.lens.options import LensOptions


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """The last positions that fit the screen, unless others are named."""
    from llmcli.commands.lens.view.screen import render_lens
    from llmcli.ui.stats import model_line

    options = LensOptions(**dict[str, Any](given))
    options.check(chat.model.config)
    report = lens_report(chat.model, chat.ids, NewTokensOptions(), options, "", chat.out)
    title = model_line(chat.model.describe())
    return render_lens(report, title, ranks=options.target != "output"), report.checks
