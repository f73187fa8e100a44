"""A text in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.text import TokenPiece


@dataclass(frozen=True, kw_only=True)
class TokensReport:
    """A text in tokens, as the model would be given it. `rendered`: the chat template's text."""

    text: str | None
    rendered: str | None
    tokens: tuple[TokenPiece, ...]
    bytes: int
    vocabulary: int
    bos: int | None
    adds_bos: bool
    eos: tuple[int, ...]
