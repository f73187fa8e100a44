"""A benchmark of several configurations: whatever fails is a row, and the others are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice, takewhile
from time import sleep
from typing import Any

from llmcli.commands.bench.measure.counts import Counted
from llmcli.commands.bench.measure.engines import Engines
from llmcli.commands.bench.measure.run import Slot
from llmcli.commands.bench.report.plan import EngineName, Plan, Test
from llmcli.commands.bench.report.row import Against, BenchReport, BuildInfo, EngineInfo, Row
from llmcli.commands.bench.report.settings import Settings
from llmcli.measure.ratios import paired
from llmcli.measure.runs import in_turns
from llmcli.records.ceilings import Ceilings


class Sweep:
    """Every test of every configuration, in that order; each row is handed out when it is there.

    An engine is kept while the configurations differ only in what `start` takes. With a peer both
    engines are loaded and their runs take turns, who begins changing each time; a row of ours
    comes before the peer's of the same test. `on_status` receives what llama-bench prints,
    `benchmark 1/4: prompt run 1/5`.
    """

    def __init__(
        self,
        plan: Plan,
        engines: Engines,
        build: BuildInfo,
        *,
        on_row: Callable[[Row], None],
        on_status: Callable[[str], None],
    ) -> None:
        self._plan, self._engines, self._build = plan, engines, build
        self._on_row, self._on_status = on_row, on_status
        peer, seed = plan.ours.against, plan.ours.seed
        self._slots = [Slot("llmcli", engines.load, seed, sole=peer is None)]
        if peer is not None:
            self._slots.append(Slot(peer, engines.peer, seed, sole=False))
        self._rows: list[Row] = []
        self._against: list[Against] = []
        self._ceilings: dict[tuple[str, str, str, int], Ceilings | None] = {}
        self._done = 0
        self._total = len(plan.configurations) * len(plan.tests)

    def run(self) -> BenchReport:
        """The rows that are whole when it ends.

        Errors that a user can cause, memory that is missing, and any error of a peer make rows of
        their kind. KeyboardInterrupt ends the sweep.
        """
        interrupted = False
        try:
            for settings in self._plan.configurations:
                self._measure(settings)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for slot in self._slots:
                slot.close()
        return BenchReport(
            rows=tuple(self._rows),
            against=tuple(self._against),
            ceilings=tuple(found for found in self._ceilings.values() if found is not None),
            interrupted=interrupted,
        )

    def _measure(self, settings: Settings) -> None:
        """All tests with those settings."""
        tests, (ours, *others) = self._plan.tests, self._slots
        if self._plan.like_for_like and settings.activations == "8":
            counted = None if ours.engine is None else ours.engine.counted
            if counted is None or not counted.numbers.rounds_inputs:
                self._total -= len(tests)
                return
        for slot in self._slots:
            if slot.settings is not None and not slot.settings.same_engine(settings):
                slot.close()  # all of them before one is loaded: old and new may not fit
        ours.open(settings)
        for slot in others:
            slot.open(settings, beside=ours)
        for number, test in enumerate(tests):
            if self._plan.runs.delay:
                sleep(self._plan.runs.delay)
            self._done += 1
            self._say("starting")
            began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            order = self._run(test, _room(tests[number:]))
            self._add_rows(settings, test, began, order)

    def _say(self, what: str, slot: Slot | None = None) -> None:
        """Names the engine where there are two: `prompt run 1/5 (transformers)`."""
        if slot is not None and len(self._slots) > 1:
            what += f" ({slot.name})"
        self._on_status(f"benchmark {self._done}/{self._total}: {what}")

    def _run(self, test: Test, room: int) -> tuple[EngineName, ...]:
        """Warm-ups, then the repetitions of all engines in turns: the order they were made in."""
        order: list[EngineName] = []
        repetitions = self._plan.runs.repetitions
        for slot in self._slots:
            warmup = not self._plan.runs.no_warmup or slot.meta  # so that shapes are computed
            slot.prepare(test, room, warmup=warmup, on_status=partial(self._say, slot=slot))

        def once(slot: Slot) -> None:
            if not slot.meta:
                slot.repeat(test, repetitions, partial(self._say, slot=slot))
                order.append(slot.name)

        for _ in islice(in_turns(*(partial(once, slot) for slot in self._slots)), repetitions):
            pass
        return tuple(order)

    def _add_rows(
        self, settings: Settings, test: Test, began: str, order: tuple[EngineName, ...]
    ) -> None:
        """The rows of a test, ours first, and how they compare."""
        rows = [
            self._row(slot, number, settings, test, began)
            for number, slot in enumerate(self._slots, start=len(self._rows) + 1)
        ]
        if len(rows) == 2 and all(row.runs for row in rows):
            ours, theirs = rows
            pair = Against(
                test=test.name,
                peer=theirs.info.engine,
                of_means=ours.avg_ts / theirs.avg_ts,
                order=order,
                number=ours.number,
                **vars(paired(theirs.samples_ns, ours.samples_ns)),
            )
            self._against.append(pair)
            rows[0] = replace(
                ours, against_ratio=pair.median, against_ratios=pair.ratios, against_order=order
            )
        self._rows += rows
        for row in rows:
            self._on_row(row)

    def _row(self, slot: Slot, number: int, settings: Settings, test: Test, began: str) -> Row:
        engine, more = slot.engine, dict[str, Any](meta=slot.meta)
        if engine is not None:
            info = engine.info if slot.sole else engine.info.without_memory()
        else:
            info = self._engines.known(settings) or EngineInfo.unknown(slot.name, settings)
            if info.engine != slot.name:
                info = replace(info, engine=slot.name, engine_version="")
        if slot.failed is not None:
            more |= {"error": slot.failed, "hint": slot.hint}
            return Row.of(number, settings, test, info, self._build, began, **more)
        if slot.sole and not slot.meta:
            load = () if info.load_peak is None else (info.load_peak,)
            more |= {"peak_memory_bytes": slot.peak, "peaks": load + slot.memory.peaks}
        if engine is not None and engine.counted is not None:
            more |= self._work(engine.counted, info.device, settings, test)
        return Row.of(number, settings, test, info, self._build, began, slot.runs, **more)

    def _work(
        self, counted: Counted, device: str, settings: Settings, test: Test
    ) -> dict[str, Any]:
        """What is known from the configuration; on the device `meta` it is all there is."""
        found: dict[str, Any] = {"work": counted.work(test, settings)}
        if device == "meta":
            found["estimated_memory_bytes"] = counted.memory_bytes(test, settings)
        numbers = counted.numbers
        key = (device, numbers.dtype, numbers.products, settings.n_threads)
        if key not in self._ceilings:
            working_set = counted.working_set(self._plan.longest)
            self._ceilings[key] = self._engines.ceilings(device, numbers, working_set)
        if (ceilings := self._ceilings[key]) is not None:
            found["roofline_ns"] = counted.roofline_ns(test, settings, ceilings)
        return found


def _room(tests: Sequence[Test]) -> int:
    """What the first test needs, and those after it that begin with the same depth."""
    depth = tests[0].n_depth
    alike = takewhile(lambda test: depth and test.n_depth == depth, tests[1:])
    return max(test.capacity for test in (tests[0], *alike))
