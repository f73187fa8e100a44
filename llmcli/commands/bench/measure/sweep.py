"""A benchmark of several configurations: whatever fails is a row, and the others are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from time import sleep

from llmcli.commands.bench.measure import counts, plan
from llmcli.commands.bench.measure.engine import Counted
from llmcli.commands.bench.measure.lane import Lane, Load
from llmcli.commands.bench.measure.ratios import against
from llmcli.commands.bench.measure.run import Bench, Run
from llmcli.commands.bench.report.results import (
    BenchReport,
    BenchRow,
    EngineName,
    Ran,
    Settings,
    Test,
)
from llmcli.reports.ceilings import Ceilings


def sweep(
    configurations: Sequence[Settings],
    tests: Sequence[Test],
    *,
    repetitions: int,
    warmup: bool,
    delay_s: float,
    seed: int,
    load: Load,
    peer: Load | None = None,
    peer_name: EngineName = "transformers",
    ceilings: Callable[[Counted, int], Ceilings | None],
    on_row: Callable[[BenchRow], None],
    on_progress: Callable[[str], None] | None = None,
    known: Callable[[Settings], Ran | None] = lambda settings: None,
) -> BenchReport:
    """Every test of every configuration, in that order; each row is handed out when it is there.

    An engine is kept while the configurations differ in what it is told at `start` only. With a
    `peer` both engines are loaded and their runs take turns, who begins changing each time; a
    row of ours comes before the peer's of the same test. `ceilings(engine, working set)` is asked
    once for every device, arithmetic and number of threads, with the engine loaded and the bytes
    that the last step of the longest test reads. `known(settings)` is what the headers say of a
    model that was not loaded. `delay_s` passes before each test. `on_progress` hears what
    llama-bench says, `benchmark 1/4: prompt run 1/5`.

    Errors that a user can cause, memory that is not there, and whatever a peer raises make rows
    of their kind. KeyboardInterrupt ends the sweep: the report has the rows that are whole.
    """
    lanes = [Lane(name="llmcli", load=load, alone=peer is None)]
    if peer is not None:
        lanes.append(Lane(name=peer_name, load=peer, alone=False))
    run = _Sweep(
        repetitions=repetitions,
        warmup=warmup,
        delay_s=delay_s,
        seed=seed,
        lanes=lanes,
        ceilings=ceilings,
        on_row=on_row,
        on_progress=on_progress,
        known=known,
        longest=max(tests, key=plan.needed, default=None),
        total=len(configurations) * len(tests),
    )
    try:
        for settings in configurations:
            run.configuration(settings, tests)
    except KeyboardInterrupt:
        run.report = replace(run.report, interrupted=True)
    finally:
        run.close()
    return run.report


@dataclass
class _Sweep:
    """What is the same for all tests, and what has come of them so far."""

    repetitions: int
    warmup: bool
    delay_s: float
    seed: int
    lanes: list[Lane]
    ceilings: Callable[[Counted, int], Ceilings | None]
    on_row: Callable[[BenchRow], None]
    on_progress: Callable[[str], None] | None
    known: Callable[[Settings], Ran | None]
    longest: Test | None
    total: int
    report: BenchReport = field(default_factory=lambda: BenchReport(rows=()))
    done: int = 0
    asked: dict[tuple[str, str, str, int], Ceilings | None] = field(default_factory=dict)

    def close(self) -> None:
        """Gives the engines back."""
        for lane in self.lanes:
            lane.close()

    def configuration(self, settings: Settings, tests: Sequence[Test]) -> None:
        """All tests with those settings."""
        for lane in self.lanes:
            if lane.settings is not None and not plan.same_engine(lane.settings, settings):
                lane.close()  # all of them before one is loaded: old and new may not fit
        ours, *others = self.lanes
        ours.open(settings, self.seed)
        for lane in others:
            lane.open(settings, self.seed, beside=ours)
        for number, test in enumerate(tests):
            if self.delay_s:
                sleep(self.delay_s)
            self.done += 1
            self._say("starting")
            began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            order = self._runs(test, _room(tests[number:]))
            self._tell(settings, test, began, order)

    def _say(self, what: str) -> None:
        if self.on_progress is not None:
            self.on_progress(f"benchmark {self.done}/{self.total}: {what}")

    def _said(self, bench: Bench) -> Callable[[str], None]:
        """Which engine it is, where there are two: `prompt run 1/5 (transformers)`."""
        if len(self.lanes) == 1:
            return self._say
        return lambda what: self._say(f"{what} ({bench.engine.ran.engine})")

    def _runs(self, test: Test, room: int) -> list[EngineName]:
        """Warm-ups, then the repetitions of all engines in turns: the order they were made in."""
        order: list[EngineName] = []
        for lane in self.lanes:
            lane.begin()
            warmup = self.warmup or lane.meta  # so that the shapes are really computed

            def prepare(bench: Bench, warmup: bool = warmup) -> None:
                bench.prepare(test, room, warmup=warmup, said=self._said(bench))

            lane.attempt(prepare)
        for number in range(self.repetitions):

            def repeat(bench: Bench, number: int = number) -> Run:
                return bench.repeat(test, number, self.repetitions, self._said(bench))

            for lane in self.lanes[:: 1 if number % 2 == 0 else -1]:
                if not lane.meta:
                    lane.attempt(repeat)
                    order.append(lane.name)
        return order

    def _tell(self, settings: Settings, test: Test, began: str, order: list[EngineName]) -> None:
        """The rows of a test, ours first, and how they compare."""
        rows = [self._row(lane, settings, test, began) for lane in self.lanes]
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

    def _row(self, lane: Lane, settings: Settings, test: Test, began: str) -> BenchRow:
        row = BenchRow(
            number=0,
            settings=settings,
            test=test,
            engine=lane.name,
            test_time=began,
            error=lane.failed,
            hint=lane.hint if lane.failed is not None else None,
        )
        engine = lane.engine
        if engine is None:
            return replace(row, ran=self._known(lane))
        row = lane.measured(row)
        if lane.failed is not None or not isinstance(engine, Counted):
            return row
        return self._counted(row, engine)

    def _known(self, lane: Lane) -> Ran | None:
        """What the headers say of a model that this engine did not load, whichever it is."""
        assert lane.settings is not None
        found = self.known(lane.settings)
        if found is None or lane.name == found.engine:
            return found
        return replace(found, engine=lane.name, version="")

    def _counted(self, row: BenchRow, engine: Counted) -> BenchRow:
        """With what is known from the configuration; on the device `meta` it is all there is."""
        config, numbers, device = engine.config, engine.numbers, engine.ran.device
        settings, test = row.settings, row.test
        row = replace(row, work=counts.work(config, numbers, test, settings))
        if row.meta:
            need = counts.memory_bytes(config, numbers, test, settings)
            row = replace(row, estimated_memory_bytes=need)
        key = (device, numbers.dtype, numbers.products, settings.n_threads)
        if key not in self.asked:
            assert self.longest is not None
            reads = counts.working_set(config, numbers, self.longest)
            self.asked[key] = found = self.ceilings(engine, reads)
            if found is not None:
                self.report = replace(self.report, ceilings=(*self.report.ceilings, found))
        ceilings = self.asked[key]
        if ceilings is None:
            return row
        least = counts.roofline_ns(config, numbers, test, settings, ceilings)
        return replace(row, roofline_ns=least)


def _room(tests: Sequence[Test]) -> int:
    """What the first test needs, and those after it that begin with the same depth."""
    depth = tests[0].depth
    alike = takewhile(lambda test: depth and test.depth == depth, tests[1:])
    return max(plan.needed(test) for test in (tests[0], *alike))
