"""A benchmark of several configurations: whatever fails is a row, and the others are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice, takewhile
from time import sleep
from typing import Any

from llmcli.commands.bench.measure import counts
from llmcli.commands.bench.measure.engine import Counted
from llmcli.commands.bench.measure.engines import Engines
from llmcli.commands.bench.measure.run import Slot
from llmcli.commands.bench.report.plan import EngineName, Plan, Test
from llmcli.commands.bench.report.row import Against, BenchReport, BuildInfo, EngineInfo, Row
from llmcli.commands.bench.report.settings import Settings
from llmcli.measure.ratios import paired
from llmcli.measure.runs import in_turns
from llmcli.records.ceilings import Ceilings


def against(ours: Row, theirs: Row, order: Sequence[EngineName]) -> Against:
    """Ours ÷ theirs in tokens per second of each pair of runs, which `order` lists as made."""
    return Against(
        test=ours.test.name,
        peer=theirs.info.engine,
        of_means=ours.avg_ts / theirs.avg_ts,
        order=tuple(order),
        number=ours.number,
        **vars(paired(theirs.samples_ns, ours.samples_ns)),
    )


def sweep(
    plan: Plan,
    engines: Engines,
    build: BuildInfo,
    *,
    on_row: Callable[[Row], None],
    on_status: Callable[[str], None] = lambda words: None,
) -> BenchReport:
    """Every test of every configuration, in that order; each row is handed out when it is there.

    An engine is kept while the configurations differ only in what `start` takes. With a peer both
    engines are loaded and their runs take turns, who begins changing each time; a row of ours
    comes before the peer's of the same test. `on_status` receives what llama-bench prints,
    `benchmark 1/4: prompt run 1/5`.

    Errors that a user can cause, memory that is missing, and any error of a peer make rows of
    their kind. KeyboardInterrupt ends the sweep: the report has the rows that are whole.
    """
    run = _Sweep(plan, engines, build, on_row, on_status)
    interrupted = False
    try:
        for settings in plan.configurations:
            run.configuration(settings)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for slot in run.slots:
            slot.close()
    ceilings = tuple(found for found in run.ceilings.values() if found is not None)
    return BenchReport(
        rows=tuple(run.rows),
        against=tuple(run.against),
        ceilings=ceilings,
        interrupted=interrupted,
    )


class _Sweep:
    """The plan, and its results so far."""

    def __init__(
        self,
        plan: Plan,
        engines: Engines,
        build: BuildInfo,
        on_row: Callable[[Row], None],
        on_status: Callable[[str], None],
    ) -> None:
        self.plan, self.engines, self.build = plan, engines, build
        self.on_row, self.on_status = on_row, on_status
        peer, seed = plan.ours.against, plan.ours.seed
        self.slots = [Slot("llmcli", engines.load, seed, sole=peer is None)]
        if peer is not None:
            self.slots.append(Slot(peer, engines.peer, seed, sole=False))
        self.rows: list[Row] = []
        self.against: list[Against] = []
        self.ceilings: dict[tuple[str, str, str, int], Ceilings | None] = {}
        self.done = 0
        self.total = len(plan.configurations) * len(plan.tests)

    def configuration(self, settings: Settings) -> None:
        """All tests with those settings."""
        tests = self.plan.tests
        second = self.plan.like_for_like and settings.activations == "8"
        if second and not _rounds(self.slots[0]):
            self.total -= len(tests)
            return
        for slot in self.slots:
            if slot.settings is not None and not slot.settings.same_engine(settings):
                slot.close()  # all of them before one is loaded: old and new may not fit
        ours, *others = self.slots
        ours.open(settings)
        for slot in others:
            slot.open(settings, beside=ours)
        for number, test in enumerate(tests):
            if self.plan.runs.delay:
                sleep(self.plan.runs.delay)
            self.done += 1
            self._say("starting")
            began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            order = self._runs(test, _room(tests[number:]))
            self._add_rows(settings, test, began, order)

    def _say(self, what: str, slot: Slot | None = None) -> None:
        """Names the engine where there are two: `prompt run 1/5 (transformers)`."""
        if slot is not None and len(self.slots) > 1:
            what += f" ({slot.name})"
        self.on_status(f"benchmark {self.done}/{self.total}: {what}")

    def _runs(self, test: Test, room: int) -> list[EngineName]:
        """Warm-ups, then the repetitions of all engines in turns: the order they were made in."""
        order: list[EngineName] = []
        repetitions = self.plan.runs.repetitions
        for slot in self.slots:
            warmup = not self.plan.runs.no_warmup or slot.meta  # so that shapes are computed
            slot.prepare(test, room, warmup=warmup, on_status=partial(self._say, slot=slot))

        def once(slot: Slot) -> None:
            if not slot.meta:
                slot.repeat(test, repetitions, partial(self._say, slot=slot))
                order.append(slot.name)

        for _ in islice(in_turns(*(partial(once, slot) for slot in self.slots)), repetitions):
            pass
        return order

    def _add_rows(
        self, settings: Settings, test: Test, began: str, order: list[EngineName]
    ) -> None:
        """The rows of a test, ours first, and how they compare."""
        first = len(self.rows) + 1
        rows = [
            self._row(slot, number, settings, test, began)
            for number, slot in enumerate(self.slots, start=first)
        ]
        if len(rows) == 2 and all(row.runs for row in rows):
            pair = against(rows[0], rows[1], order)
            self.against.append(pair)
            rows[0] = replace(
                rows[0],
                against_ratio=pair.median,
                against_ratios=pair.ratios,
                against_order=pair.order,
            )
        self.rows += rows
        for row in rows:
            self.on_row(row)

    def _row(self, slot: Slot, number: int, settings: Settings, test: Test, began: str) -> Row:
        engine, more = slot.engine, dict[str, Any](meta=slot.meta)
        if slot.failed is not None:
            more |= {"error": slot.failed, "hint": slot.hint}
        if engine is None:
            info = self._known(slot, settings)
        else:
            info = engine.info if slot.sole else engine.info.without_memory()
        if slot.failed is None and slot.sole and not slot.meta:
            load = () if info.load_peak is None else (info.load_peak,)
            more |= {"peak_memory_bytes": slot.peak, "peaks": load + slot.memory.peaks}
        if slot.failed is None and isinstance(engine, Counted):
            more |= self._counted(engine, settings, test)
        runs = slot.runs if slot.failed is None else ()
        return Row.of(number, settings, test, info, self.build, began, runs, **more)

    def _known(self, slot: Slot, settings: Settings) -> EngineInfo:
        """What the headers say of a model that the engine of this slot did not load."""
        found = self.engines.known(settings)
        if found is None:
            return EngineInfo.unknown(slot.name, settings)
        if slot.name == found.engine:
            return found
        return replace(found, engine=slot.name, engine_version="")

    def _counted(self, engine: Counted, settings: Settings, test: Test) -> dict[str, Any]:
        """What is known from the configuration; on the device `meta` it is all there is."""
        config, numbers, reads = engine.config, engine.numbers, engine.reads
        found: dict[str, Any] = {"work": counts.work(config, numbers, test, settings, reads)}
        if engine.info.device == "meta":
            need = counts.memory_bytes(config, numbers, test, settings)
            found["estimated_memory_bytes"] = need
        key = (engine.info.device, numbers.dtype, numbers.products, settings.n_threads)
        if key not in self.ceilings:
            working_set = counts.working_set(config, numbers, self.plan.longest)
            self.ceilings[key] = self.engines.ceilings(engine, working_set)
        if (ceilings := self.ceilings[key]) is not None:
            found["roofline_ns"] = counts.roofline_ns(
                config, numbers, test, settings, ceilings, reads
            )
        return found


def _rounds(slot: Slot) -> bool:
    """Whether activations are rounded for products with the weights of its model."""
    return isinstance(slot.engine, Counted) and slot.engine.numbers.rounds_inputs


def _room(tests: Sequence[Test]) -> int:
    """What the first test needs, and those after it that begin with the same depth."""
    depth = tests[0].n_depth
    alike = takewhile(lambda test: depth and test.n_depth == depth, tests[1:])
    return max(test.capacity for test in (tests[0], *alike))
