"""Where the time goes: a table of the parts of each phase, and what is known beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.timing.report import (
    CALLS,
    KERNEL,
    Overhead,
    PartTime,
    PhaseTime,
    Stage,
    TimingReport,
)
from llmcli.records.ceilings import MEMORY
from llmcli.records.environment import Environment
from llmcli.records.numbers import counted
from llmcli.records.work import PartWork
from llmcli.ui.facts import SURELY, beyond, ceiling_summary, ceiling_words, environment_words
from llmcli.ui.layout import Column, Indented, Line, Rows
from llmcli.ui.numbers import (
    digits_for,
    duration,
    milliseconds,
    percent,
    rate,
    scaled,
    signed_percent,
    size,
    speed,
    unit,
)
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

MUCH_OVERHEAD = 0.1  # of the time without instrumentation: it stands out
UNLIKE = 1.5  # times the median of a part over the layers, from which on a layer stands out …
LEAST = 0.02  # … where the difference is this share of a layer's time, too: small parts waver
_MARK, _OUTSIDE = "*", "-"  # of what stands out; the row of what is in no layer
_BAR = 20  # columns of a bar for all of the time
_FEW = 7  # parts that are shown of both phases, and all that take …
_MUCH = 0.05  # … of the time of one
_WHY = {CALLS: " (starting operations)", KERNEL: " (far from any ceiling)"}
_BOUND = {MEMORY: "cyan", "compute": "green", CALLS: "yellow", KERNEL: "magenta"}
_CACHE = "blue"  # a bound that is the name of a cache


def render_opening(
    title: str, environment: Environment, stages: Sequence[Stage], about: Mapping[str, Any] | None
) -> RenderableType:
    """What is known before anything is timed: the model, the machine, what was done once.

    `about`: `Model.describe()`, to show the size of the weights in the file and in memory.
    """
    return Group(
        Text(one_line(title), style=HEADING),
        Line(environment_words(environment), FAINT),
        Line(list(_stage_words(stages, about)), FAINT),
    )


def render_timing(
    report: TimingReport, *, layers: bool = False, details: bool = False
) -> RenderableType:
    """What was timed as text: both phases in one table, which fits 80 × 24.

    `details`: a table of all parts for each phase, and all that is known of it and of the machine;
    `layers` adds the parts of every layer.
    """
    parts: list[RenderableType] = [_overheads(report, details), Text()] if report.phases else []
    for phase in report.phases:
        parts.append(_headline(phase))
        parts += [Indented(Line(words), by=2) for words in _phase_words(phase)] if details else []
    if details:
        for phase in report.phases:
            parts += [Text(), _parts_table([phase], whole=True)]
            parts += [Text(), Layers(phase)] if layers else []
        parts.append(Text())
    elif report.phases:
        parts.append(_parts_table(report.phases, whole=False))
    return Group(*parts, *_machine(report, details))


def _stage_words(stages: Sequence[Stage], about: Mapping[str, Any] | None) -> Iterator[str]:
    """`start-up: torch 1.20 s`, `weights 0.4 s`; `(98.4 MB of file → 83 MB float32, 250 MB/s)`."""
    for at, stage in enumerate(stages):
        name = stage.name.split()[-1]
        words = f"{'' if at else 'start-up: '}{name} {duration(stage.seconds)}"
        if about and stage.nbytes:
            became = f"{unit(about['weight_bytes'], 'B')} {about['weight_format']}"
            rate = f", {unit(stage.nbytes / stage.seconds, 'B/s')}" if stage.seconds else ""
            words += f" ({unit(stage.nbytes, 'B')} of file → {became}{rate})"
        yield words


def _overheads(report: TimingReport, details: bool) -> Line:
    """The cost of instrumentation in each phase. Highlighted where it is high: the times below are
    then not those of `generate`.
    """
    much = any(phase.overhead.median > 1 + MUCH_OVERHEAD for phase in report.phases)
    words = [f"{phase.name} {_overhead(phase, details)}" for phase in report.phases]
    words[0] = f"timing overhead: {words[0]}"
    return Line(words, "yellow" if much else FAINT)


def _overhead(phase: PhaseTime, details: bool) -> str:
    """`+1.2 % (7 pairs)`; with its quartiles, or where they are too far apart how far they are."""
    found: Overhead = phase.overhead
    words = f"{signed_percent(found.median)} ({counted(phase.pairs, 'pair')}"
    if details:
        lower, upper = map(signed_percent, found.quartiles)
        words += f", {'within noise: ' * found.within_noise}quartiles {lower} … {upper}"
    elif not found.tight and phase.pairs > 1:
        words += f", quartiles {percent(phase.spread)}"
    return f"{words})"


def _headline(phase: PhaseTime) -> Line:
    """The speed of the run in the table, and the part that takes most of it."""
    what = f"{phase.name}: {counted(phase.tokens, 'token')}"
    if phase.past:
        what += f" after {phase.past:,}"
    if phase.name == "prefill" and phase.calls > 1:
        what += f" in {phase.calls} calls"
    seconds, behind = a_token(phase, phase.seconds)
    rates = [speed(phase.tokens / phase.seconds)] if phase.seconds > 0 else []
    largest = max(phase.totals, key=lambda part: part.seconds)
    most = f"most in {largest.part} {percent(largest.share or 0.0)}"
    return Line([what, *rates, f"{duration(seconds)}{behind}", most], HEADING)


def a_token(phase: PhaseTime, amount: float) -> tuple[float, str]:
    """For decode the amount per token, with words that say so; for prefill all of it."""
    return amount / phase.shown_tokens, " a token" * (phase.name == "decode")


def _phase_words(phase: PhaseTime) -> Iterator[list[str]]:
    """Products with weights, what limits the parts, and the work of the phase, a line each."""
    yield product_words(phase)
    yield list(_bounds(phase))
    causal, behind = a_token(phase, phase.work.flops)
    one, other = unit(causal, "FLOP"), unit(a_token(phase, phase.work.flops_full)[0], "FLOP")
    flops = f"{one}{behind}" if one == other else f"{one}{behind} (causal), {other} (full square)"
    weights, cache = (a_token(phase, n)[0] for n in (phase.work.weights, phase.work.cache))
    reads = f"reads {unit(weights, 'B')} of weights, {unit(cache, 'B')} of cache"
    yield [flops, reads, *layer_words(phase)]


def product_words(phase: PhaseTime) -> list[str]:
    """`GEMV: 121 a token, 78 % of the time`: products with a weight matrix, one row or many."""
    words = []
    for name, what, count, seconds in (
        ("GEMV", "one row times a weight matrix", phase.work.gemv, phase.gemv_s),
        ("GEMM", "many rows times one", phase.work.gemm, phase.gemm_s),
    ):
        if count:
            each, behind = a_token(phase, count)
            number = f"{each:,.0f}" if each == int(each) else f"{each:,.1f}"
            share = percent(seconds / phase.seconds)
            words.append((seconds, f"{name} ({what}): {number}{behind}, {share} of the time"))
    return [text for _, text in sorted(words, reverse=True)]


def _bounds(phase: PhaseTime) -> Iterator[str]:
    """What limits the parts, by their share of the time, and how near all are to their ceilings."""
    shares: dict[str, float] = {}
    for part in phase.totals:
        if part.bound is not None:
            shares[part.bound] = shares.get(part.bound, 0.0) + (part.share or 0.0)
    for at, (bound, share) in enumerate(sorted(shares.items(), key=lambda item: -item[1])):
        yield f"{'' if at else 'bound by '}{bound} {percent(share)}{_WHY.get(bound, '')}"
    if phase.floor_s is not None:
        each, behind = a_token(phase, phase.floor_s)
        reached = percent(phase.floor_s / phase.seconds)
        yield f"{reached} of the ceilings, which allow {duration(each)}{behind}"


def layer_words(phase: PhaseTime) -> list[str]:
    """`30 layers of 1.02 ms, slowest 7 with 1.31 ms`; nothing without layers."""
    times: dict[int, float] = {}
    for part in phase.parts:
        if part.layer is not None:
            times[part.layer] = times.get(part.layer, 0.0) + part.seconds / phase.shown_tokens
    if len(times) < 2:
        return []
    slowest = max(times, key=lambda layer: times[layer])
    usual = duration(median(times.values()))
    return [f"{len(times)} layers of {usual}, slowest {slowest} with {duration(times[slowest])}"]


def _parts_table(phases: Sequence[PhaseTime], *, whole: bool) -> Rows:
    """The parts of some phases side by side, over all layers, and their sum.

    Of each phase: milliseconds (of decode everything is of a token), share of the time, rates, and
    what limits a part with the share that it reaches of the nearest ceiling. `whole`: all parts,
    with their work, and a bar; else the `_FEW` largest and all that take `_MUCH` of a phase, and
    one row for the others.
    """
    shares: dict[str, float] = {}
    for phase in sorted(phases, key=lambda phase: -len(phase.totals)):
        for part in phase.totals:
            shares[part.part] = max(shares.get(part.part, 0.0), part.share or 0.0)
    largest = sorted(shares, key=lambda name: -shares[name])
    kept = [one for at, one in enumerate(largest) if at < _FEW or shares[one] >= _MUCH]
    if whole or len(kept) + 1 == len(shares):  # one other is a row of its own
        kept = largest
    others = [name for name in shares if name not in kept]
    groups = [(name, [name]) for name in shares if name in kept]
    groups += [(f"{len(others)} others", others)] if others else []
    groups += [("all", list(shares))]
    columns = [(phase, _columns(phase, whole)) for phase in phases]
    rows = []
    for title, names in groups:
        cells = [Text(title)]
        for phase, own in columns:
            parts = [part for part in phase.totals if part.part in names]
            part = parts[0] if len(parts) == 1 else PartTime.total(title, parts)
            cells += (Text.assemble(shown(part)) if parts else Text() for _, shown in own)
        rows.append(cells)
    for cell in rows[-1]:
        cell.stylize(HEADING)
    heads = [Column("ms by part", right=False)]
    return Rows([*heads, *(column for _, own in columns for column, _ in own)], rows)


def _columns(
    phase: PhaseTime, whole: bool
) -> list[tuple[Column, Callable[[PartTime], str | tuple[str, str]]]]:
    """The columns of a phase, each with the words (and their style) for a part or several.

    Columns are dropped by how little they are missed: GFLOP/s of decode before GB/s.
    """
    decode, tokens = phase.name == "decode", phase.shown_tokens
    digits, share = digits_for([phase.seconds / tokens]), percent
    if not whole:
        digits, share = min(2, digits), _whole_percent

    def part_of(part: PartTime) -> float:
        return part.seconds / phase.seconds if phase.seconds else 0.0

    def bar(part: PartTime) -> tuple[str, str]:
        return "█" * round(part_of(part) * _BAR) * (part.share is not None), NUMBER

    def bound(part: PartTime) -> tuple[str, str]:
        reached = "" if part.of_bound is None else share(part.of_bound)
        style = _BOUND.get(part.bound, _CACHE) if part.bound else ""
        return f"{part.bound or ''} {reached}".strip(), style

    columns = [
        (Column("per token" if decode else phase.name),
         lambda part: milliseconds(part.seconds / tokens, digits)),
        (Column("host ms", drop=4), lambda part: milliseconds(part.host_s / tokens, digits)),
        (Column("share", drop=1), lambda part: share(part_of(part))),
        (Column("", right=False, drop=10), bar),
        (Column("FLOPs", drop=9),
         lambda part: scaled(part.work.flops / tokens) if part.work.flops else ""),
        (Column("bytes", drop=7),
         lambda part: unit(part.work.bytes / tokens, "B") if part.work.bytes else ""),
        (Column("GB/s", drop=5 if decode else 6), lambda part: rate(part.work.bytes, part.seconds)),
        (Column("GFLOP/s", drop=6 if decode else 5),
         lambda part: rate(part.work.flops, part.seconds)),
        (Column("bound by", right=False, drop=2), bound),
        (Column("nearest", right=False, drop=11), lambda part: part.nearest or ""),
    ]  # fmt: skip
    apart = any(part.host_s != part.seconds for part in phase.totals)
    left_out = {"host ms"} if whole and not apart else set()
    left_out |= set() if whole else {"host ms", "", "FLOPs", "bytes", "nearest"}
    return [one for one in columns if one[0].name not in left_out]


def _whole_percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


@dataclass(frozen=True)
class Layers:
    """A row a layer, the slowest first, and a column a part; the part that takes the least time is
    the first to go.
    """

    phase: PhaseTime

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        phase, times = self.phase, times_by_layer(self.phase)
        tokens, digits = phase.shown_tokens, digits_for([phase.seconds / phase.shown_tokens])
        parts = [part.part for part in phase.totals]
        order = [part.part for part in sorted(phase.totals, key=lambda part: -part.seconds)]
        layers = sorted({layer for layer, _ in times if layer is not None})
        unlike = outliers(times, layers, parts)
        pad = " " if unlike else ""

        def cell(seconds: float | None, mark: str) -> Text:
            if seconds is None:
                return Text()
            style = "bold yellow" if mark.strip() else ""
            return Text(milliseconds(seconds / tokens, digits) + mark, style=style)

        def row(name: str, seconds: Sequence[float | None], marks: Sequence[str]) -> list[Text]:
            every = cell(sum(one or 0.0 for one in seconds), pad)
            return [Text(name), every, *map(cell, seconds, marks)]

        whole = {at: sum(times.get((at, part), 0.0) for part in parts) for at in layers}
        outside = [None] if any(at is None for at, _ in times) else []
        rows = []
        for layer in [*sorted(layers, key=lambda at: -whole[at]), *outside]:
            marks = [_MARK if (layer, part) in unlike else pad for part in parts]
            name = _OUTSIDE if layer is None else str(layer)
            rows.append(row(name, [times.get((layer, part)) for part in parts], marks))
        sums = [sum(times.get((layer, part), 0.0) for layer in (None, *layers)) for part in parts]
        rows.append(row("all", sums, [pad] * len(parts)))
        for text in rows[-1]:
            text.stylize(HEADING)
        columns = [Column("layer"), Column("all" + pad)]
        columns += [Column(part + pad, drop=1 + order.index(part)) for part in parts]
        table = Rows(columns, rows)
        yield table
        notes = [f"milliseconds{' a token' * (tokens > 1)}; {_OUTSIDE}: in no layer"]
        notes += [f"{_MARK} more than {UNLIKE:g} times the median of the layers"] if unlike else []
        if not table.fit(options.max_width):
            notes.append("the smallest parts are left out: too narrow for all of them")
        yield from (Text(note, style=FAINT) for note in notes)


def times_by_layer(phase: PhaseTime) -> dict[tuple[int | None, str], float]:
    """Seconds by (layer, part); the gaps outside of layers are what is in no part there."""
    return {(part.layer, part.part): part.seconds for part in phase.parts}


def outliers(
    times: Mapping[tuple[int | None, str], float], layers: Sequence[int], parts: Sequence[str]
) -> set[tuple[int | None, str]]:
    """The (layer, part) that take much more than that part does in most layers."""
    if len(layers) < 3:
        return set()
    usual = median(sum(times.get((layer, part), 0.0) for part in parts) for layer in layers)
    found: set[tuple[int | None, str]] = set()
    for part in parts:
        middle = median(times.get((layer, part), 0.0) for layer in layers)
        for layer in layers:
            own = times.get((layer, part), 0.0)
            if own > UNLIKE * middle and own - middle > LEAST * usual:
                found.add((layer, part))
    return found


def _machine(report: TimingReport, details: bool) -> Iterator[RenderableType]:
    """The ceilings that matter and the peak memory, or all of both; what was beyond a ceiling."""
    ceilings = report.ceilings
    read = ceilings.read(report.working_set)
    if details:
        threads = f", {counted(ceilings.threads, 'thread')}" * (ceilings.device == "cpu")
        device = f"{ceilings.device}{threads}"
        yield Line([f"ceilings of this machine ({device})", *ceiling_words(ceilings)])
        yield Line([residency(report)])
    else:
        first, *rest = ceiling_summary(ceilings)
        at = first if read.level == MEMORY else f"{read.level} {unit(read.bytes_per_s, 'B/s')}"
        peak = [] if report.peak is None else [f"peak memory {size(report.peak)}"]
        yield Line([", ".join([f"ceilings: {at}", *rest]), *peak], FAINT)
    if words := beyond(
        f"{part.part} ({phase.name})"
        for phase in report.phases
        for part in phase.totals
        if part.of_bound is not None and part.of_bound > SURELY
    ):
        yield Line([words], "yellow")
    if details:
        yield Line(list(memory_words(report)))


def residency(report: TimingReport) -> str:
    """Which level of memory a step reads its numbers from."""
    ceilings = report.ceilings
    read = ceilings.read(report.working_set)
    level, at = read.level, unit(read.bytes_per_s, "B/s")
    amount = unit(report.working_set, "B")
    if level != MEMORY:
        return f"a step's {amount} fit in {level}: compared with its {at}, not the memory's"
    largest = max((held for _, held in ceilings.caches), default=None)
    than = "" if largest is None else f": no cache holds them (at most {size(largest)})"
    return f"a step's {amount} come from memory at {at}{than}"


def memory_words(report: TimingReport) -> Iterator[str]:
    """The most memory held before the model, in each stage and in each phase, and the estimate."""
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
