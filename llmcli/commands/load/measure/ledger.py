"""A line for every tensor of a checkpoint, and checks that none of its bytes is forgotten."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.report import LedgerLine, Numbers
from llmcli.config import ModelConfig
from llmcli.model import Ledger
from llmcli.records.checks import ViewCheck

_ALIGNMENT = 32  # of GGUF, where a file does not say another
_TYPE_AND_OFFSET = 12  # bytes that end a row of its table


def ledger_lines(
    ledger: Ledger, checkpoint: Checkpoint, config: ModelConfig, numbers: Mapping[str, Numbers]
) -> tuple[LedgerLine, ...]:
    """Parameters in the model's order, then scales, then what is dropped.

    `numbers` by what an entry fills. A tensor that the ledger does not have is in no line: see
    `ledger_check`.
    """
    place = {spec.name: at for at, spec in enumerate(parameters(config))}
    scales: dict[str, str] = {}
    lines = []
    for entry in sorted(ledger.entries, key=lambda entry: place[entry.target]):
        scales |= dict.fromkeys(entry.scale_tensors, entry.source)
        info = checkpoint.tensors[entry.source]
        line = LedgerLine(
            parameter=entry.parameter,
            source=entry.source,
            stored=entry.stored,
            shape=info.shape,
            bytes=entry.nbytes,
            operations=entry.words,
            dequantized=entry.dequantized,
            numbers=numbers.get(entry.parameter),
            dtype=entry.dtype,
        )
        lines.append(line)
    others = [
        *((name, f"belongs to the scale of `{source}`") for name, source in scales.items()),
        *ledger.dropped,
    ]
    lines += [replace(line_of(checkpoint.tensors[name]), reason=reason) for name, reason in others]
    return tuple(lines)


def line_of(info: TensorInfo) -> LedgerLine:
    """A tensor whose model is unknown."""
    return LedgerLine(
        source=info.name, stored=info.format, shape=info.shape, bytes=info.nbytes
    )


def ledger_check(lines: tuple[LedgerLine, ...], checkpoint: Checkpoint) -> ViewCheck:
    """That the lines have every byte of every tensor, once."""
    left = {info.name: info.nbytes for info in checkpoint.tensors.values()}
    for line in lines:
        left[line.source] -= line.bytes
    wrong = {name: abs(count) for name, count in left.items() if count}
    held, tensors = checkpoint.tensor_bytes, len(checkpoint.tensors)
    words = f"the ledger has each of the {held:,} bytes of {tensors:,} tensors once"
    return _none_wrong("ledger", words, wrong)


def filled_check(lines: tuple[LedgerLine, ...], config: ModelConfig) -> ViewCheck:
    """That every number of every parameter was read where it is in memory."""
    wanted = {spec.name: spec.count for spec in parameters(config)}
    total = sum(wanted.values())
    for line in lines:
        if line.numbers is not None and line.parameter is not None:
            wanted[line.parameter.partition("[")[0]] -= line.numbers.count
    wrong = {name: abs(count) for name, count in wanted.items() if count}
    words = f"each of the {total:,} parameters was filled and checked"
    return _none_wrong("parameters", words, wrong)


def _none_wrong(name: str, words: str, wrong: Mapping[str, int]) -> ViewCheck:
    """The check that `wrong` (place → how much) is empty; `where` is the place of the largest."""
    return ViewCheck(
        name=name,
        words=words,
        value=float(sum(wrong.values())),
        tolerance=0.0,
        where=max(wrong, key=wrong.__getitem__, default=""),
    )


# bytes that nothing owns


def layout_check(checkpoint: Checkpoint) -> ViewCheck:
    """That between and after the tensors of each file there is nothing but padding."""
    unowned = {where: count for where, count in _unowned(checkpoint) if count}
    files = len(checkpoint.files)
    words = f"no byte of the {'file' if files == 1 else f'{files} files'} is left over"
    return _none_wrong("layout", words, unowned)


def _unowned(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """(After which tensor, how many bytes) beyond what the alignment asks for."""
    said = checkpoint.metadata.get("general.alignment", _ALIGNMENT)
    step = said if checkpoint.kind == "gguf" and type(said) is int else 1
    files: dict[Path, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        files.setdefault(info.file, []).append(info)
    for path, infos in files.items():
        if checkpoint.kind == "gguf":
            yield "the end of the header", _before(path, infos, step)
        infos.sort(key=lambda info: info.offset)
        starts = [info.offset for info in infos[1:]]
        for info, following in zip(infos, [*starts, os.path.getsize(path)], strict=True):
            end = info.offset + info.nbytes
            padded = -(-end // step) * step
            yield f"the end of {info.name}", max(0, following - padded)


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
