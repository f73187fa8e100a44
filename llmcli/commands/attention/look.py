"""`/look attention`: the heads, reading the conversation."""

from __future__ import annotations

import shlex
from typing import Any

from llmcli.commands.attention.command import measured
from llmcli.commands.attention.options import AttentionOptions
from llmcli.shell.looking import InChat, Shown


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Metrics, or matrices of the heads that are named."""
    from llmcli.commands.attention.view.screen import FollowUps, render_attention

    heads = AttentionOptions(**dict[str, Any](given))
    heads.check()
    heads.check_model(chat.model.config)
    heads.check_tokens(len(chat.ids))
    report = measured(chat.model, chat.ids, heads, chat.out)
    repeated = shlex.join(["llmcli", "attention", "--synthetic", "32", "-m", chat.model.name])
    calls = FollowUps(same="/look attention", repeated=repeated)
    return render_attention(report, chat.title, heads, calls), report.checks
