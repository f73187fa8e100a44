"""The tokenizer of a checkpoint, and what a model uses of it, without PyTorch or weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.errors import CheckpointError
from llmcli.records.text import Token
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import eos_ids, from_directory

if TYPE_CHECKING:
    from llmcli.checkpoints.checkpoint import Checkpoint
    from llmcli.config.model import ModelConfig
    from llmcli.text.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint, *, text: bool = True) -> Tokenizer | None:
    """Build the checkpoint's tokenizer; None if it has none.

    GGUF: from the metadata. Safetensors: from `tokenizer.json` and its settings, otherwise a
    SentencePiece model (`tokenizer.model`). Raises `UnsupportedModel` for an unknown kind and
    `CheckpointError` for broken or contradictory files; without `text` these give None, since ids
    need no tokenizer.
    """
    try:
        if checkpoint.kind == "gguf":
            return from_gguf(checkpoint.config or {})
        return from_directory(
            checkpoint.folder, config=checkpoint.config, generation=checkpoint.generation_config
        )
    except CheckpointError:
        if text:
            raise
        return None


@dataclass(kw_only=True)
class TextInterface:
    """A model's tokenizer (None: none), and all ids that end a text."""

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


def text_interface(checkpoint: Checkpoint, config: ModelConfig, *, text: bool) -> TextInterface:
    """With the ids of configuration, generation settings and tokenizer; see `load_tokenizer`."""
    tokenizer = load_tokenizer(checkpoint, text=text)
    ids = {*config.eos, *eos_ids(checkpoint.generation_config)}
    ending = frozenset(ids | (set() if tokenizer is None else tokenizer.eos_ids))
    return TextInterface(name=checkpoint.name, config=config, tokenizer=tokenizer, eos_ids=ending)
