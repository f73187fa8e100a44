"""A benchmark of several configurations: whatever fails is a row, and the others are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from time import sleep
from typing import Protocol

from llmcli.commands.bench.measure import counts
from llmcli.commands.bench.measure.engine import Counted, Engine
from llmcli.commands.bench.measure.run import Bench, Run
from llmcli.commands.bench.measure.slot import EngineSlot
from llmcli.commands.bench.report.results import (
    Against,
    BenchReport,
    BenchRequest,
    BenchRow,
    EngineInfo,
    EngineName,
    Settings,
    Test,
)
from llmcli.measure.ratios import paired
from llmcli.records.ceilings import Ceilings


def against(ours: BenchRow, theirs: BenchRow, order: Sequence[EngineName]) -> Against:
    """Ours ÷ theirs in tokens per second of each pair of runs, which `order` lists as made."""
    ratios = paired(theirs.samples_ns, ours.samples_ns)
    return Against(
        test=ours.test,
        peer=theirs.engine,
        ratios=ratios.values,
        median=ratios.median,
        lowest=ratios.lowest,
        highest=ratios.highest,
        quartiles=ratios.quartiles,
        of_means=ours.avg_ts / theirs.avg_ts,
        order=tuple(order),
        number=ours.number,
    )


class Supplies(Protocol):
    """What a sweep needs from outside: engines, ceilings, and what headers say."""

    def load(self, settings: Settings) -> Engine:
        """This program's engine for those settings."""

    def peer(self, settings: Settings) -> Engine:
        """The peer's, with the same weights; called only where `BenchRequest.against` is given."""

    def ceilings(self, engine: Counted, working_set: int) -> Ceilings | None:
        """Of the machine, for an engine that is loaded and the bytes that a step of the longest
        test reads; called once for every device, arithmetic and number of threads.
        """

    def known(self, settings: Settings) -> EngineInfo | None:
        """What the headers say of a model that was not loaded."""


def sweep(
    request: BenchRequest,
    supplies: Supplies,
    *,
    on_row: Callable[[BenchRow], None],
    on_progress: Callable[[str], None] | None = None,
) -> BenchReport:
    """Every test of every configuration, in that order; each row is handed out when it is there.

    An engine is kept while the configurations differ in what `start` takes only. With a peer both
    engines are loaded and their runs take turns, who begins changing each time; a row of ours
    comes before the peer's of the same test. `on_progress` hears what llama-bench says,
    `benchmark 1/4: prompt run 1/5`.

    Errors that a user can cause, memory that is not there, and whatever a peer raises make rows
    of their kind. KeyboardInterrupt ends the sweep: the report has the rows that are whole.
    """
    alone = request.against is None
    slots = [EngineSlot(name="llmcli", load=supplies.load, alone=alone)]
    if request.against is not None:
        slots.append(EngineSlot(name=request.against, load=supplies.peer, alone=False))
    run = _Sweep(request, supplies, slots, on_row, on_progress)
    try:
        for settings in request.configurations:
            run.configuration(settings)
    except KeyboardInterrupt:
        run.report = replace(run.report, interrupted=True)
    finally:
        run.close()
    return run.report


@dataclass
class _Sweep:
    """The request, and what has come of it so far."""

    request: BenchRequest
    supplies: Supplies
    slots: list[EngineSlot]
    on_row: Callable[[BenchRow], None]
    on_progress: Callable[[str], None] | None
    report: BenchReport = field(default_factory=lambda: BenchReport(rows=()))
    done: int = 0
    left_out: int = 0
    measured: dict[tuple[str, str, str, int], Ceilings | None] = field(default_factory=dict)

    def close(self) -> None:
        """Gives the engines back."""
        for slot in self.slots:
            slot.close()

    def configuration(self, settings: Settings) -> None:
        """All tests with those settings."""
        tests = self.request.tests
        second = self.request.like_for_like and settings.activations == "8"
        if second and not _rounds(self.slots[0]):
            self.left_out += len(tests)
            return
        for slot in self.slots:
            if slot.settings is not None and not slot.settings.same_engine(settings):
                slot.close()  # all of them before one is loaded: old and new may not fit
        ours, *others = self.slots
        ours.open(settings, self.request.seed)
        for slot in others:
            slot.open(settings, self.request.seed, beside=ours)
        for number, test in enumerate(tests):
            if self.request.delay_s:
                sleep(self.request.delay_s)
            self.done += 1
            self._say("starting")
            began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            order = self._runs(test, _room(tests[number:]))
            self._add_rows(settings, test, began, order)

    def _say(self, what: str) -> None:
        if self.on_progress is not None:
            total = len(self.request.configurations) * len(self.request.tests) - self.left_out
            self.on_progress(f"benchmark {self.done}/{total}: {what}")

    def _said(self, bench: Bench) -> Callable[[str], None]:
        """Which engine it is, where there are two: `prompt run 1/5 (transformers)`."""
        if len(self.slots) == 1:
            return self._say
        return lambda what: self._say(f"{what} ({bench.engine.info.engine})")

    def _runs(self, test: Test, room: int) -> list[EngineName]:
        """Warm-ups, then the repetitions of all engines in turns: the order they were made in."""
        order: list[EngineName] = []
        for slot in self.slots:
            slot.begin()
            warmup = self.request.warmup or slot.meta  # so that the shapes are really computed

            def prepare(bench: Bench, warmup: bool = warmup) -> None:
                bench.prepare(test, room, warmup=warmup, said=self._said(bench))

            slot.attempt(prepare)
        for number in range(self.request.repetitions):

            def repeat(bench: Bench, number: int = number) -> Run:
                return bench.repeat(test, number, self.request.repetitions, self._said(bench))

            for slot in self.slots[:: 1 if number % 2 == 0 else -1]:
                if not slot.meta:
                    slot.attempt(repeat)
                    order.append(slot.name)
        return order

    def _add_rows(
        self, settings: Settings, test: Test, began: str, order: list[EngineName]
    ) -> None:
        """The rows of a test, ours first, and how they compare."""
        rows = [self._row(slot, settings, test, began) for slot in self.slots]
        rows = [
            replace(row, number=len(self.report.rows) + place)
            for place, row in enumerate(rows, start=1)
        ]
        pairs = self.report.against
        if len(rows) == 2 and all(row.samples_ns for row in rows):
            pair = against(rows[0], rows[1], order)
            rows[0], pairs = replace(rows[0], against=pair), (*pairs, pair)
        self.report = replace(self.report, rows=self.report.rows + tuple(rows), against=pairs)
        for row in rows:
            self.on_row(row)

    def _row(self, slot: EngineSlot, settings: Settings, test: Test, began: str) -> BenchRow:
        row = BenchRow(
            number=0,
            settings=settings,
            test=test,
            engine=slot.name,
            test_time=began,
            error=slot.failed,
            hint=slot.hint if slot.failed is not None else None,
        )
        engine = slot.engine
        if engine is None:
            return replace(row, info=self._known(slot))
        row = slot.measured(row)
        if slot.failed is not None or not isinstance(engine, Counted):
            return row
        return self._counted(row, engine)

    def _known(self, slot: EngineSlot) -> EngineInfo | None:
        """What the headers say of a model that the engine of this slot did not load."""
        assert slot.settings is not None
        found = self.supplies.known(slot.settings)
        if found is None or slot.name == found.engine:
            return found
        return replace(found, engine=slot.name, version="")

    def _counted(self, row: BenchRow, engine: Counted) -> BenchRow:
        """With what is known from the configuration; on the device `meta` it is all there is."""
        config, numbers, device = engine.config, engine.numbers, engine.info.device
        settings, test = row.settings, row.test
        row = replace(row, work=counts.work(config, numbers, test, settings, engine.reads))
        if row.meta:
            need = counts.memory_bytes(config, numbers, test, settings)
            row = replace(row, estimated_memory_bytes=need)
        key = (device, numbers.dtype, numbers.products, settings.n_threads)
        if key not in self.measured:
            reads = counts.working_set(config, numbers, self.request.longest)
            self.measured[key] = found = self.supplies.ceilings(engine, reads)
            if found is not None:
                self.report = replace(self.report, ceilings=(*self.report.ceilings, found))
        ceilings = self.measured[key]
        if ceilings is None:
            return row
        bound = counts.roofline_ns(config, numbers, test, settings, ceilings, engine.reads)
        return replace(row, roofline_ns=bound)


def _rounds(slot: EngineSlot) -> bool:
    """Whether activations are rounded for products with the weights of its model."""
    return isinstance(slot.engine, Counted) and slot.engine.numbers.rounds_inputs


def _room(tests: Sequence[Test]) -> int:
    """What the first test needs, and those after it that begin with the same depth."""
    depth = tests[0].depth
    alike = takewhile(lambda test: depth and test.depth == depth, tests[1:])
    return max(test.capacity for test in (tests[0], *alike))
