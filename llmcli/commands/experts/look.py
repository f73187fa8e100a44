"""`/look experts`: the experts that the tokens of the last answer took."""

from __future__ import annotations

from typing import Any

from llmcli.commands.experts.command import ExpertsOptions
from llmcli.shell.looking import InChat, Shown


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Shows the experts of the last answer and its end, unless positions are named."""
    from llmcli.commands.experts.view import render_experts

    answer = min(chat.answer, len(chat.ids))
    last = {"position": f"-{answer}:"} if answer else {}
    options = ExpertsOptions(**dict[str, Any](last | given))
    options.check(chat.model.config)
    report = options.measure(chat)
    return render_experts(report, chat.title), report.checks
