"""Where the time goes: both phases side by side, or each with all that is known of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.timing.report import Overhead, PhaseTime, Stage, TimingReport
from llmcli.commands.timing.view.layers import layer_words, render_layers
from llmcli.commands.timing.view.parts import (
    CALLS,
    KERNEL,
    BothPhases,
    PartsTable,
    floor_s,
    shares_by_bound,
)
from llmcli.records.environment import Environment
from llmcli.records.numbers import counted
from llmcli.ui.environment import environment_words
from llmcli.ui.layout import filled
from llmcli.ui.machine import SURELY, beyond, ceiling_summary, ceiling_words
from llmcli.ui.rates import percent, signed_percent, speed, unit
from llmcli.ui.stats import duration, size
from llmcli.ui.theme import FAINT, HEADING, one_line

_INDENT = "  "
MUCH_OVERHEAD = 0.1  # of the time without instrumentation: it stands out
_LEAST = 8  # columns of a line, however narrow the terminal
_GLUE = "\ue000"  # between a number and its unit while lines are broken


@dataclass(frozen=True)
class Sentence:
    """Words that break between them; further lines begin two columns to the right."""

    words: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _broken(console, self.words, options.max_width - len(_INDENT))
        yield _whole(f"\n{_INDENT}".join(lines), self.style)


@dataclass(frozen=True)
class Dots:
    """Parts joined by dots after an indent; lines break between parts, inside one if they must."""

    parts: Sequence[str]
    style: str = ""
    indent: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(_LEAST, options.max_width - len(self.indent))
        for line in filled(self.parts, room):
            for part in _broken(console, line, room):
                yield _whole(self.indent + part, self.style)


def below(parts: Sequence[str]) -> Dots:
    """Two columns to the right."""
    return Dots(parts, indent=_INDENT)


def _broken(console: Console, words: str, width: int) -> Iterator[str]:
    glued = Text(re.sub(r"(?<=\d) (?=[%kMGTmB])", _GLUE, words))
    for line in glued.wrap(console, max(_LEAST, width)):
        yield line.plain.rstrip().replace(_GLUE, " ")


def _whole(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def stage_words(stages: Sequence[Stage], about: Mapping[str, Any]) -> Iterator[str]:
    """`start-up: import torch 1.20 s`, `load the weights 0.4 s (98.4 MB of file → …)`."""
    for at, stage in enumerate(stages):
        words = f"{'' if at else 'start-up: '}{stage.name} {duration(stage.seconds)}"
        if stage.nbytes:
            became = f"{unit(about['weight_bytes'], 'B')} {about['weight_format']}"
            speed = f", {unit(stage.nbytes / stage.seconds, 'B/s')}" if stage.seconds else ""
            words += f" ({unit(stage.nbytes, 'B')} of file → {became}{speed})"
        yield words


def residency(report: TimingReport) -> str:
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


_LARGEST = 3  # parts that are named
_WHY = {CALLS: " (starting operations)", KERNEL: " (far from any ceiling)"}


def phase_summary(phase: PhaseTime, batch: int) -> Iterator[RenderableType]:
    """How fast the instrumented run is, where its time goes, and what holds it up."""
    yield Dots([f"{phase.name}: {_what(phase, batch)}", *_speed(phase)], HEADING)
    first, *others = _largest(phase)
    yield below([f"most time in {first}", *others])
    yield below(product_words(phase))
    yield below(list(_bounds(phase)))


def _what(phase: PhaseTime, batch: int) -> str:
    """`31 tokens`, `16 tokens after 31`, `4,800 tokens of 4 sequences in 3 calls`."""
    what = counted(phase.tokens, "token")
    if batch > 1:
        what += f" of {batch} sequences"
    if phase.past:
        what += f" after {phase.past:,}"
    if phase.name == "prefill" and phase.calls > 1:
        what += f" in {phase.calls} calls"
    return what


def _speed(phase: PhaseTime) -> Iterator[str]:
    """Of the run that the table is of."""
    if phase.seconds > 0:
        yield speed(phase.tokens / phase.seconds)
    seconds, behind = a_token(phase, phase.seconds)
    yield f"{duration(seconds)}{behind}"


def _largest(phase: PhaseTime) -> Iterator[str]:
    largest = sorted(phase.totals, key=lambda part: -part.seconds)[:_LARGEST]
    for part in largest:
        yield f"{part.part} {percent(part.seconds / phase.seconds)}"


def product_words(phase: PhaseTime) -> list[str]:
    """`GEMV: 121 a token, 78 % of the time`: products with a weight matrix, one row or many."""
    words = []
    for name, of, count, seconds in (
        ("GEMV", "one row times a weight matrix", phase.work.gemv, phase.gemv_s),
        ("GEMM", "many rows times one", phase.work.gemm, phase.gemm_s),
    ):
        if count:
            each, behind = a_token(phase, count)
            number = f"{each:,.0f}" if each == int(each) else f"{each:,.1f}"
            share = percent(seconds / phase.seconds)
            words.append((seconds, f"{name} ({of}): {number}{behind}, {share} of the time"))
    return [said for _, said in sorted(words, reverse=True)]


def _bounds(phase: PhaseTime) -> Iterator[str]:
    """What the parts wait for, and how near all of them are to their ceilings."""
    for at, (bound, share, _) in enumerate(shares_by_bound(phase)):
        yield f"{'' if at else 'bound by '}{bound} {percent(share)}{_WHY.get(bound, '')}"
    floor = floor_s(phase)
    if floor is not None:
        each, behind = a_token(phase, floor)
        reached = percent(floor / phase.seconds)
        yield f"{reached} of the ceilings, which allow {duration(each)}{behind}"


def render_opening(
    title: str,
    environment: Environment,
    stages: Sequence[Stage],
    about: Mapping[str, Any],
    *,
    details: bool = False,
) -> RenderableType:
    """What is known before anything is timed: the model, the machine, what was done once.

    `about` is what `Model.describe` says. `details`: also what the file became.
    """
    brief = [f"{stage.name.split()[-1]} {duration(stage.seconds)}" for stage in stages]
    return Group(
        Text(one_line(title), style=HEADING),
        Dots(environment_words(environment), FAINT),
        Dots(list(stage_words(stages, about)), FAINT)
        if details
        else Sentence(f"start-up: {', '.join(brief)}", FAINT),
    )


def render_timing(
    report: TimingReport, *, layers: bool = False, details: bool = False
) -> RenderableType:
    """What was timed as text: both phases in one table, which fits 80 × 24.

    `details`: each phase with all that is known of it; `layers` adds the parts of every layer.
    """
    parts: list[RenderableType] = [_overheads(report), Text()] if report.phases else []
    if not details:
        parts += [_headline(phase, report.batch) for phase in report.phases]
        parts += [BothPhases(report.phases)] if report.phases else []
        return Group(*parts, *_machine_in_short(report))
    for phase in report.phases:
        parts += phase_summary(phase, report.batch)
    for phase in report.phases:
        parts += [Text(), *_phase(phase, layers)]
    return Group(*parts, Text(), *_machine(report))


def _headline(phase: PhaseTime, batch: int) -> Dots:
    """How fast a phase is with its parts timed, and where most of its time goes."""
    most = [f"most in {words}" for words in list(_largest(phase))[:1]]
    return Dots([f"{phase.name}: {_what(phase, batch)}", *_speed(phase), *most], HEADING)


def _overheads(report: TimingReport) -> Sentence:
    """What instrumentation costs in each phase, of how many pairs of runs: where it is much, what
    is below is not the speed of `generate`.
    """
    much = any(phase.overhead.median > 1 + MUCH_OVERHEAD for phase in report.phases)
    words = "; ".join(f"{phase.name} {_overhead(phase.overhead)}" for phase in report.phases)
    return Sentence(f"timing overhead: {words}", "yellow" if much else FAINT)


def _overhead(found: Overhead) -> str:
    """`+1.2 % (7 pairs)`; where runs differ by more than may be trusted, by how much."""
    pairs = counted(len(found.ratios), "pair")
    wide = "" if found.tight or len(found.ratios) < 2 else f", quartiles {percent(found.spread)}"
    return f"{signed_percent(found.median)} ({pairs}{wide})"


def _machine_in_short(report: TimingReport) -> Iterator[RenderableType]:
    """The ceilings that decide, the most memory, and ceilings that were none."""
    read = report.ceilings.read(report.working_set)
    first, *rest = ceiling_summary(report.ceilings)
    where = first if read.level == "memory" else f"{read.level} {unit(read.bytes_per_s, 'B/s')}"
    peak = [] if report.peak is None else [f"peak memory {size(report.peak)}"]
    yield Dots([", ".join([f"ceilings: {where}", *rest]), *peak], FAINT)
    if beyond := beyond_words(report):
        yield Sentence(beyond, "yellow")


def _phase(phase: PhaseTime, layers: bool) -> Iterator[RenderableType]:
    yield _instrumented(phase)
    yield PartsTable(phase)
    said = [] if layers else layer_words(phase)
    yield Dots([_flops(phase), _reads(phase), *said])
    if layers:
        yield Text()
        yield render_layers(phase)


def _instrumented(phase: PhaseTime) -> Dots:
    """Which run the table is of, and what the clocks in it cost."""
    cost = phase.overhead
    lower, upper = map(signed_percent, cost.quartiles)
    noise = "within noise: " if cost.within_noise else ""
    pairs = counted(len(cost.ratios), "pair")
    return Dots(
        [
            f"{phase.name}, instrumented: {duration(phase.seconds)}",
            f"overhead {signed_percent(cost.median)} "
            f"({noise}quartiles {lower} … {upper}, {pairs})",
        ],
        FAINT,
    )


def _reads(phase: PhaseTime) -> str:
    """What a token has to read; a prompt reads its weights once for all of its tokens."""
    weights, _ = a_token(phase, phase.work.weights)
    cache, _ = a_token(phase, phase.work.cache)
    return f"reads {unit(weights, 'B')} of weights, {unit(cache, 'B')} of cache"


def _flops(phase: PhaseTime) -> str:
    """Both conventions where they differ."""
    causal, behind = a_token(phase, phase.work.flops)
    full, _ = a_token(phase, phase.work.flops_full)
    one, other = unit(causal, "FLOP"), unit(full, "FLOP")
    if one == other:
        return f"{one}{behind}"
    return f"{one}{behind} (causal), {other} (full square)"


def _machine(report: TimingReport) -> Iterator[RenderableType]:
    threads = counted(report.ceilings.threads, "thread")
    where = report.ceilings.device
    if where == "cpu":
        where = f"{where}, {threads}"
    yield Dots([f"ceilings of this machine ({where})", *ceiling_words(report.ceilings)])
    yield Sentence(residency(report))
    if beyond := beyond_words(report):
        yield Sentence(beyond, "yellow")
    yield Dots(list(memory_words(report)))
