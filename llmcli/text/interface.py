"""Converts prompts to token ids and tokens to text, without PyTorch or weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.errors import CheckpointError
from llmcli.records.text import Token
from llmcli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmcli.checkpoints import Checkpoint
    from llmcli.config import ModelConfig


@dataclass(kw_only=True)
class TextInterface:
    """A model's tokenizer (None: none), and the ids that end a text (`ending_ids`)."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]

    def token_text(self, id: int) -> str:
        """The token for display; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.token_text(id)

    def tokens(self, ids: Sequence[int]) -> tuple[Token, ...]:
        """The tokens with those ids."""
        return tuple(Token(id=id, text=self.token_text(id)) for id in ids)

    def check_tokenized(self, ids: Sequence[int]) -> None:
        """Raise CheckpointError if an id exceeds the embedding."""
        if ids and max(ids) >= self.config.vocab:
            raise CheckpointError(
                f"the tokenizer of `{self.name}` gives the id {max(ids)}, but the model has "
                f"{self.config.vocab} embeddings",
                hint="its weights and its tokenizer belong to different models",
            )


def ending_ids(
    config: ModelConfig, tokenizer: Tokenizer | None, checkpoint: Checkpoint
) -> frozenset[int]:
    """All ids that end a text: of the configuration, the generation settings and the tokenizer."""
    ids = set(config.eos)
    settings: Mapping[str, Any] = checkpoint.generation_config or {}
    named = settings.get("eos_token_id")
    ids.update(i for i in (named if isinstance(named, list) else [named]) if type(i) is int)
    if tokenizer is not None:
        ids |= tokenizer.eos_ids
    return frozenset(ids)
