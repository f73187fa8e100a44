"""Whether the files of a checkpoint have bytes that nothing owns."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.measure.ledger import none_wrong
from llmcli.reports.checks import ViewCheck

_ALIGNMENT = 32  # of GGUF, where a file does not say another
_TYPE_AND_OFFSET = 12  # bytes that end a row of its table


def layout_check(checkpoint: Checkpoint) -> ViewCheck:
    """That between and after the tensors of each file there is nothing but padding."""
    unowned = {where: count for where, count in _unowned(checkpoint) if count}
    files = len(checkpoint.files)
    words = f"no byte of the {'file' if files == 1 else f'{files} files'} is left over"
    return none_wrong("layout", words, unowned)


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
