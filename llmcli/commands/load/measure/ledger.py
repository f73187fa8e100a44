"""Every tensor of a checkpoint in a line of its own, and whether none of its bytes is forgotten."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.report import LedgerLine, Numbers, pooled
from llmcli.config import ModelConfig
from llmcli.model import Ledger
from llmcli.records.checks import ViewCheck
from llmcli.records.numbers import spans

# Between dots or in brackets; at most six digits, for names are a stranger's.
_NUMBER = re.compile(r"(?<![^.\[])(?:0|[1-9][0-9]{0,5})(?![^.\]])")
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
    """A tensor of which no model is known."""
    return LedgerLine(
        parameter="", source=info.name, stored=info.format, shape=info.shape, bytes=info.nbytes
    )


def ledger_check(lines: tuple[LedgerLine, ...], checkpoint: Checkpoint) -> ViewCheck:
    """That the lines have every byte of every tensor, once."""
    left = {info.name: info.nbytes for info in checkpoint.tensors.values()}
    for line in lines:
        left[line.source] -= line.bytes
    wrong = {name: abs(count) for name, count in left.items() if count}
    held = sum(info.nbytes for info in checkpoint.tensors.values())
    words = f"the ledger has each of the {held:,} bytes of {len(left):,} tensors once"
    return none_wrong("ledger", words, wrong)


def filled_check(lines: tuple[LedgerLine, ...], config: ModelConfig) -> ViewCheck:
    """That every number of every parameter was looked at where it lies."""
    wanted = {spec.name: spec.count for spec in parameters(config)}
    for line in lines:
        if line.numbers is not None:
            wanted[line.parameter.partition("[")[0]] -= line.numbers.count
    wrong = {name: abs(count) for name, count in wanted.items() if count}
    total = sum(spec.count for spec in parameters(config))
    words = f"each of the {total:,} parameters was filled and checked"
    return none_wrong("parameters", words, wrong)


def none_wrong(name: str, words: str, wrong: Mapping[str, int]) -> ViewCheck:
    """The check that `wrong` has nothing: where → how much; `where` is the place of the largest."""
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
        template = replace(
            line, parameter=_open(line.parameter, which)[0], source=_open(line.source, which)[0],
            reason=_open(line.reason, which)[0], bytes=0, numbers=None,
        )  # fmt: skip
        names = (line.parameter, line.source, line.reason)
        numbers = {_open(name, which)[1] for name in names if name}
        alike = len(numbers - {None}) < 2
        rows.setdefault((template, _bad(line), alike or line.source), []).append(line)
    return tuple(_row(row, which) for row in rows.values())


def _row(lines: Sequence[LedgerLine], which: int) -> LedgerLine:
    if len(lines) == 1:
        return lines[0]
    parts = [line.numbers for line in lines if line.numbers is not None]
    return replace(
        lines[0],
        parameter=_together([line.parameter for line in lines], which),
        source=_together([line.source for line in lines], which),
        reason=_together([line.reason for line in lines], which),
        bytes=sum(line.bytes for line in lines),
        numbers=pooled(parts) if parts else None,
        tensors=sum(line.tensors for line in lines),
    )


def _bad(line: LedgerLine) -> Hashable:
    """What is not finite in it; None where it was not checked."""
    found = line.numbers
    return found and (found.nan, found.infinite, found.negative, found.first_bad)


def _together(names: Sequence[str], which: int) -> str:
    """`blocks.{0-3,5}.ln1.w` for names of layers; without numbers the one that they all have."""
    template, _ = _open(names[0], which)
    numbers = sorted({number for name in names if (number := _open(name, which)[1]) is not None})
    return template.replace("{}", f"{{{spans(numbers)}}}", 1) if numbers else names[0]


def _open(name: str, which: int) -> tuple[str, int | None]:
    """The name with `{}` for its number `which` (0: the first), and that number.

    As it is where it has fewer.
    """
    found = next(islice(_NUMBER.finditer(name), which, None), None)
    if found is None:
        return name, None
    return f"{name[: found.start()]}{{}}{name[found.end() :]}", int(found[0])


# bytes that nothing owns


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
