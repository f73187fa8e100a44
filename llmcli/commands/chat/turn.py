"""What an answer of a conversation took, in words and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.reports.numbers import counted
from llmcli.ui.layout import SEPARATOR

if TYPE_CHECKING:
    from llmcli.generation.conversation import Conversation


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the last answer took. `read` of the prompt's tokens were new to the model."""

    prompt: int
    read: int
    generated: int
    prompt_s: float
    decode_s: float


def took(turn: Turn, conversation: Conversation) -> dict[str, Any]:
    """The same for JSON, and what the conversation's draft was worth so far."""
    found: dict[str, Any] = {
        "tokens": {"prompt": turn.prompt, "computed": turn.read, "generated": turn.generated},
        "timings": {"prompt_s": turn.prompt_s, "decode_s": turn.decode_s},
    }
    if (speculation := conversation.speculation) is not None:
        found["speculation"] = speculation.describe()
    return found


def stats_line(turn: Turn | None, conversation: Conversation, used: int) -> str:
    """What the last answer took where there was one, and how full the context is (`used`)."""
    room = conversation.room
    context = f"context {used:,} of {room:,} tokens ({used / room:.0%})"
    if turn is None:
        return context
    speed = f", {(turn.generated - 1) / turn.decode_s:.3g} tok/s" if turn.generated > 1 else ""
    read = f"read {counted(turn.read, 'new token')} of {turn.prompt:,}"
    parts = [
        f"{read} in {turn.prompt_s * 1000:.0f} ms",
        f"wrote {turn.generated:,}{speed}", context,
    ]  # fmt: skip
    if (speculation := conversation.speculation) is not None:
        from llmcli.ui.stats import draft_words

        parts.insert(2, f"draft {draft_words(speculation.describe())} so far")
    return SEPARATOR.join(parts)
