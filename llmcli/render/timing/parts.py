"""The table of a phase's parts: time, share, work, rates, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from llmcli.render.layout import Column, Rows
from llmcli.render.numbers import scaled
from llmcli.render.theme import HEADING, NUMBER
from llmcli.render.timing.numbers import digits_for, milliseconds, percent, rate, unit
from llmcli.reports.timing import PartTime, PhaseTime
from llmcli.reports.work import PartWork

BAR = 20  # columns of a bar for all of the time
CALLS, KERNEL = "calls", "kernel"  # the bounds of what is near no ceiling
_BOUND = {"memory": "cyan", "compute": "green", CALLS: "yellow", KERNEL: "magenta"}
_CACHE = "blue"  # a bound that is the name of a cache


@dataclass(frozen=True)
class PartsTable:
    """The parts over all layers, the gaps, and their sum. Of decode everything is of a token."""

    phase: PhaseTime

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = "#" if options.ascii_only else "█"
        rows = [self._row(part, bar) for part in self.phase.totals]
        yield Rows(self._columns(), [*rows, self._sum()])

    @property
    def _decode(self) -> bool:
        return self.phase.name == "decode"

    @property
    def _host(self) -> bool:
        """Whether the device's time is another than the host's."""
        return any(part.host_s != part.seconds for part in self.phase.totals)

    def _columns(self) -> list[Column]:
        """What is missed least is the first to go: what a phase is not about goes earlier."""
        bytes_go, flops_go = (5, 6) if self._decode else (6, 5)
        columns = [Column("part", right=False)]
        columns.append(Column("ms a token" if self._decode else "ms"))
        if self._host:
            columns.append(Column("host ms", first_to_go=4))
        return [
            *columns,
            Column("share", first_to_go=1),
            Column("", right=False, first_to_go=10),
            Column("FLOPs", first_to_go=9),
            Column("bytes", first_to_go=7),
            Column("GB/s", first_to_go=bytes_go),
            Column("GFLOP/s", first_to_go=flops_go),
            Column("bound by", right=False, first_to_go=3),
            Column("of ceiling", first_to_go=2),
            Column("nearest", right=False, first_to_go=11),
        ]

    def _row(self, part: PartTime, bar: str) -> list[Text]:
        share = part.seconds / self.phase.seconds if self.phase.seconds else 0.0
        length = round(share * BAR)
        bound = part.bound or ""
        return [
            Text(part.part),
            *self._times(part.seconds, part.host_s),
            Text(percent(share)),
            Text(bar * length, style=NUMBER),
            *self._work(part.work, part.seconds),
            Text(bound, style=_BOUND.get(bound, _CACHE) if bound else ""),
            Text("" if part.of_bound is None else percent(part.of_bound)),
            Text(part.nearest or ""),
        ]

    def _sum(self) -> list[Text]:
        """All of the phase; how much of its ceilings it reaches, part by part."""
        phase = self.phase
        floor = floor_s(phase)
        cells = [
            Text("all"),
            *self._times(phase.seconds, sum(part.host_s for part in phase.totals)),
            Text("100 %"),
            Text(),
            *self._work(phase.work, phase.seconds),
            Text(),
            Text("" if floor is None else percent(floor / phase.seconds)),
            Text(),
        ]
        for cell in cells:
            cell.stylize(HEADING)
        return cells

    def _times(self, seconds: float, host_s: float) -> Iterator[Text]:
        tokens = self.phase.tokens if self._decode else 1
        digits = digits_for([self.phase.seconds / tokens])
        yield Text(milliseconds(seconds / tokens, digits))
        if self._host:
            yield Text(milliseconds(host_s / tokens, digits))

    def _work(self, work: PartWork, seconds: float) -> Iterator[Text]:
        tokens = self.phase.tokens if self._decode else 1
        yield Text(scaled(work.flops / tokens) if work.flops else "")
        yield Text(unit(work.bytes / tokens, "B") if work.bytes else "")
        yield Text(rate(work.bytes, seconds))
        yield Text(rate(work.flops, seconds))


def floor_s(phase: PhaseTime) -> float | None:
    """The seconds that all parts would take at their ceilings; None where none is known."""
    known = [part for part in phase.totals if part.of_bound is not None]
    return sum(part.seconds * (part.of_bound or 0.0) for part in known) if known else None


def shares_by_bound(phase: PhaseTime) -> list[tuple[str, float, Sequence[str]]]:
    """(bound, share of the phase's time, its parts), the largest share first."""
    found: dict[str, list[PartTime]] = {}
    for part in phase.totals:
        if part.bound is not None:
            found.setdefault(part.bound, []).append(part)
    shares = [
        (bound, sum(part.seconds for part in parts) / phase.seconds, [part.part for part in parts])
        for bound, parts in found.items()
    ]
    return sorted(shares, key=lambda item: -item[1])
