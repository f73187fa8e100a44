"""What was found, before the tables that it was found in: a few lines a phase."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from llmcli.commands.timing.report import PhaseTime
from llmcli.commands.timing.view.lines import Dots, below
from llmcli.commands.timing.view.machine import a_token
from llmcli.commands.timing.view.parts import CALLS, KERNEL, floor_s, shares_by_bound
from llmcli.reports.numbers import counted
from llmcli.ui.rates import percent, speed
from llmcli.ui.stats import duration
from llmcli.ui.theme import HEADING

_LARGEST = 3  # parts that are named
_WHY = {CALLS: " (starting operations)", KERNEL: " (far from any ceiling)"}


def phase_summary(phase: PhaseTime, batch: int) -> Iterator[RenderableType]:
    """How fast it is without instrumentation, where its time goes, and what holds it up."""
    yield Dots([f"{phase.name}: {_what(phase, batch)}", *_speed(phase)], HEADING)
    yield below(list(_largest(phase)))
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
    if phase.bare_s > 0:
        yield speed(phase.tokens / phase.bare_s)
    if phase.name == "decode":
        yield f"{duration(phase.bare_s / phase.tokens)} a token"
    else:
        yield duration(phase.bare_s)


def _largest(phase: PhaseTime) -> Iterator[str]:
    largest = sorted(phase.totals, key=lambda part: -part.seconds)[:_LARGEST]
    for at, part in enumerate(largest):
        share = percent(part.seconds / phase.seconds)
        yield f"{'' if at else 'most time in '}{part.part} {share}"


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
