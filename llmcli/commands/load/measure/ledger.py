"""What became of every tensor of a checkpoint, and what its files say of them: each is compared."""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.checkpoints.files import read_object
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.commands.load.report import MetadataCheck
from llmcli.config.model import ModelConfig
from llmcli.graph.plan import parameters
from llmcli.records.document import ViewCheck, zero_counts
from llmcli.records.ledger import Ledger, LedgerEntry, Numbers
from llmcli.records.numbers import counted
from llmcli.text import Tokenizer

_ALIGNMENT = 32  # of GGUF, where a file does not say another
_TYPE_AND_OFFSET = 12  # bytes that end a row of its table
_QUANTIZATION = 2  # the version of the layout of blocks since May 2023, and the only one known
_PLAIN = {"F64", "F32", "F16", "BF16"}  # formats without blocks


def ledger_lines(
    ledger: Ledger, checkpoint: Checkpoint, config: ModelConfig, numbers: Mapping[str, Numbers]
) -> tuple[LedgerEntry, ...]:
    """Parameters in the model's order, then scales, then what is dropped.

    `numbers` by what an entry fills. A tensor that the ledger does not have is in no line: see
    `ledger_check`.
    """
    place = {spec.name: at for at, spec in enumerate(parameters(config))}
    filled = sorted(ledger.entries, key=lambda entry: place[entry.target])
    scales = {name: entry.source for entry in filled for name in entry.scale_tensors}
    others = [
        *((name, f"belongs to the scale of `{source}`") for name, source in scales.items()),
        *ledger.dropped,
    ]
    return (
        *(replace(entry, numbers=numbers.get(entry.parameter or "")) for entry in filled),
        *(replace(line_of(checkpoint.tensors[name]), reason=reason) for name, reason in others),
    )


def line_of(info: TensorInfo) -> LedgerEntry:
    """A tensor whose model is unknown."""
    return LedgerEntry(source=info.name, stored=info.format, shape=info.shape, bytes=info.nbytes)


def ledger_check(lines: tuple[LedgerEntry, ...], checkpoint: Checkpoint) -> ViewCheck:
    """That the lines have every byte of every tensor, once."""
    left = {info.name: info.nbytes for info in checkpoint.tensors.values()}
    for line in lines:
        left[line.source] -= line.bytes
    held, tensors = checkpoint.tensor_bytes, len(checkpoint.tensors)
    of = f"{held:,} bytes of {counted(tensors, 'tensor')}"
    words = f"the ledger lists each of the {of} exactly once"
    return zero_counts("ledger", words, {name: abs(count) for name, count in left.items()})


def filled_check(lines: tuple[LedgerEntry, ...], config: ModelConfig) -> ViewCheck:
    """That every number of every parameter was read where it is in memory."""
    wanted = {spec.name: spec.count for spec in parameters(config)}
    total = sum(wanted.values())
    for line in lines:
        if line.numbers is not None and line.parameter is not None:
            wanted[line.target] -= line.numbers.count
    words = f"each of the {total:,} parameters was filled and checked"
    return zero_counts("parameters", words, {name: abs(count) for name, count in wanted.items()})


# bytes that nothing owns


def layout_check(checkpoint: Checkpoint) -> ViewCheck:
    """That between and after the tensors of each file there is nothing but padding."""
    unowned = Counter[str]()  # after what, how many bytes beyond what the alignment asks for
    said = checkpoint.metadata.get("general.alignment", _ALIGNMENT)
    step = said if checkpoint.kind == "gguf" and type(said) is int else 1
    files: dict[Path, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        files.setdefault(info.file, []).append(info)
    for path, infos in files.items():
        if checkpoint.kind == "gguf":
            unowned["the end of the header"] += _before(path, infos, step)
        infos.sort(key=lambda info: info.offset)
        starts = [info.offset for info in infos[1:]]
        for info, following in zip(infos, [*starts, os.path.getsize(path)], strict=True):
            end = info.offset + info.nbytes
            padded = -(-end // step) * step
            unowned[f"the end of {info.name}"] = max(0, following - padded)
    many = len(checkpoint.files)
    words = f"no byte of the {'file' if many == 1 else f'{many} files'} is left over"
    return zero_counts("layout", words, unowned)


def _before(path: Path, infos: Sequence[TensorInfo], step: int) -> int:
    """Bytes between the padded header of a GGUF file, which ends with its table, and the data.

    `infos` are in the table's order, as they are read.
    """
    first, last = min(info.offset for info in infos), infos[-1]
    name = last.name.encode()
    dims = last.shape[::-1]
    row = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    with path.open("rb") as file:
        end = file.read(first).rfind(row) + len(row) + _TYPE_AND_OFFSET
    return max(0, first - -(-end // step) * step)


# what files say of their tensors


def claims(
    checkpoint: Checkpoint, config: ModelConfig | None, tokenizer: Tokenizer | None
) -> tuple[MetadataCheck, ...]:
    """Each claim with what is true; there is none about what a file does not say."""
    found = [*_totals(checkpoint, config), *_gguf(checkpoint, config)]
    if config is not None and tokenizer is not None:
        found += _tokens(checkpoint, config.vocab, tokenizer)
    return tuple(found)


def _claim(
    name: str,
    what: str,
    says: object,
    holds: object,
    *,
    ok: bool | None = None,
    must: bool = True,
) -> MetadataCheck:
    """True (`ok`) if both are equal, unless given; long values are cut, for a file may have any."""
    words = [f"{one:,}" if isinstance(one, int) else str(one)[:80] for one in (says, holds)]
    ok = says == holds if ok is None else ok
    return MetadataCheck(name=name, what=what, says=words[0], holds=words[1], ok=ok, must=must)


def _totals(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[MetadataCheck]:
    """The totals that an index has in its `metadata`."""
    path = checkpoint.path / INDEX
    if not os.path.isdir(checkpoint.path) or os.path.exists(checkpoint.path / SINGLE):
        return  # the index of shards that are not the ones that were opened
    given = (read_object(path) or {}).get("metadata")
    said: Mapping[str, Any] = given if isinstance(given, dict) else {}
    if (total := said.get("total_size")) is not None:
        where = f"`total_size` in {INDEX}"
        yield _claim("total_size", where, total, checkpoint.tensor_bytes)
    if (total := said.get("total_parameters")) is not None:
        held = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        learned = None if config is None else sum(spec.count for spec in parameters(config))
        held = learned if learned and total == learned else held
        yield _claim("total_parameters", f"`total_parameters` in {INDEX}", total, held)


def _gguf(checkpoint: Checkpoint, config: ModelConfig | None) -> Iterator[MetadataCheck]:
    """The layout of blocks, how many tensors a file in parts has, and rows of the embedding.

    Opening it has compared the parts with each other.
    """
    if checkpoint.kind != "gguf":
        return
    metadata = checkpoint.metadata
    blocks = {info.format for info in checkpoint.tensors.values() if len(info.shape) > 1}
    version = metadata.get("general.quantization_version")
    if version is not None and blocks - _PLAIN:
        where = "`general.quantization_version`"
        yield _claim("quantization_version", where, version, _QUANTIZATION)
    tensors = metadata.get("split.tensors.count")
    if type(tensors) is int and tensors > 0:
        yield _claim("split_tensors", "`split.tensors.count`", tensors, len(checkpoint.tensors))
    key = f"{checkpoint.model_type}.vocab_size"
    if config is not None and (said := metadata.get(key)) is not None:
        yield _claim("vocab_size", f"`{key}`", said, config.vocab)


def _tokens(checkpoint: Checkpoint, rows: int, tokenizer: Tokenizer) -> Iterator[MetadataCheck]:
    """Tokens need `rows` of the embedding; rows without a token are padding and usual.

    The ids of begin and end are those of the files; our configuration keeps only usable ones.
    """
    tokens, held = tokenizer.vocab_size, counted(rows, "row") + " of the embedding"
    yield _claim("tokens", "the tokenizer's tokens", tokens, held, ok=tokens <= rows)
    ids = set(tokenizer.eos_ids)
    for settings in (checkpoint.config or {}, checkpoint.generation_config or {}):
        for key in ("bos_token_id", "eos_token_id"):
            found = settings.get(key)
            listed = found if isinstance(found, list) else [found]
            ids |= {id for id in listed if type(id) is int}
    if tokenizer.bos_id is not None:
        ids.add(tokenizer.bos_id)
    if ids:  # an end that cannot be written is only ever missed
        said, ok = ", ".join(map(str, sorted(ids))), max(ids) < rows
        yield _claim("special_tokens", "ids of begin and end", said, held, ok=ok, must=False)
