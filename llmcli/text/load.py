"""Builds the tokenizer of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.errors import CheckpointError
from llmcli.text.gguf import from_gguf
from llmcli.text.hf import find_pieces, from_directory, from_piece_file

if TYPE_CHECKING:
    from llmcli.checkpoints.checkpoint import Checkpoint
    from llmcli.text.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint, *, text: bool = True) -> Tokenizer | None:
    """Build the checkpoint's tokenizer; None if it has none.

    GGUF: from the metadata. Safetensors: from `tokenizer.json` and its settings, otherwise a
    SentencePiece model (`tokenizer.model`). Raises `UnsupportedModel` for an unknown kind and
    `CheckpointError` for broken or contradictory files; without `text` these give None, since ids
    need no tokenizer.
    """
    try:
        return _load(checkpoint)
    except CheckpointError:
        if text:
            raise
        return None


def _load(checkpoint: Checkpoint) -> Tokenizer | None:
    if checkpoint.kind == "gguf":
        return from_gguf(checkpoint.config or {})
    pieces = find_pieces(checkpoint.folder)
    if pieces is not None:
        return from_piece_file(
            pieces, config=checkpoint.config, generation=checkpoint.generation_config
        )
    return from_directory(
        checkpoint.folder, config=checkpoint.config, generation=checkpoint.generation_config
    )
