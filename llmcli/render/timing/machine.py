"""What the machine can do at most, what memory was held, and what was done once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmcli.render.stats import duration, size
from llmcli.render.timing.numbers import percent, unit
from llmcli.reports.ceilings import Ceilings
from llmcli.reports.timing import Stage, TimingReport

SURELY = 1.1  # of a ceiling: more than that is not how one measurement differs from another


def stage_words(stages: Sequence[Stage], weight_bytes: int, format: str) -> Iterator[str]:
    """`start-up: import torch 1.20 s`, `load the weights 0.4 s (98.4 MB of file → …)`."""
    for at, stage in enumerate(stages):
        words = f"{'' if at else 'start-up: '}{stage.name} {duration(stage.seconds)}"
        if stage.nbytes:
            became = f"{unit(stage.nbytes, 'B')} of file → {unit(weight_bytes, 'B')} {format}"
            speed = f", {unit(stage.nbytes / stage.seconds, 'B/s')}" if stage.seconds else ""
            words += f" ({became}{speed})"
        yield words


def ceiling_words(ceilings: Ceilings) -> Iterator[str]:
    """Read rates from memory to the fastest cache, then products by dtype."""
    sizes = dict(ceilings.caches)
    # the smallest set of a cache is surely in it, the largest of all is surely in none
    fastest = {read.level: read for read in reversed(ceilings.reads)}
    fastest[ceilings.reads[-1].level] = ceilings.reads[-1]
    for level, read in fastest.items():
        held = f" ({size(sizes[level])})" if level in sizes else ""
        yield f"{level}{held} {unit(read.bytes_per_s, 'B/s')}"
    for matrix in ceilings.matrices:
        way = f" ({matrix.way})" if matrix.way not in ("", "direct") else ""
        yield f"{matrix.dtype} matrix products {unit(matrix.flops_per_s, 'FLOP/s')}{way}"


def place_words(report: TimingReport) -> str:
    """Where the numbers lie that a step reads over and over."""
    ceilings = report.ceilings
    read = ceilings.read(report.working_set)
    level, at = read.level, unit(read.bytes_per_s, "B/s")
    amount = unit(report.working_set, "B")
    if level != "memory":
        return f"a step's {amount} lie in {level}: judged by its {at}, not by the memory's rate"
    largest = max((held for _, held in ceilings.caches), default=None)
    than = "" if largest is None else f": no cache holds them (at most {size(largest)})"
    return f"a step's {amount} come from memory at {at}{than}"


def beyond_words(report: TimingReport) -> str:
    """That a ceiling was not one, for parts that were faster; empty where none was."""
    return beyond(
        f"{part.part} ({phase.name})"
        for phase in report.phases
        for part in phase.totals
        if part.of_bound is not None and part.of_bound > SURELY
    )


def beyond(names: Iterable[str]) -> str:
    """The same of parts or tests by their names, which can be none."""
    parts = list(names)
    if not parts:
        return ""
    return (
        f"faster than their ceiling: {', '.join(parts)}; something else took the machine while "
        "the ceilings were measured: run it again"
    )


def memory_words(report: TimingReport) -> Iterator[str]:
    """The most held before the model, in each stage and phase, and the estimate of it."""
    what = "resident memory (RSS)" if report.ceilings.device == "cpu" else "memory of the device"
    held = [("base", report.base)]
    held += [("load", stage.peak) for stage in report.stages if stage.peak is not None]
    held += [(phase.name, phase.peak) for phase in report.phases]
    known = [f"{name} {size(nbytes)}" for name, nbytes in held if nbytes is not None]
    if known:
        yield f"peak {what}: {known[0]}"
        yield from known[1:]
    taken = (report.peak or 0) - (report.base or 0)
    if report.peak is None or report.base is None or taken <= 0:
        yield f"estimated for the model {size(report.estimated)}"
        return
    off = report.estimated / taken - 1
    words = "exactly" if not off else f"{percent(abs(off))} {'more' if off > 0 else 'less'}"
    yield f"the model took {size(taken)}, estimated {size(report.estimated)} ({words})"
