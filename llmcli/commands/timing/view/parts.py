"""The table of a phase's parts: time, share, work, rates, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from llmcli.commands.timing.report import PartTime, PhaseTime
from llmcli.records.work import PartWork
from llmcli.ui.layout import Column, Rows
from llmcli.ui.rates import digits_for, milliseconds, percent, rate, scaled, unit
from llmcli.ui.theme import HEADING, NUMBER

BAR = 20  # columns of a bar for all of the time
FEW = 7  # parts that are shown beside those of another phase, and all that take
MUCH = 0.05  # of its time
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
            columns.append(Column("host ms", drop=4))
        return [
            *columns,
            Column("share", drop=1),
            Column("", right=False, drop=10),
            Column("FLOPs", drop=9),
            Column("bytes", drop=7),
            Column("GB/s", drop=bytes_go),
            Column("GFLOP/s", drop=flops_go),
            Column("bound by", right=False, drop=3),
            Column("of ceiling", drop=2),
            Column("nearest", right=False, drop=11),
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


@dataclass(frozen=True)
class BothPhases:
    """All phases side by side: milliseconds, share of the time, and what a part is bound by with
    the share of that ceiling. The `FEW` largest parts and all that take `MUCH` of a phase; the
    others are one row.
    """

    phases: Sequence[PhaseTime]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [Column("ms by part", right=False)]
        for phase in self.phases:
            columns.append(Column("per token" if phase.name == "decode" else phase.name))
            columns.append(Column("share", drop=1))
            columns.append(Column("GB/s", drop=3))
            columns.append(Column("GFLOP/s", drop=4))
            columns.append(Column("bound by", right=False, drop=2))
        shown, others = self._split()
        rows = [[Text(name), *self._cells([name])] for name in shown]
        if others:
            rows.append([Text(f"{len(others)} others"), *self._cells(others)])
        rows.append([Text("all"), *self._cells([*shown, *others])])
        for cell in rows[-1]:
            cell.stylize(HEADING)
        yield Rows(columns, rows)

    def _split(self) -> tuple[list[str], list[str]]:
        """The parts with the largest share of a phase, in their order, and the others."""
        shares: dict[str, float] = {}
        for phase in self.phases:
            for part in phase.totals:
                share = part.seconds / phase.seconds if phase.seconds else 0.0
                shares[part.part] = max(shares.get(part.part, 0.0), share)
        longest = max((phase.totals for phase in self.phases), key=len)
        order = list(dict.fromkeys([*(part.part for part in longest), *shares]))
        largest = sorted(order, key=lambda name: -shares[name])
        kept = [one for at, one in enumerate(largest) if at < FEW or shares[one] >= MUCH]
        if len(kept) + 1 == len(order):  # one other is a row of its own
            kept = order
        return [one for one in order if one in kept], [one for one in order if one not in kept]

    def _cells(self, names: Sequence[str]) -> Iterator[Text]:
        """Those of each phase for the sum of some parts; empty where it has none of them."""
        for phase in self.phases:
            own = [part for part in phase.totals if part.part in names]
            if not own:
                yield from (Text() for _ in range(5))
                continue
            seconds = sum(part.seconds for part in own)
            work = sum((part.work for part in own), PartWork())
            tokens = phase.tokens if phase.name == "decode" else 1
            digits = min(2, digits_for([phase.seconds / tokens]))
            yield Text(milliseconds(seconds / tokens, digits))
            yield Text(_whole_percent(seconds / phase.seconds if phase.seconds else 0.0))
            yield Text(rate(work.bytes, seconds))
            yield Text(rate(work.flops, seconds))
            yield self._bound(own, seconds)

    def _bound(self, parts: Sequence[PartTime], seconds: float) -> Text:
        """`memory 51 %` of one part; of several the share of their ceilings alone."""
        reached = [part.seconds * part.of_bound for part in parts if part.of_bound is not None]
        if not reached or not seconds:
            return Text()
        share = _whole_percent(sum(reached) / seconds)
        if len(parts) > 1:
            return Text(share)
        bound = parts[0].bound or ""
        return Text(f"{bound} {share}", style=_BOUND.get(bound, _CACHE))


def _whole_percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


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
