"""Where the time goes: what was found, then each phase with its parts, the machine, the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.timing.report import PhaseTime, SplitTime, Stage, TimingReport
from llmcli.commands.timing.view.layers import layer_words, render_layers
from llmcli.commands.timing.view.lines import Dots, Sentence
from llmcli.commands.timing.view.machine import (
    a_token,
    beyond_words,
    memory_words,
    place_words,
    stage_words,
)
from llmcli.commands.timing.view.parts import PartsTable
from llmcli.commands.timing.view.summary import phase_summary
from llmcli.reports.checks import ViewCheck
from llmcli.reports.environment import Environment
from llmcli.reports.numbers import counted
from llmcli.ui.checks import GOOD, Marked, render_checks
from llmcli.ui.environment import environment_words
from llmcli.ui.machine import ceiling_words
from llmcli.ui.rates import signed_percent, unit
from llmcli.ui.stats import duration
from llmcli.ui.theme import FAINT, HEADING, one_line


def render_opening(
    title: str,
    environment: Environment,
    stages: Sequence[Stage],
    *,
    weight_bytes: int,
    format: str,
) -> RenderableType:
    """What is known before anything is timed: the model, the machine, what was done once.

    `weight_bytes` in `format` are what the file became.
    """
    return Group(
        Text(one_line(title), style=HEADING),
        Dots(environment_words(environment), FAINT),
        Dots(list(stage_words(stages, weight_bytes, format)), FAINT),
    )


def render_timing(report: TimingReport, *, layers: bool) -> RenderableType:
    """What was timed as text; `layers` adds a table of the parts of every layer to each phase."""
    parts: list[RenderableType] = []
    if report.phases:
        parts.append(Text())
    for phase in report.phases:
        parts += phase_summary(phase, report.batch)
    for phase in report.phases:
        parts += [Text(), *_phase(phase, report, layers)]
    parts += [Text(), *_machine(report), *_checks(report.checks)]
    return Group(*parts)


def _phase(phase: PhaseTime, report: TimingReport, layers: bool) -> Iterator[RenderableType]:
    yield _looked(phase)
    yield PartsTable(phase)
    said = [] if layers else layer_words(phase)
    yield Dots([_flops(phase), _reads(phase), *said])
    splits = (split for split in report.splits if split.phase == phase.name)
    yield from (Sentence(_pieces(phase, split)) for split in splits)
    if layers:
        yield Text()
        yield render_layers(phase)


def _looked(phase: PhaseTime) -> Dots:
    """Which run the table is of, and what the clocks in it cost."""
    cost = phase.overhead
    lower, upper = map(signed_percent, cost.quartiles)
    noise = "within noise: " if cost.within_noise else ""
    pairs = counted(len(cost.ratios), "pair")
    return Dots(
        [
            f"{phase.name} with clocks: {duration(phase.seconds)}",
            f"looking costs {signed_percent(cost.median)} "
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


def _pieces(phase: PhaseTime, split: SplitTime) -> str:
    fused, behind = a_token(phase, split.group_s)
    pieces = ", ".join(
        f"{name} {duration(a_token(phase, seconds)[0])}" for name, seconds in split.pieces
    )
    return f"{split.part} took {duration(fused)}{behind} fused; apart its pieces take: {pieces}"


def _machine(report: TimingReport) -> Iterator[RenderableType]:
    threads = counted(report.ceilings.threads, "thread")
    where = report.ceilings.device
    if where == "cpu":
        where = f"{where}, {threads}"
    yield Dots([f"ceilings of this machine ({where})", *ceiling_words(report.ceilings)])
    yield Sentence(place_words(report))
    if beyond := beyond_words(report):
        yield Sentence(beyond, "yellow")
    yield Dots(list(memory_words(report)))


def _checks(checks: Sequence[ViewCheck]) -> Iterator[RenderableType]:
    """Those that hold in a line, by name; one that does not in full."""
    names = [check.name.replace("_", " ") for check in checks if check.ok]
    if names:
        yield Marked(GOOD, f"{counted(len(names), 'check')}: {', '.join(names)}", FAINT)
    yield render_checks([check for check in checks if not check.ok])
