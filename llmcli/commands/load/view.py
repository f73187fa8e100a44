"""How a model was loaded: its ledger as a table, the time, and what the file says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.load.report import LoadReport, Shared
from llmcli.records.ledger import EACH_HAS_ITS_PLACE, LedgerEntry, Numbers
from llmcli.records.numbers import counted
from llmcli.ui.facts import SHORT
from llmcli.ui.layout import BAD, GOOD, SEPARATOR, WRONG, Column, Line, Marked, Rows, render_checks
from llmcli.ui.numbers import duration, number, percent, size, unit
from llmcli.ui.theme import FAINT, HEADING, one_line

_MORE = ("--checks", "--all")  # show every verdict, and every tensor with its statistics
_LONGEST = 5  # stages that the short answer has
LABEL = "!"  # a note, or a claim that is not true and that nothing depends on
_DOUBTFUL = "yellow"
_WORDS = {
    "find": "find or fetch",
    "headers": "read the headers",
    "import": "import PyTorch",
    "plan": "plan",
    "tokenizer": "tokenizer",
    "build": "make room",
    "read": "read",
    "pack": "pack",
    "convert": "convert",
    "scan": "check the numbers",
    "hash": "compute checksums",
}


def render_load(
    report: LoadReport,
    model: str,
    lines: Sequence[LedgerEntry] | None,
    *,
    brief: bool = False,
    full: bool = False,
    checks: bool = False,
) -> RenderableType:
    """The facts, `lines` as a table, the time, and the verdicts; `model` is its line.

    `lines` None: no table, and every verdict. Columns for which there is no room go below their
    rows, statistics only with `full` or `brief`. `brief`: no facts and no time; `full`: every
    stage; `checks`: every verdict.
    """
    parts: list[RenderableType] = [Text(one_line(model), style=HEADING)]
    if not brief:
        parts.append(Line(list(_facts(report)), FAINT))
        parts += [Text(one_line(_shared(one)), style=FAINT) for one in report.shared]
    if lines is not None:
        table = _table(lines, report.dtype, statistics=brief or full)
        parts += [table] if brief else [Text(""), table, Text(""), _time(report, full)]
    every = lines is None or checks
    more = () if every or brief or full else _MORE
    return Group(*parts, *_verdicts(report, every=every, more=more))


def _facts(report: LoadReport) -> Iterator[str]:
    files = f"{counted(report.files, 'file')}, {size(report.bytes.files)}"
    tensors = len({line.source for line in report.ledger})
    yield f"{counted(tensors, 'tensor')} in {files}"
    if report.bytes.weights is not None:
        yield f"{counted(report.numbers, 'parameter')}, {size(report.bytes.weights)} of memory"
    if report.memory.device is not None:
        yield f"at most {size(report.memory.device)} of {report.device}"
    if (peak := report.memory.peak) is not None:
        before = report.memory.before
        held = "" if before is None else f", of it {size(before)} Python and PyTorch before"
        yield f"peak memory {size(peak)}{held}"


def _table(lines: Sequence[LedgerEntry], dtype: str | None, *, statistics: bool) -> Rows:
    """The rows, with their `statistics` at every width; which numbers are not finite is always."""
    bad = [_bad(line.numbers) for line in lines]
    faults = [Column("NaN, ±∞", right=False)] if any(bad) else []
    done = [_done(line, line.dtype or dtype) for line in lines]
    name = "what was done" if dtype else "conversion"
    what = [Column(name, right=False, drop=3)] if any(done) else []
    columns = [
        Column("parameter", right=False),
        Column("tensor", right=False, drop=1),
        *faults,
        Column("stored", right=False, drop=2),
        Column("in the file", drop=8, below=statistics),
        *what,
        Column("mean", drop=7, labelled=True, below=statistics),
        Column("std", drop=6, labelled=True, below=statistics),
        Column("min", drop=5, labelled=True, below=statistics),
        Column("max", drop=5, labelled=True, below=statistics),
        Column("zeros", drop=7, labelled=True, below=statistics),
    ]
    rows = []
    for line, words, operations in zip(lines, bad, done, strict=True):
        style = WRONG if words else "" if line.parameter else FAINT
        times = f" × {line.tensors}" if line.tensors > 1 else ""
        stored = f"{line.stored} [{' '.join(map(str, line.shape))}]{times}"
        cells = [line.parameter or "–", line.source, *([words] if faults else [])]
        cells += [stored, size(line.bytes), *([operations] if what else [])]
        if (one := line.numbers) is None:
            cells += [""] * 5
        else:
            share = one.zeros / one.count if one.count else 0.0
            zeros = "0" if not share else percent(share) if share >= 0.0001 else "<0.01 %"
            cells += [*map(number, (one.mean, one.std, one.min, one.max)), zeros]
        rows.append([Text(one_line(cell), style=style) for cell in cells])
    return Rows(columns, rows, below=True)


def _done(line: LedgerEntry, dtype: str | None) -> str:
    """The operations on a tensor, or why it is not used; empty if it is taken as it is."""
    if not line.parameter:
        return line.reason or ""
    done = ("dequantized", *line.operations) if line.dequantized else line.operations
    if dtype is None or line.stored in (dtype, SHORT.get(dtype)):
        return ", ".join(done)
    if dtype not in SHORT:  # a block format
        return ", ".join((*done, f"quantized to {dtype}"))
    return ", ".join(done) or f"to {dtype}"


def _bad(numbers: Numbers | None) -> str:
    """How many numbers are not finite and which is the first; empty where all are finite."""
    if numbers is None or numbers.finite == numbers.count:
        return ""
    above = numbers.inf - numbers.negative_inf
    kinds = ((numbers.nan, "NaN"), (above, "+∞"), (numbers.negative_inf, "−∞"))
    words = ", ".join(f"{count:,} {word}" for count, word in kinds if count)
    first = " at" if numbers.count - numbers.finite == 1 else ", first at"
    return f"{words}{first} [{','.join(map(str, numbers.first_bad or ()))}]"


def _time(report: LoadReport, full: bool) -> Line:
    """The time in all, then the stages that take most of it; `full`: every stage, in order."""
    total = sum(stage.seconds for stage in report.stages)
    stages = list(report.stages)
    if not full:
        longest = sorted(stages, key=lambda stage: -stage.seconds)[:_LONGEST]
        stages = [stage for stage in longest if stage.seconds >= 0.01 * total]
    parts = [f"{duration(total)} in all"]
    for stage in stages:
        words = f"{_WORDS[stage.name]} {duration(stage.seconds)}"
        if full:
            words += f" ({100 * stage.seconds / total:.0f} %)" if total else ""
            words += "" if stage.bytes is None else f", {size(stage.bytes)}"
        if stage.bytes_per_s is not None:
            words += f" at {unit(stage.bytes_per_s, 'B/s')}"
        twice = stage.name == "read" and (stage.bytes or 0) > report.bytes.tensors
        parts.append(words + (", some twice" if full and twice else ""))
    return Line(parts, FAINT)


def _verdicts(report: LoadReport, *, every: bool, more: Sequence[str]) -> Iterator[RenderableType]:
    """What holds and what does not, the numbers and the whole last.

    Not `every`: what does not hold, else the whole; `more`: options that show the others.
    """
    fitted = any(line.parameter for line in report.ledger)  # each has its place
    if report.fault is not None:
        yield Marked(BAD, one_line(report.fault), WRONG)
    elif every and not fitted:
        words = "there is no config.json: the model that these tensors belong to is unknown"
        yield Text(words, style=FAINT)
    elif every:
        yield Marked(GOOD, EACH_HAS_ITS_PLACE, FAINT)
    for claim in report.claims:
        what, says, holds = map(one_line, (claim.what, claim.says, claim.holds))
        if claim.ok and every:
            there = "" if says == holds else SEPARATOR + holds
            yield Marked(GOOD, f"{what}: {says}{there}", FAINT)
        elif not claim.ok:
            mark, style = (BAD, WRONG) if claim.must else (LABEL, _DOUBTFUL)
            yield Marked(mark, f"{what}: claimed {says}, actual {holds}", style)
    if checks := [check for check in report.checks if every or not check.ok]:
        yield render_checks(checks)
    yield from (Marked(LABEL, one_line(note), _DOUBTFUL) for note in report.notes)
    if report.not_finite:
        yield Marked(BAD, one_line(report.not_finite), WRONG)
    elif every:
        words = f"no NaN and no infinity in {counted(report.numbers, 'number')}"
        yield Marked(GOOD, words, FAINT)
    if report.ok:
        tensors = counted(len({line.source for line in report.ledger}), "tensor")
        count = len(report.checks) + len(report.claims) + fitted + 1  # and each is finite
        found = "whole" if report.whole else "readable"
        words = f"{found}: {tensors}, all numbers finite, {counted(count, 'check')}"
        yield Marked(GOOD, SEPARATOR.join([words, *more]), FAINT)


def _shared(shared: Shared) -> str:
    if shared.kind == "tied":
        return f"{shared.names[0]} is {shared.names[1]}: one matrix of {size(shared.bytes)}"
    names = " and ".join(shared.names[:3])
    more = f" and {len(shared.names) - 3} more" if len(shared.names) > 3 else ""
    return f"{names}{more} hold the same numbers, {size(shared.bytes)} each"
