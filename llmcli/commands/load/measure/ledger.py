"""Every tensor of a checkpoint in a line of its own, and whether none of its bytes is forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmcli.anatomy import parameters
from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.report import LedgerLine, Numbers
from llmcli.config import ModelConfig
from llmcli.model import Ledger
from llmcli.reports.checks import ViewCheck


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
    words = f"each of the {total:,} parameters was filled and looked at"
    return none_wrong("parameters", words, wrong)


def none_wrong(name: str, words: str, wrong: Mapping[str, int]) -> ViewCheck:
    """The check that `wrong` has nothing: where → how much; the most of it is told by its place."""
    return ViewCheck(
        name=name,
        words=words,
        value=float(sum(wrong.values())),
        tolerance=0.0,
        where=max(wrong, key=wrong.__getitem__, default=""),
    )
