"""What a checkpoint says of its weights, held against what it has. From headers alone."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint
from llmcli.checkpoints.files import read_object
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.commands.load.report import Claim
from llmcli.config import ModelConfig
from llmcli.families import ignored_metadata
from llmcli.families.family import stored_head
from llmcli.reports.numbers import counted
from llmcli.text import Tokenizer

# `general.file_type` -> the format that most tensors have then (llama.cpp, `llama_ftype` and the
# default type of each in its quantizer); 1024 is added where it was guessed.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q3_K", 13: "Q3_K", 14: "Q4_K", 15: "Q4_K", 16: "Q5_K", 17: "Q5_K",
    18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K", 22: "IQ3_S", 23: "IQ3_XXS",
    24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_S", 28: "IQ2_XS", 29: "IQ2_S",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip
_GUESSED = 1024
_QUANTIZATION = 2  # the version of the layout of blocks since May 2023, and the only one known
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_LABEL = re.compile(r"(?:(\d{1,4})x)?(\d{1,6}(?:\.\d{1,6})?)([KMBT])", re.I)
_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d{1,6}(?:\.\d{1,6})?)([MB])(?![A-Za-z0-9])", re.I)
_ABOUT = 1.5  # by this factor `2B` may be wrong: of embeddings some names count none


def claims(
    checkpoint: Checkpoint, config: ModelConfig | None, tokenizer: Tokenizer | None
) -> tuple[Claim, ...]:
    """Each with what is true; what a file is silent about is in none of them."""
    found = [
        *_sizes(checkpoint, config),
        *_labels(checkpoint, config),
        *_formats(checkpoint),
        *_parts(checkpoint),
    ]
    if config is not None:
        found += [*_vocabulary(checkpoint, config, tokenizer), *_head(checkpoint, config)]
        found += _ignored(checkpoint, config)
    return tuple(found)


def _claim(name: str, what: str, says: object, holds: object, ok: bool, *, must: bool) -> Claim:
    return Claim(name=name, what=what, says=_told(says), holds=_told(holds), ok=ok, must=must)


def _told(value: object) -> str:
    """With commas; what a stranger wrote is cut."""
    return f"{value:,}" if isinstance(value, int) else str(value)[:80]


def _sizes(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[Claim]:
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


def _labels(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[Claim]:
    """Sizes such as `135M`, in a label and in names; a name is a label only."""
    held = _learned(config) or _stored_count(checkpoint)
    label = checkpoint.metadata.get("general.size_label")
    match = _LABEL.fullmatch(label) if isinstance(label, str) else None
    if match:
        size = int(match[1] or 1) * float(match[2]) * _SCALES[match[3].upper()]
        yield _claim(
            "size_label", "`general.size_label`", label, held, _near(size, held), must=True
        )
    names = {"general.name": checkpoint.metadata, "_name_or_path": checkpoint.config or {}}
    for key, where in names.items():
        name = where.get(key)
        found = _IN_NAME.search(name) if isinstance(name, str) else None
        if found:
            size = float(found[1]) * _SCALES[found[2].upper()]
            near = _near(size, held)
            yield _claim("name", f"the name in `{key}`", found[0], held, near, must=False)


def _near(said: float, held: int) -> bool:
    return held / _ABOUT <= said <= held * _ABOUT


def _formats(checkpoint: Checkpoint) -> Iterator[Claim]:
    """In which format the weights are said to be; mixtures are usual, so that it is a label."""
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) > 1]
    held = Counter(info.format for info in matrices)
    weights: Counter[str] = Counter()
    for info in matrices:
        weights[info.format] += info.nbytes
    most = {counts.most_common(1)[0][0] for counts in (held, weights) if counts}
    formats = ", ".join(name for name, _ in held.most_common(4))
    if checkpoint.kind == "gguf":
        kind = checkpoint.metadata.get("general.file_type")
        if type(kind) is int and matrices:
            said = _FILE_TYPES.get(kind & ~_GUESSED, f"number {kind}, which is unknown")
            yield _claim(
                "file_type", "`general.file_type`", said, formats, said in most, must=False
            )
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
        yield _claim(
            "dtype", "the dtype in config.json", named, formats, _DTYPES[named] in most, must=False
        )


def _parts(checkpoint: Checkpoint) -> Iterator[Claim]:
    """What a GGUF file in parts says of them; opening it has held the parts against each other."""
    tensors = checkpoint.metadata.get("split.tensors.count")
    if type(tensors) is int and tensors > 0:
        held = len(checkpoint.tensors)
        where = "`split.tensors.count`"
        yield _claim("split_tensors", where, tensors, held, tensors == held, must=True)


def _vocabulary(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None
) -> Iterator[Claim]:
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


def _head(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[Claim]:
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


def _ignored(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[Claim]:
    """Metadata that has no effect, although it would for another architecture."""
    why = f"without effect: llama.cpp does not read it for `{config.model_type}` either"
    for key, value in ignored_metadata(checkpoint).items():
        yield _claim("ignored", f"`{key}`", value, why, False, must=False)
