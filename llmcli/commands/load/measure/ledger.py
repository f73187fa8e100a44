"""A line for every tensor of a checkpoint, and checks that none of its bytes is forgotten."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.report import LedgerLine, Numbers
from llmcli.config import ModelConfig
from llmcli.model import Ledger
from llmcli.records.checks import ViewCheck
from llmcli.records.numbers import spans

# Between dots or in brackets; at most six digits, for names are a stranger's.
_NUMBER = re.compile(r"(?<![^.\[])(?:0|[1-9][0-9]{0,5})(?![^.\]])")
_ALIGNMENT = 32  # of GGUF, where a file does not say another
_TYPE_AND_OFFSET = 12  # bytes that end a row of its table
_NAMED = ("parameter", "source", "reason")  # parts of a line that have layers' numbers in them


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


# lines of layers that are alike in one row


def folded(lines: Iterable[LedgerLine]) -> tuple[LedgerLine, ...]:
    """A row for tensors that differ in nothing but the first two numbers of their names.

    These are the layer's and, in it, the expert's. What else is different, such as a stored format
    or where a number is not finite, stays apart; the numbers are of all of them, and bytes add up.
    """
    return _folded(_folded(lines, 1), 0)


def _folded(lines: Iterable[LedgerLine], which: int) -> tuple[LedgerLine, ...]:
    """Lines that differ in that number alone, in one each."""
    rows: dict[Hashable, list[LedgerLine]] = {}
    for line in lines:
        opened = {name: _open(getattr(line, name), which) for name in _NAMED}
        templates: dict[str, Any] = {name: template for name, (template, _) in opened.items()}
        alike = len({number for _, number in opened.values()} - {None}) < 2
        template = replace(line, **templates, bytes=0, numbers=None)
        rows.setdefault((template, _bad(line), alike or line.source), []).append(line)
    return tuple(row[0] if len(row) == 1 else _row(row, which) for row in rows.values())


def _row(lines: Sequence[LedgerLine], which: int) -> LedgerLine:
    parts = [line.numbers for line in lines if line.numbers is not None]
    names: dict[str, Any] = {
        name: _together([getattr(line, name) for line in lines], which) for name in _NAMED
    }
    return replace(
        lines[0],
        **names,
        bytes=sum(line.bytes for line in lines),
        numbers=pooled(parts) if parts else None,
        tensors=sum(line.tensors for line in lines),
    )


def pooled(parts: Sequence[Numbers]) -> Numbers:
    """All of them together (Chan, Golub & LeVeque, 1979); `first_bad` of the first that has one."""
    some = [part for part in parts if part.finite]
    finite = sum(part.finite for part in some)
    mean = sum(part.mean * (part.finite / finite) for part in some) if some else math.nan
    apart = sum(part.finite * (part.std**2 + (part.mean - mean) ** 2) for part in some)
    return Numbers(
        count=sum(part.count for part in parts),
        mean=mean,
        std=math.sqrt(apart / finite) if some else math.nan,
        min=min((part.min for part in some), default=math.nan),
        max=max((part.max for part in some), default=math.nan),
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        negative_inf=sum(part.negative_inf for part in parts),
        first_bad=next((part.first_bad for part in parts if part.first_bad is not None), None),
    )


def _bad(line: LedgerLine) -> Hashable:
    """What is not finite in it; None where it was not checked."""
    found = line.numbers
    return found and (found.nan, found.inf, found.negative_inf, found.first_bad)


def _together(names: Sequence[str | None], which: int) -> str | None:
    """`blocks.{0-3,5}.ln1.w` for names of layers; without numbers the one that they all have."""
    template, _ = _open(names[0], which)
    numbers = sorted({number for name in names if (number := _open(name, which)[1]) is not None})
    return template.replace("{}", f"{{{spans(numbers)}}}", 1) if template and numbers else names[0]


def _open(name: str | None, which: int) -> tuple[str | None, int | None]:
    """The name with `{}` for its number `which` (0: the first), and that number.

    As it is where it has fewer.
    """
    found = next(islice(_NUMBER.finditer(name or ""), which, None), None)
    if name is None or found is None:
        return name, None
    return f"{name[: found.start()]}{{}}{name[found.end() :]}", int(found[0])


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
