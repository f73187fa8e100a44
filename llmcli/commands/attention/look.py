"""`/look attention`: the heads, reading the conversation."""

from __future__ import annotations

import shlex
from typing import Any

from llmcli.cli.looking import InChat, Shown
from llmcli.commands.attention.options import HeadOptions, ViewOptions
from llmcli.commands.attention.request import Asked
from llmcli.commands.attention.run import Run


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Metrics, or matrices of the heads that are named."""
    from llmcli.commands.attention.view.screen import Calls, render_attention

    named: dict[str, Any] = {name: given[name] for name in ("layer", "head") if name in given}
    rest: dict[str, Any] = {name: text for name, text in given.items() if name not in named}
    heads, view = HeadOptions(**named), ViewOptions(**rest)
    asked = Asked.of(heads, view, json=False)
    run = Run(chat.model, tuple(chat.ids), 0, heads, view, asked)
    report = run.measured(None, chat.out)
    repeated = shlex.join(["llmcli", "attention", "--synthetic", "32", "-m", chat.model.name])
    calls = Calls(same="/look attention", repeated=repeated)
    return render_attention(report, run.title, run.views(report, calls)), report.checks
