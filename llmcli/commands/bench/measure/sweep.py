"""A benchmark of several configurations: one that fails is a row, and the others are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from time import sleep
from typing import Any

import torch

from llmcli.commands.bench.measure.loader import EngineLoader
from llmcli.commands.bench.report.comparison import Against
from llmcli.commands.bench.report.plan import Plan
from llmcli.commands.bench.report.row import BenchReport, BuildInfo, Row
from llmcli.commands.bench.report.settings import Settings
from llmcli.errors import LlmcliError, OutOfMemory, UsageError, as_out_of_memory, first_line
from llmcli.measure.engines import Engine, WorkCounter, random_ids, timed_run
from llmcli.measure.machine import CpuContention
from llmcli.measure.peaks import Peak, PhaseMemory, most
from llmcli.measure.runs import in_turns, paired
from llmcli.records.engines import BACKENDS, EngineInfo, EngineName, SpeedTest, TimedRun
from llmcli.records.machine import Ceilings
from llmcli.shell.exits import as_system_error

OnStatus = Callable[[str], None]
_HINT = "use a smaller model or shorter tests (`-p`, `-d`, `-ub`); `llmcli info` says what fits"


def failure(error: Exception) -> LlmcliError:
    """An exception as a row has it.

    Memory that is missing is OutOfMemory. Anything that is not ours is a bug here or in a peer:
    exit 1, the exception named.
    """
    known = error if isinstance(error, LlmcliError) else as_out_of_memory(error, hint=_HINT)
    words = f"internal error: {type(error).__name__}: {first_line(error)}"
    found = known or as_system_error(error) or LlmcliError(words)
    found.__traceback__ = found.__cause__ = found.__context__ = None  # their frames hold tensors
    return found


class Slot:
    """One engine of a sweep: the loaded `engine`, or the error in its place, `failed`.

    Holds the runs and the peak of the current test, and keeps a depth that was read once. Its
    tokens are drawn from the plan's seed and the name of the run. `on_status` receives what it is
    about to run.
    """

    def __init__(
        self, name: EngineName, load: Callable[[Settings], Engine], plan: Plan, on_status: OnStatus
    ) -> None:
        self.name = name
        self.engine: Engine | None = None
        self.settings: Settings | None = None
        self.failed: LlmcliError | None = None
        self.runs: list[TimedRun] = []
        self.peak: int | None = None
        self.memory = PhaseMemory()
        self._load = load
        self._plan = plan
        self._on_status = on_status
        self._room = 0
        self._filled = 0  # the depth that is at the beginning of the memory

    def open(self, settings: Settings, *, beside: Slot | None = None) -> None:
        """Loads the engine for these settings, unless the current one serves them too.

        Fails with the error of the slot `beside` if that has no engine to compare with.
        """
        if self.settings is None:
            self.failed = None
            if beside is not None and beside.engine is None:
                self.failed = beside.failed
            else:
                try:
                    self.engine = self._load(settings)
                except Exception as error:
                    self.failed = failure(error)
        self.settings = settings
        self._room = self._filled = 0

    def close(self) -> None:
        """Gives the engine back."""
        engine, self.engine, self.settings = self.engine, None, None
        if engine is not None:
            engine.close()

    @property
    def meta(self) -> bool:
        """Whether there are only shapes: nothing to time."""
        return self.engine is not None and self.engine.info.device == "meta"

    def prepare(self, test: SpeedTest, room: int) -> None:
        """Begins another test, in a memory with `room` for it and those after it at its depth.

        A depth is read once for all of them. Where so much does not fit the machine, or the
        positions that the model has learned, the test has its own memory.
        """
        self.runs, self.peak = [], None
        if self.engine is not None:
            self.failed = None
            self.memory = PhaseMemory(self._gpu)
            with self._attempt():
                self._make_room(self.engine, test, room)
                if not self._plan.runs.no_warmup or self.meta:  # so that shapes are computed
                    self._warm_up(self.engine, test)

    def repeat(self, test: SpeedTest) -> None:
        """The next repetition, in an empty memory or one with the depth in it."""
        engine = self.engine
        if engine is None or self.failed is not None or self.meta:
            return
        number = len(self.runs)  # after a failure none is run
        counted = f"{number + 1}/{self._plan.runs.repetitions}"
        with self._attempt(), engine.computing():
            if test.n_depth:
                cached = self._filled == test.n_depth
                self._on_status(f"depth run {counted}" + (" (cached)" if cached else ""))
                if not cached:
                    engine.rewind(0)
                    self._filled = 0
                    self._read(engine, "depth", test.n_depth)
                    self._filled = test.n_depth
            engine.rewind(test.n_depth)
            self._on_status(f"{'prompt' if test.n_prompt else 'generation'} run {counted}")
            prompt = self._batches(f"{test.name} {number}", test.n_prompt)
            written = self._ids(f"{test.name} {number} after", test.n_gen)
            self.runs.append(timed_run(engine, prompt, written, self.memory))

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Keeps the peak of what is done inside, or the failure."""
        with Peak(self._gpu) as peak:
            try:
                yield
            except Exception as error:
                self.failed = failure(error)
                self._room = self._filled = 0  # the next test begins with a new memory
                return
        self.peak = most(self.peak, peak.nbytes)

    @property
    def _gpu(self) -> torch.device | None:
        """The GPU whose memory counts, None where it is the process's."""
        device = "" if self.engine is None else self.engine.info.device
        return torch.device(device.partition(",")[0]) if device.startswith("cuda") else None

    def _make_room(self, engine: Engine, test: SpeedTest, room: int) -> None:
        assert self.settings is not None
        if test.n_depth and self._filled == test.n_depth and self._room >= test.capacity:
            return
        self._room = self._filled = 0
        try:
            engine.start(room, self.settings.n_threads, self.settings.chunk)
        except (OutOfMemory, UsageError):
            if room == test.capacity:
                raise
            room = test.capacity
            engine.start(room, self.settings.n_threads, self.settings.chunk)
        self._room = room

    def _warm_up(self, engine: Engine, test: SpeedTest) -> None:
        """Runs behind the depth that is in the memory, so that it need not be read again."""
        keep = self._filled
        with engine.computing():
            engine.rewind(keep)
            if test.n_prompt:
                self._on_status("warmup prompt run")
                self._read(engine, "warm-up", test.n_prompt)
                engine.rewind(keep)
            if test.n_gen:
                self._on_status("warmup generation run")
                with self.memory.phase("decode"):
                    engine.step(self._ids("warm-up", 1)[0])
                engine.rewind(keep)

    def _read(self, engine: Engine, what: str, tokens: int) -> None:
        with self.memory.phase("prefill"):
            for batch in self._batches(what, tokens):
                engine.read(batch)

    def _batches(self, what: str, tokens: int) -> list[list[int]]:
        """A prompt in batches of `n_batch`; the engine reads each in calls of `chunk`."""
        assert self.settings is not None
        ids, size = self._ids(what, tokens), self.settings.n_batch
        return [ids[start : start + size] for start in range(0, tokens, size)]

    def _ids(self, what: str, tokens: int) -> list[int]:
        assert self.engine is not None
        return random_ids(self._plan.ours.seed, what, tokens, self.engine.vocab, self.engine.bos)


class Sweep:
    """Every test of every configuration, in that order; each row is handed out once complete.

    An engine is kept while the configurations differ only in what `start` takes. With a peer both
    engines are loaded and their runs take turns, who begins changing each time; a row of ours
    comes before the peer's of the same test. `on_status` receives what llama-bench prints,
    `benchmark 1/4: prompt run 1/5`.
    """

    def __init__(
        self,
        plan: Plan,
        loader: EngineLoader,
        build: BuildInfo,
        *,
        on_row: Callable[[Row], None],
        on_status: OnStatus,
    ) -> None:
        self._plan, self._loader, self._build = plan, loader, build
        self._on_row, self._on_status = on_row, on_status
        loads: dict[EngineName, Callable[[Settings], Engine]] = {"llmcli": loader.load}
        if plan.ours.against is not None:
            loads[plan.ours.against] = loader.peer
        self._slots = [
            Slot(name, load, plan, partial(self._say, name=name)) for name, load in loads.items()
        ]
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
        contention, interrupted = CpuContention(), False
        try:
            for settings in self._plan.configurations:
                self._measure(settings)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for slot in self._slots:
                slot.close()
        # the most threads that computed on the CPU
        threads = max((row.n_threads for row in self._rows if row.device == "cpu"), default=1)
        return BenchReport(
            models=tuple(self._loader.models.values()),
            rows=tuple(self._rows),
            against=tuple(self._against),
            ceilings=tuple(found for found in self._ceilings.values() if found is not None),
            machine_load=contention.load(threads),
            checks=tuple(self._loader.checks.values()),
            interrupted=interrupted,
        )

    def _measure(self, settings: Settings) -> None:
        """All tests with those settings."""
        tests, (ours, *others) = self._plan.tests, self._slots
        if self._plan.like_for_like and settings.activations == "8":
            counter = None if ours.engine is None else ours.engine.counter
            if counter is None or not counter.precision.rounds_inputs:
                self._total -= len(tests)
                return
        for slot in self._slots:
            held = slot.settings and replace(  # but for what `Engine.start` takes
                slot.settings, n_ubatch=settings.n_ubatch, n_threads=settings.n_threads
            )
            if held is not None and held != settings:
                slot.close()  # all of them before one is loaded: old and new may not fit
        ours.open(settings)
        for slot in others:
            slot.open(settings, beside=ours)
        for number, test in enumerate(tests):
            if self._plan.runs.delay:
                sleep(self._plan.runs.delay)
            self._done += 1
            self._say("starting")
            self._test(settings, test, _room(tests[number:]))

    def _say(self, what: str, name: str = "") -> None:
        """Names the engine where there are two: `prompt run 1/5 (transformers)`."""
        if name and len(self._slots) > 1:
            what += f" ({name})"
        self._on_status(f"benchmark {self._done}/{self._total}: {what}")

    def _test(self, settings: Settings, test: SpeedTest, room: int) -> None:
        """Warm-ups and the repetitions of all engines in turns; the rows, and how they compare."""
        began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        order: list[EngineName] = []
        for slot in self._slots:
            slot.prepare(test, room)

        def once(slot: Slot) -> None:
            slot.repeat(test)
            order.append(slot.name)

        turns = in_turns(*(partial(once, slot) for slot in self._slots))
        for _ in range(self._plan.runs.repetitions):
            next(turns)
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
                order=tuple(order),
                number=ours.number,
                **vars(paired(theirs.samples_ns, ours.samples_ns)),
            )
            self._against.append(pair)
            rows[0] = replace(
                ours,
                against_ratio=pair.median,
                against_ratios=pair.ratios,
                against_order=pair.order,
            )
        self._rows += rows
        for row in rows:
            self._on_row(row)

    def _row(self, slot: Slot, number: int, settings: Settings, test: SpeedTest, began: str) -> Row:
        engine, more = slot.engine, dict[str, Any](meta=slot.meta)
        sole = len(self._slots) == 1  # else the other's memory would be in every peak
        if engine is not None:
            info = engine.info if sole else engine.info.without_memory()
        else:
            # of a model whose headers cannot be read either: what was requested
            info = self._loader.known(settings) or EngineInfo(
                engine=slot.name,
                model_type=settings.model,
                device=settings.device,
                dtype=settings.dtype,
                type_k=settings.type_k,
                backends=BACKENDS.get(settings.device.partition(":")[0], "CPU"),
            )
            if info.engine != slot.name:
                info = replace(info, engine=slot.name, engine_version="")
        runs = slot.runs
        if slot.failed is not None:
            runs, more = [], more | {"error": slot.failed}
        else:
            if sole and not slot.meta:
                load = () if info.load_peak is None else (info.load_peak,)
                more |= {"peak_memory_bytes": slot.peak, "peaks": load + slot.memory.peaks}
            if engine is not None and engine.counter is not None:
                more |= self._work(engine.counter, info.device, settings, test)
        return Row.of(number, settings, test, info, self._build, began, runs, **more)

    def _work(
        self, counter: WorkCounter, device: str, settings: Settings, test: SpeedTest
    ) -> dict[str, Any]:
        """What is known from the configuration; on the device `meta` it is all there is."""
        batch, chunk = settings.n_batch, settings.chunk
        found: dict[str, Any] = {"work": counter.work(test, batch, chunk)}
        if device == "meta":
            found["estimated_memory_bytes"] = counter.memory_bytes(test, chunk)
        precision = counter.precision
        key = (device, precision.dtype, precision.products, settings.n_threads)
        if key not in self._ceilings:
            working_set = counter.working_set(self._plan.longest)
            self._ceilings[key] = self._loader.ceilings(device, precision, working_set)
        if (ceilings := self._ceilings[key]) is not None:
            found["roofline_ns"] = counter.roofline_ns(test, batch, chunk, ceilings)
        return found


def _room(tests: Sequence[SpeedTest]) -> int:
    """What the first test needs, and those after it that begin with the same depth."""
    depth = tests[0].n_depth
    alike = takewhile(lambda test: depth and test.n_depth == depth, tests[1:])
    return max(test.capacity for test in (tests[0], *alike))
