"""The machine and the start-up of a timed run, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmcli.commands.timing.report import PhaseTime, Stage, TimingReport
from llmcli.ui.machine import SURELY, beyond
from llmcli.ui.rates import percent, unit
from llmcli.ui.stats import duration, size


def stage_words(stages: Sequence[Stage], weight_bytes: int, format: str) -> Iterator[str]:
    """`start-up: import torch 1.20 s`, `load the weights 0.4 s (98.4 MB of file → …)`."""
    for at, stage in enumerate(stages):
        words = f"{'' if at else 'start-up: '}{stage.name} {duration(stage.seconds)}"
        if stage.nbytes:
            became = f"{unit(stage.nbytes, 'B')} of file → {unit(weight_bytes, 'B')} {format}"
            speed = f", {unit(stage.nbytes / stage.seconds, 'B/s')}" if stage.seconds else ""
            words += f" ({became}{speed})"
        yield words


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


def a_token(phase: PhaseTime, amount: float) -> tuple[float, str]:
    """Of decode what falls to one token, and the words for that; of prefill all."""
    return (amount / phase.tokens, " a token") if phase.name == "decode" else (amount, "")
