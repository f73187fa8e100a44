"""Where the time goes: what was done once, each phase with its parts, the machine, the checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.render.checks import render_checks
from llmcli.render.layout import Dotted
from llmcli.render.stats import duration
from llmcli.render.theme import FAINT, HEADING, one_line
from llmcli.render.timing.layers import layer_words, render_layers
from llmcli.render.timing.machine import (
    beyond_words,
    ceiling_words,
    estimate_words,
    memory_words,
    place_words,
    stage_words,
)
from llmcli.render.timing.numbers import percent, signed_percent, speed, unit
from llmcli.render.timing.parts import CALLS, PartsTable, floor_s, shares_by_bound
from llmcli.reports.numbers import counted
from llmcli.reports.timing import PhaseTime, SplitTime, TimingReport
from llmcli.reports.work import PartWork

_INDENT = "  "
_GLUE = "\ue000"  # between a number and its unit while lines are broken


@dataclass(frozen=True)
class Sentence:
    """Words that break between them; further lines begin two columns to the right."""

    words: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glued = Text(re.sub(r"(?<=\d) (?=[%kMGTmB])", _GLUE, self.words))
        lines = glued.wrap(console, max(8, options.max_width - len(_INDENT)))
        joined = f"\n{_INDENT}".join(line.plain.rstrip() for line in lines).replace(_GLUE, " ")
        yield Text(joined, style=self.style, no_wrap=True, overflow="ignore")


def render_timing(report: TimingReport, title: str, *, layers: bool) -> RenderableType:
    """All of it as text; `layers` adds a table of the parts of every layer to each phase."""
    parts: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    if report.stages:
        parts.append(Dotted(["once", *stage_words(report)], FAINT))
    for phase in report.phases:
        parts += [Text(), *_phase(phase, report, layers)]
    parts += [Text(), *_machine(report), Text(), render_checks(report.checks)]
    return Group(*parts)


def _phase(phase: PhaseTime, report: TimingReport, layers: bool) -> Iterator[RenderableType]:
    yield _headline(phase, report.batch)
    yield from (Sentence(said, FAINT) for said in _looking(phase))
    yield Text()
    yield PartsTable(phase)
    if phase.name == "decode":
        yield Text("FLOPs and bytes are those of a token", style=FAINT)
    yield Text()
    for words in (*_products(phase), _reads(phase), *_bounds(phase), _flops(phase)):
        yield Sentence(words)
    yield from (Sentence(_pieces(split)) for split in report.splits if split.phase == phase.name)
    if layers:
        yield Text()
        yield render_layers(phase)
    elif said := layer_words(phase):
        yield Sentence(said)


def _headline(phase: PhaseTime, batch: int) -> Dotted:
    """What was done, and what it takes without anybody looking."""
    did = "reading" if phase.name == "prefill" else "writing"
    what = f"{did} {counted(phase.tokens, 'token')}"
    if batch > 1:
        what += f" of {batch} sequences"
    if phase.past:
        what += f" after {phase.past:,}"
    if phase.name == "prefill" and phase.calls > 1:
        what += f", {phase.calls} calls,"
    took = [f"{phase.name}: {what} in {duration(phase.bare_s)}"]
    if phase.name == "decode":
        took.append(f"{duration(phase.bare_s / phase.tokens)} a token")
    if phase.bare_s > 0:
        took.append(speed(phase.tokens / phase.bare_s))
    return Dotted(took, HEADING)


def _looking(phase: PhaseTime) -> Iterator[str]:
    """What the clocks cost: the run below took longer than the one above."""
    cost = phase.overhead
    lowest, highest = signed_percent(cost.lowest), signed_percent(cost.highest)
    yield (
        f"looking costs {signed_percent(cost.median)} ({lowest} … {highest} in "
        f"{counted(len(cost.ratios), 'pair')} of runs with and without)"
    )
    gaps = phase.gaps_s / phase.seconds if phase.seconds else 0.0
    yield f"the run below took {duration(phase.seconds)}, {percent(gaps)} of it in no part"


def _products(phase: PhaseTime) -> list[str]:
    """`GEMV: 121 a token, 78 % of the time`: products with a weight matrix, one row or many."""
    words = []
    for name, of in (("GEMV", "one row"), ("GEMM", "many rows")):
        parts = [part for part in phase.totals if _count(part.work, name)]
        if parts:
            share = sum(part.seconds for part in parts) / phase.seconds
            each, behind = _a_token(phase, _count(phase.work, name))
            named = ", ".join(part.part for part in parts)
            said = (
                f"{name} ({of} times a weight matrix): {_whole(each)}{behind}, {percent(share)} of "
                f"the time ({named})"
            )
            words.append((share, said))
    return [said for _, said in sorted(words, reverse=True)]


def _count(work: PartWork, name: str) -> int:
    return work.gemv if name == "GEMV" else work.gemm


def _reads(phase: PhaseTime) -> str:
    """What a token has to read; a prompt reads its weights once for all of its tokens."""
    weights, _ = _a_token(phase, phase.work.weights)
    cache, _ = _a_token(phase, phase.work.cache)
    who = "a token" if phase.name == "decode" else "the prompt"
    return f"{who} reads {unit(weights, 'B')} of weights and {unit(cache, 'B')} of cache"


def _bounds(phase: PhaseTime) -> Iterator[str]:
    """Which part waits for what, and how near all of them are to their ceilings."""
    for bound, share, parts in shares_by_bound(phase):
        why = ", which take longer to start than to do" if bound == CALLS else ""
        yield f"bound by {bound} {percent(share)} of the time: {', '.join(parts)}{why}"
    floor = floor_s(phase)
    if floor is not None:
        each, behind = _a_token(phase, floor)
        yield (
            f"at their ceilings all parts would take {duration(each)}{behind}, "
            f"{percent(floor / phase.seconds)} of what they did"
        )


def _flops(phase: PhaseTime) -> str:
    """Both conventions."""
    causal, behind = _a_token(phase, phase.work.flops)
    full, _ = _a_token(phase, phase.work.flops_full)
    return (
        f"{unit(causal, 'FLOP')}{behind} of the pairs that the causal mask leaves, "
        f"{unit(full, 'FLOP')} of the full square"
    )


def _a_token(phase: PhaseTime, amount: float) -> tuple[float, str]:
    """Of decode what falls to one token, and the words for that; of prefill all."""
    return (amount / phase.tokens, " a token") if phase.name == "decode" else (amount, "")


def _whole(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def _pieces(split: SplitTime) -> str:
    pieces = ", ".join(f"{name} {duration(seconds)}" for name, seconds in split.pieces)
    return f"{split.part} took {duration(split.group_s)} fused; apart its pieces take: {pieces}"


def _machine(report: TimingReport) -> Iterator[RenderableType]:
    threads = counted(report.ceilings.threads, "thread")
    where = report.ceilings.device
    if where == "cpu":
        where = f"{where}, {threads}"
    yield Dotted([f"ceilings of this machine ({where})", *ceiling_words(report.ceilings)])
    yield Sentence(place_words(report))
    if beyond := beyond_words(report):
        yield Sentence(beyond, "yellow")
    held = list(memory_words(report))
    if held:
        yield Dotted(["memory at most", *held])
    yield Sentence(estimate_words(report))
