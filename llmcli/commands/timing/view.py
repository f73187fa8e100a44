"""Where the time goes: a table of the parts of each phase, and what is known beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.timing.report import (
    CALLS,
    KERNEL,
    PartTime,
    PhaseTime,
    Stage,
    TimingReport,
)
from llmcli.records.machine import MEMORY, Environment
from llmcli.records.numbers import counted
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
_WHY = {CALLS: "starting operations", KERNEL: "its code, far from any ceiling"}
_BOUND = {MEMORY: "cyan", "compute": "green", CALLS: "yellow", KERNEL: "magenta"}
_CACHE = "blue"  # a bound that is the name of a cache

Times = dict[tuple[int | str | None, str], float]  # of (layer or all of them, part)
Words = Callable[[PartTime], str | tuple[str, str]]  # of a cell, with their style


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
    parts: list[RenderableType] = [*_overheads(report, details), Text()] if report.phases else []
    for phase in report.phases:
        parts.append(_headline(phase))
        words = filter(None, _phase_words(phase)) if details else ()
        parts += [Indented(Line(one), by=2) for one in words]
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


def _overheads(report: TimingReport, details: bool) -> Iterator[Line]:
    """`timing overhead: prefill +1.2 % (7 pairs)`, with quartiles, or their distance.

    Highlighted where it is high: the times below are then not those of `generate`. A line of its
    own for a phase whose parts are scaled.
    """
    words: list[str] = []
    plain = [phase for phase in report.phases if phase.parts_scaled_by is None]
    for phase in plain:
        found = phase.overhead
        cost = f"{phase.name} {signed_percent(found.median)} ({counted(phase.pairs, 'pair')}"
        if details:
            lower, upper = map(signed_percent, found.quartiles)
            cost += f", {'within noise: ' * found.within_noise}quartiles {lower} … {upper}"
        elif not found.tight and phase.pairs > 1:
            cost += f", interquartile range {percent(phase.spread)} of the median"
        words.append(f"{'' if words else 'timing overhead: '}{cost})")
    much = any(phase.overhead.median > 1 + MUCH_OVERHEAD for phase in plain)
    if words:
        yield Line(words, "yellow" if much else FAINT)
    for phase in report.phases:
        if (factor := phase.parts_scaled_by) is not None:
            how = f"scaled by {factor:.2f} ({counted(phase.pairs, 'pair')})"
            line = f"{phase.name}: timed with CUDA graphs; parts timed without, {how}"
            yield Line([line], FAINT)


def _headline(phase: PhaseTime) -> Line:
    """The speed of the run in the table, and the part that takes most of it."""
    what = f"{phase.name}: {counted(phase.tokens, 'token')}"
    if phase.past:
        what += f" after {phase.past:,}"
    if phase.name == "prefill" and phase.calls > 1:
        what += f" in {phase.calls} calls"
    rates = [speed(phase.tokens / phase.seconds)] if phase.seconds > 0 else []
    largest = max(phase.totals, key=lambda part: part.seconds)
    most = f"most in {largest.part} {percent(largest.share or 0.0)}"
    return Line([what, *rates, _each(phase, phase.seconds, duration), most], HEADING)


def _each(phase: PhaseTime, amount: float, shown: Callable[[float], str]) -> str:
    """For decode the amount per token, with words that say so; for prefill all of it."""
    return shown(amount / phase.shown_tokens) + " a token" * (phase.name == "decode")


def _phase_words(phase: PhaseTime) -> Iterator[list[str]]:
    """Products with weights, what limits the parts, and the work of the phase, a line each."""
    products = []
    for name, what, count, seconds in (
        ("GEMV", "one row times a weight matrix", phase.work.gemv, phase.gemv_s),
        ("GEMM", "many rows times one", phase.work.gemm, phase.gemm_s),
    ):
        if count:
            each = _each(phase, count, lambda n: f"{n:,.0f}" if n == int(n) else f"{n:,.1f}")
            share = percent(seconds / phase.seconds)
            products.append((seconds, f"{name} ({what}): {each}, {share} of the time"))
    yield [words for _, words in sorted(products, reverse=True)]
    yield list(_bounds(phase))
    tokens = phase.shown_tokens
    full = unit(phase.work.flops_full / tokens, "FLOP")
    flops = _each(phase, phase.work.flops, lambda n: unit(n, "FLOP"))
    if unit(phase.work.flops / tokens, "FLOP") != full:
        flops += f" (causal), {full} (full square)"
    weights, cache = (unit(n / tokens, "B") for n in (phase.work.weights, phase.work.cache))
    yield [flops, f"reads {weights} of weights, {cache} of cache", *_layer_words(phase)]


def _bounds(phase: PhaseTime) -> Iterator[str]:
    """What limits the parts, by their share of the time, and how near all are to their ceilings."""
    shares = defaultdict[str, float](float)
    for part in phase.totals:
        if part.bound is not None:
            shares[part.bound] += part.share or 0.0
    for at, (bound, share) in enumerate(sorted(shares.items(), key=lambda item: -item[1])):
        of = "" if at else " of the time is bound"
        why = f" ({_WHY[bound]})" if bound in _WHY else ""
        yield f"{percent(share)}{of} by {bound}{why}"
    every = PartTime.total("all", phase.totals)
    if every.of_bound is not None:
        floor = every.of_bound * every.seconds
        reached = percent(floor / phase.seconds)
        yield f"reaches {reached} of the ceilings, which allow {_each(phase, floor, duration)}"


def _layer_words(phase: PhaseTime) -> list[str]:
    """`30 layers, median 1.02 ms, slowest 7 with 1.31 ms`; nothing without layers."""
    times = defaultdict[int, float](float)
    for part in phase.parts:
        if part.layer is not None:
            times[part.layer] += part.seconds / phase.shown_tokens
    if len(times) < 2:
        return []
    slowest = max(times, key=lambda layer: times[layer])
    usual, longest = duration(median(times.values())), duration(times[slowest])
    return [f"{len(times)} layers, median {usual}, slowest {slowest} with {longest}"]


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


def _columns(phase: PhaseTime, whole: bool) -> list[tuple[Column, Words]]:
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

    apart = any(part.host_s != part.seconds for part in phase.totals)
    columns: tuple[tuple[bool, Column, Words], ...] = (
        (True, Column("per token" if decode else phase.name),
         lambda part: milliseconds(part.seconds / tokens, digits)),
        (whole and apart, Column("host ms", drop=4),
         lambda part: milliseconds(part.host_s / tokens, digits)),
        (True, Column("share", drop=1), lambda part: share(part_of(part))),
        (whole, Column("", right=False, drop=10), bar),
        (whole, Column("FLOPs", drop=9),
         lambda part: scaled(part.work.flops / tokens) if part.work.flops else ""),
        (whole, Column("bytes", drop=7),
         lambda part: unit(part.work.bytes / tokens, "B") if part.work.bytes else ""),
        (True, Column("GB/s", drop=5 if decode else 6),
         lambda part: rate(part.work.bytes, part.seconds)),
        (True, Column("GFLOP/s", drop=6 if decode else 5),
         lambda part: rate(part.work.flops, part.seconds)),
        (True, Column("of ceiling", right=False, drop=2), bound),
        (whole, Column("nearest", right=False, drop=11), lambda part: part.nearest or ""),
    )  # fmt: skip
    return [(column, words) for shown, column, words in columns if shown]


def _whole_percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


@dataclass(frozen=True)
class Layers:
    """A row per layer, the slowest first, and a column per part; narrow terminals drop the parts
    that take the least time.
    """

    phase: PhaseTime

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        phase, tokens = self.phase, self.phase.shown_tokens
        digits = digits_for([phase.seconds / tokens])
        times: Times = {(part.layer, part.part): part.seconds for part in phase.parts}
        times |= {("all", part.part): part.seconds for part in phase.totals}
        parts = [part.part for part in phase.totals]
        whole = defaultdict[int | str | None, float](float)
        for (layer, _), seconds in times.items():
            whole[layer] += seconds
        numbers = [at for at in whole if isinstance(at, int)]
        layers = sorted(numbers, key=lambda at: (-whole[at], at))
        unlike = _outliers(times, {at: whole[at] for at in layers}, parts)
        pad = " " if unlike else ""

        def cell(seconds: float | None, mark: str = pad) -> Text:
            if seconds is None:
                return Text()
            style = "bold yellow" if mark.strip() else ""
            return Text(milliseconds(seconds / tokens, digits) + mark, style=style)

        rows = []
        for layer in [*layers, *[None] * (None in whole), "all"]:
            marks = [_MARK if (layer, part) in unlike else pad for part in parts]
            own = [times.get((layer, part)) for part in parts]
            name = _OUTSIDE if layer is None else str(layer)
            rows.append([Text(name), cell(whole[layer]), *map(cell, own, marks)])
        for text in rows[-1]:
            text.stylize(HEADING)
        largest = sorted(phase.totals, key=lambda part: -part.seconds)
        columns = [Column("layer"), Column("all" + pad)]
        columns += [Column(part.part + pad, drop=1 + largest.index(part)) for part in phase.totals]
        table = Rows(columns, rows)
        yield table
        notes = [f"milliseconds{' a token' * (tokens > 1)}; {_OUTSIDE}: in no layer"]
        notes += [f"{_MARK} more than {UNLIKE:g} times the median of the layers"] if unlike else []
        if not table.fit(options.max_width):
            notes.append("the smallest parts are left out: too narrow for all of them")
        yield from (Text(note, style=FAINT) for note in notes)


def _outliers(
    times: Times, layers: Mapping[int, float], parts: Sequence[str]
) -> set[tuple[int | str | None, str]]:
    """The (layer, part) that take much more than that part does in most layers.

    `layers`: seconds of each layer.
    """
    found: set[tuple[int | str | None, str]] = set()
    for part in parts if len(layers) >= 3 else ():
        own = {at: times.get((at, part), 0.0) for at in layers}
        middle = median(own.values())
        least = max(UNLIKE * middle, middle + LEAST * median(layers.values()))
        found |= {(layer, part) for layer, seconds in own.items() if seconds > least}
    return found


def _machine(report: TimingReport, details: bool) -> Iterator[RenderableType]:
    """The ceilings that matter and the peak memory, or all of both; what was beyond a ceiling."""
    ceilings, amount = report.ceilings, unit(report.working_set, "B")
    read = ceilings.read(report.working_set)
    level, at = read.level, unit(read.bytes_per_s, "B/s")
    if details:
        threads = f", {counted(ceilings.threads, 'thread')}" * (ceilings.device == "cpu")
        device = f"{ceilings.device}{threads}"
        yield Line([f"ceilings of this machine ({device})", *ceiling_words(ceilings)])
        where = f"come from memory at {at}"
        if level != MEMORY:
            where = f"fit in {level}: compared with its {at}, not the memory's"
        elif ceilings.caches:
            largest = max(cache.bytes for cache in ceilings.caches)
            where += f": no cache holds them (at most {size(largest)})"
        if not report.several_devices:
            yield Line([f"a step's {amount} {where}"])
    else:
        first, *rest = ceiling_summary(ceilings)
        peak = [] if report.peak is None else [f"peak memory {size(report.peak)}"]
        first = first if level == MEMORY else f"{level} {at}"
        found = {part.bound for phase in report.phases for part in phase.totals}
        why = [f"{bound}: bound by {words}" for bound, words in _WHY.items() if bound in found]
        yield Line([", ".join([f"ceilings: {first}", *rest]), *peak, *why], FAINT)
    if report.several_devices:
        what = "no lower bounds: layers are on several devices"
        yield Line([f"{what}, ceilings and peak memory are of {ceilings.device} alone"], FAINT)
    if words := beyond(
        f"{part.part} ({phase.name})"
        for phase in report.phases
        for part in phase.totals
        if part.of_bound is not None and part.of_bound > SURELY
    ):
        yield Line([words], "yellow")
    if details:
        yield Line(_memory_words(report))


def _memory_words(report: TimingReport) -> list[str]:
    """The most memory held before the model, in each stage and in each phase, and the estimate."""
    what = "resident memory (RSS)" if report.ceilings.device == "cpu" else "memory of the device"
    held = [("base", report.base)]
    held += [("load", stage.peak) for stage in report.stages if stage.peak is not None]
    held += [(phase.name, phase.peak) for phase in report.phases]
    known = [f"{name} {size(nbytes)}" for name, nbytes in held if nbytes is not None]
    if known:
        known[0] = f"peak {what}: {known[0]}"
    estimated, taken = size(report.estimated), (report.peak or 0) - (report.base or 0)
    if report.peak is None or report.base is None or taken <= 0:
        return [*known, f"estimated for the model {estimated}"]
    off = report.estimated / taken - 1
    words = "exactly" if not off else f"{percent(abs(off))} {'more' if off > 0 else 'less'}"
    return [*known, f"the model took {size(taken)}, estimated {estimated} ({words})"]
