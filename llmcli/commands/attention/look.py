"""`/look attention`: the heads, reading the conversation."""

from __future__ import annotations

import shlex
from typing import Any

from llmcli.commands.attention.options import AttentionOptions
from llmcli.shell.inspection import InChat, Shown
from llmcli.shell.progress import Progress


def look(chat: InChat, given: dict[str, str]) -> Shown:
    """Metrics, or matrices of the heads that are named."""
    from llmcli.commands.attention.measure.run import measure_attention
    from llmcli.commands.attention.view.screen import FollowUps, render_attention

    heads = AttentionOptions(**dict[str, Any](given))
    heads.check()
    heads.check_model(chat.model.config)
    heads.check_tokens(len(chat.ids))
    with Progress(chat.out) as progress:
        report = measure_attention(chat.model, chat.ids, heads, progress=progress)
    repeated = shlex.join(["llmcli", "attention", "--synthetic", "32", "-m", chat.model.name])
    calls = FollowUps(same="/look attention", repeated=repeated)
    return render_attention(report, chat.title, heads, calls), report.checks
