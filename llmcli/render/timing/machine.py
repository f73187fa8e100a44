"""What the machine can do at most, what memory was held, and what was done once."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.render.stats import duration, size
from llmcli.render.timing.numbers import percent, unit
from llmcli.reports.ceilings import Ceilings
from llmcli.reports.timing import TimingReport


def stage_words(report: TimingReport) -> Iterator[str]:
    """`import torch 1.20 s`, `weights 0.4 s (98.4 MB, 0.25 GB/s)`."""
    for stage in report.stages:
        words = f"{stage.name} {duration(stage.seconds)}"
        if stage.nbytes:
            words += f" ({unit(stage.nbytes, 'B')}"
            words += f", {unit(stage.nbytes / stage.seconds, 'B/s')})" if stage.seconds else ")"
        yield words


def ceiling_words(ceilings: Ceilings) -> Iterator[str]:
    """Read rates from memory to the fastest cache, then products by dtype."""
    sizes = dict(ceilings.caches)
    seen: set[str] = set()
    for read in reversed(ceilings.reads):
        if read.level in seen:
            continue
        seen.add(read.level)
        held = f" of {size(sizes[read.level])}" if read.level in sizes else ""
        yield f"{read.level}{held} reads at {unit(read.bytes_per_s, 'B/s')}"
    for matrix in ceilings.matrices:
        way = f" ({matrix.way})" if matrix.way else ""
        yield f"{matrix.dtype} products{way}: {unit(matrix.flops_per_s, 'FLOP/s')}"


def place_words(report: TimingReport) -> str:
    """Where the numbers lie that a step reads over and over."""
    ceilings = report.ceilings
    level = ceilings.read(report.working_set).level
    amount = unit(report.working_set, "B")
    if level != "memory":
        return f"a step's {amount} lie in {level}, and are judged by its rate, not the memory's"
    largest = max((held for _, held in ceilings.caches), default=None)
    than = "" if largest is None else f", for no cache holds them (at most {size(largest)})"
    return f"a step's {amount} come from memory{than}"


def memory_words(report: TimingReport) -> Iterator[str]:
    """What was held before the model, at most in each stage and phase, and the estimate of it."""
    if report.base is not None:
        yield f"{size(report.base)} before the model"
    for stage in report.stages:
        if stage.peak is not None:
            yield f"{stage.name} {size(stage.peak)}"
    for phase in report.phases:
        if phase.peak is not None:
            yield f"{phase.name} {size(phase.peak)}"


def estimate_words(report: TimingReport) -> str:
    """`the model took 571 MiB, estimated 560 MiB (1.9 % less)`; empty where it is not known."""
    if report.peak is None or report.base is None:
        return f"estimated for the model {size(report.estimated)}"
    taken = report.peak - report.base
    if taken <= 0:
        return f"estimated for the model {size(report.estimated)}"
    off = report.estimated / taken - 1
    words = "exactly" if not off else f"{percent(abs(off))} {'more' if off > 0 else 'less'}"
    return f"the model took {size(taken)}, estimated {size(report.estimated)} ({words})"
