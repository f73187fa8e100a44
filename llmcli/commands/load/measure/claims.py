"""What a checkpoint says of its weights, compared with what it has, from headers alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint
from llmcli.checkpoints.files import read_object
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.commands.load.report import MetadataCheck
from llmcli.config import ModelConfig
from llmcli.records.numbers import counted
from llmcli.text import Tokenizer

_QUANTIZATION = 2  # the version of the layout of blocks since May 2023, and the only one known
_PLAIN = {"F64", "F32", "F16", "BF16"}  # formats without blocks


def claims(
    checkpoint: Checkpoint, config: ModelConfig | None, tokenizer: Tokenizer | None
) -> tuple[MetadataCheck, ...]:
    """Each claim with what is true; there is none about what a file does not say."""
    found = [*_sizes(checkpoint, config), *_gguf(checkpoint)]
    if config is not None:
        found += _vocabulary(checkpoint, config, tokenizer)
    return tuple(found)


def _claim(
    name: str, what: str, says: object, holds: object, ok: bool, *, must: bool = True
) -> MetadataCheck:
    """Numbers with commas; what a stranger wrote is cut."""
    words = [f"{one:,}" if isinstance(one, int) else str(one)[:80] for one in (says, holds)]
    return MetadataCheck(name=name, what=what, says=words[0], holds=words[1], ok=ok, must=must)


def _sizes(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[MetadataCheck]:
    """The totals that an index has in its `metadata`."""
    path = checkpoint.path / INDEX
    if not os.path.isdir(checkpoint.path) or os.path.exists(checkpoint.path / SINGLE):
        return  # the index of shards that are not the ones that were opened
    given = (read_object(path) or {}).get("metadata")
    said: Mapping[str, Any] = given if isinstance(given, dict) else {}
    total = said.get("total_size")
    if total is not None:
        held = checkpoint.tensor_bytes
        where = f"`total_size` in {INDEX}"
        yield _claim("total_size", where, total, held, total == held)
    total = said.get("total_parameters")
    if total is not None:
        held = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        learned = None if config is None else sum(spec.count for spec in parameters(config))
        held = learned if learned and total == learned else held
        where = f"`total_parameters` in {INDEX}"
        yield _claim("total_parameters", where, total, held, total == held)


def _gguf(checkpoint: Checkpoint) -> Iterator[MetadataCheck]:
    """The layout of blocks, and how many tensors a file in parts has.

    Opening it has compared the parts with each other.
    """
    metadata = checkpoint.metadata
    blocks = {info.format for info in checkpoint.tensors.values() if len(info.shape) > 1}
    version = metadata.get("general.quantization_version")
    if checkpoint.kind == "gguf" and version is not None and blocks - _PLAIN:
        where, same = "`general.quantization_version`", version == _QUANTIZATION
        yield _claim("quantization_version", where, version, _QUANTIZATION, same)
    tensors = metadata.get("split.tensors.count")
    if type(tensors) is int and tensors > 0:
        held = len(checkpoint.tensors)
        yield _claim("split_tensors", "`split.tensors.count`", tensors, held, tensors == held)


def _vocabulary(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None
) -> Iterator[MetadataCheck]:
    """Tokens need rows of the embedding; rows without a token are padding and usual."""
    said = checkpoint.metadata.get(f"{config.model_type}.vocab_size")
    if checkpoint.kind == "gguf" and said is not None:
        where = f"`{config.model_type}.vocab_size`"
        yield _claim("vocab_size", where, said, config.vocab, said == config.vocab)
    if tokenizer is None:
        return
    tokens, rows = tokenizer.vocab_size, config.vocab
    held = counted(rows, "row") + " of the embedding"
    yield _claim("tokens", "the tokenizer's tokens", tokens, held, tokens <= rows)
    ids = {*_end_ids(checkpoint), *tokenizer.eos_ids}
    if tokenizer.bos_id is not None:
        ids.add(tokenizer.bos_id)
    if ids:  # an end that cannot be written is only ever missed
        said = ", ".join(map(str, sorted(ids)))
        yield _claim(
            "special_tokens", "ids of begin and end", said, held, max(ids) < rows, must=False
        )


def _end_ids(checkpoint: Checkpoint) -> Iterator[int]:
    """The ids of begin and end as the files have them; our configuration keeps only usable ones."""
    for settings in (checkpoint.config or {}, checkpoint.generation_config or {}):
        for key in ("bos_token_id", "eos_token_id"):
            found = settings.get(key)
            yield from (
                id for id in (found if isinstance(found, list) else [found]) if type(id) is int
            )
