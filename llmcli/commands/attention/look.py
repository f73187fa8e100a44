"""`/look attention`: the heads, reading the conversation."""

from __future__ import annotations

import shlex
from typing import Any

from llmcli.commands.attention.command import measured
from llmcli.commands.attention.options import HeadOptions, ViewOptions, at_positions, request_of
from llmcli.shell.looking import InChat, Shown


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Metrics, or matrices of the heads that are named."""
    from llmcli.commands.attention.view.screen import Calls, attention_views, render_attention

    named: dict[str, Any] = {name: given[name] for name in ("layer", "head") if name in given}
    rest: dict[str, Any] = {name: text for name, text in given.items() if name not in named}
    heads, view = HeadOptions(**named), ViewOptions(**rest)
    view.check(heads)
    request = at_positions(request_of(heads, view, chat.model.config), view, len(chat.ids))
    report = measured(chat.model, tuple(chat.ids), request, chat.out)
    repeated = shlex.join(["llmcli", "attention", "--synthetic", "32", "-m", chat.model.name])
    views = attention_views(report, request, Calls(same="/look attention", repeated=repeated))
    return render_attention(report, chat.title, views), report.checks
