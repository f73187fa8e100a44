"""What a checkpoint says of its weights, held against what it has. From headers alone."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint
from llmcli.checkpoints.files import read_object
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.commands.load.report import MetadataCheck
from llmcli.config import ModelConfig
from llmcli.families import ignored_metadata
from llmcli.families.family import stored_head
from llmcli.records.numbers import counted
from llmcli.text import Tokenizer

_QUANTIZATION = 2  # the version of the layout of blocks since May 2023, and the only one known
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def claims(
    checkpoint: Checkpoint, config: ModelConfig | None, tokenizer: Tokenizer | None
) -> tuple[MetadataCheck, ...]:
    """Each with what is true; what a file is silent about is in none of them."""
    found = [*_sizes(checkpoint, config), *_formats(checkpoint), *_parts(checkpoint)]
    if config is not None:
        found += [*_vocabulary(checkpoint, config, tokenizer), *_head(checkpoint, config)]
        found += _ignored(checkpoint, config)
    return tuple(found)


def _claim(
    name: str, what: str, says: object, holds: object, ok: bool, *, must: bool
) -> MetadataCheck:
    says, holds = _told(says), _told(holds)
    return MetadataCheck(name=name, what=what, says=says, holds=holds, ok=ok, must=must)


def _told(value: object) -> str:
    """With commas; what a stranger wrote is cut."""
    return f"{value:,}" if isinstance(value, int) else str(value)[:80]


def _sizes(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[MetadataCheck]:
    """The totals that an index has in its `metadata`."""
    path = checkpoint.path / INDEX
    if not os.path.isdir(checkpoint.path) or os.path.exists(checkpoint.path / SINGLE):
        return  # the index of shards that are not the ones that were opened
    given = (read_object(path) or {}).get("metadata")
    said: Mapping[str, Any] = given if isinstance(given, dict) else {}
    total = said.get("total_size")
    if total is not None:
        held = sum(info.nbytes for info in checkpoint.tensors.values())
        where = f"`total_size` in {INDEX}"
        yield _claim("total_size", where, total, held, total == held, must=True)
    total = said.get("total_parameters")
    if total is not None:
        stored, learned = _stored_count(checkpoint), _learned(config)
        held = stored if learned is None or total != learned else learned
        where = f"`total_parameters` in {INDEX}"
        yield _claim("total_parameters", where, total, held, total == held, must=True)


def _stored_count(checkpoint: Checkpoint) -> int:
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def _learned(config: ModelConfig | None) -> int | None:
    return None if config is None else sum(spec.count for spec in parameters(config))


def _formats(checkpoint: Checkpoint) -> Iterator[MetadataCheck]:
    """The layout of blocks of a GGUF file; the dtype of a configuration, which is a hint only."""
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) > 1]
    held = Counter(info.format for info in matrices)
    if checkpoint.kind == "gguf":
        version = checkpoint.metadata.get("general.quantization_version")
        plain = {"F64", "F32", "F16", "BF16"}
        if version is not None and held.keys() - plain:
            same = version == _QUANTIZATION
            yield _claim(
                "quantization_version", "`general.quantization_version`", version, _QUANTIZATION,
                same, must=True,
            )  # fmt: skip
        return
    settings = checkpoint.config or {}
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    named = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if named in _DTYPES and matrices and not settings.get("quantization_config"):
        weights: Counter[str] = Counter()
        for info in matrices:
            weights[info.format] += info.nbytes
        most = {counts.most_common(1)[0][0] for counts in (held, weights)}
        formats = ", ".join(name for name, _ in held.most_common(4))
        yield _claim(
            "dtype", "the dtype in config.json", named, formats, _DTYPES[named] in most, must=False
        )


def _parts(checkpoint: Checkpoint) -> Iterator[MetadataCheck]:
    """What a GGUF file in parts says of them; opening it has held the parts against each other."""
    tensors = checkpoint.metadata.get("split.tensors.count")
    if type(tensors) is int and tensors > 0:
        held = len(checkpoint.tensors)
        where = "`split.tensors.count`"
        yield _claim("split_tensors", where, tensors, held, tensors == held, must=True)


def _vocabulary(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None
) -> Iterator[MetadataCheck]:
    """Tokens need rows of the embedding; rows without a token are padding and usual."""
    said = checkpoint.metadata.get(f"{config.model_type}.vocab_size")
    if checkpoint.kind == "gguf" and said is not None:
        where = f"`{config.model_type}.vocab_size`"
        yield _claim("vocab_size", where, said, config.vocab, said == config.vocab, must=True)
    if tokenizer is None:
        return
    tokens, rows = tokenizer.vocab_size, config.vocab
    held = counted(rows, "row") + " of the embedding"
    yield _claim("tokens", "the tokenizer's tokens", tokens, held, tokens <= rows, must=True)
    ids = {*_end_ids(checkpoint), *tokenizer.eos_ids}
    if tokenizer.bos_id is not None:
        ids.add(tokenizer.bos_id)
    if ids:  # an end that cannot be written is only ever missed
        said = ", ".join(map(str, sorted(ids)))
        yield _claim(
            "special_tokens", "ids of begin and end", said, held, max(ids) < rows, must=False
        )


def _end_ids(checkpoint: Checkpoint) -> Iterator[int]:
    """The ids of begin and end as the files have them; a configuration of ours keeps the real."""
    for settings in (checkpoint.config or {}, checkpoint.generation_config or {}):
        for key in ("bos_token_id", "eos_token_id"):
            found = settings.get(key)
            yield from (
                id for id in (found if isinstance(found, list) else [found]) if type(id) is int
            )


def _head(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[MetadataCheck]:
    """A head in the file of a model that is said to have none of its own: the file is believed."""
    said = (checkpoint.config or {}).get("tie_word_embeddings")
    if checkpoint.kind == "gguf" or said is not True or (head := stored_head(checkpoint)) is None:
        return
    held = f"false: `{head}` differs from the embedding and is used as the head"
    if config.head.tied:
        held = f"`{head}` equals the embedding"
    yield _claim(
        "tie_word_embeddings", "`tie_word_embeddings` in config.json", "true", held,
        config.head.tied, must=False,
    )  # fmt: skip


def _ignored(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[MetadataCheck]:
    """Metadata that has no effect, although it would for another architecture."""
    why = f"without effect: llama.cpp does not read it for `{config.model_type}` either"
    for key, value in ignored_metadata(checkpoint).items():
        yield _claim("ignored", f"`{key}`", value, why, False, must=False)
