"""One engine through one test: warm-up, depth, and runs whose every token is timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter_ns

import torch

from llmcli.commands.bench.measure.engine import Engine
from llmcli.commands.bench.report.plan import EngineName, Test
from llmcli.commands.bench.report.row import Run
from llmcli.commands.bench.report.settings import Settings
from llmcli.errors import (
    LlmcliError,
    OutOfMemory,
    UsageError,
    as_lacking,
    as_out_of_memory,
    first_line,
)
from llmcli.measure.peaks import Peak, PhaseMemory, most
from llmcli.measure.runs import gc_disabled

Status = Callable[[str], None]
Failure = tuple[int, str, str]  # exit code, kind, one line
_HINT = "use a smaller model or shorter tests (`-p`, `-d`, `-ub`); `llmcli info` says what fits"


def failure(error: Exception) -> tuple[Failure, str | None]:
    """An exception as a row has it, and what can be done about it.

    Memory that is missing is OutOfMemory. Anything that is not ours is a bug here or in a peer:
    exit 1, the exception named.
    """
    known = error if isinstance(error, LlmcliError) else None
    known = known or as_out_of_memory(error, hint=_HINT) or as_lacking(error)
    if known is None:
        words = f"internal error: {type(error).__name__}: {first_line(error)}"
        return (LlmcliError.code, LlmcliError.kind, words), None
    return (known.code, known.kind, known.message), known.hint


def random_ids(seed: int, what: str, tokens: int, vocab: int, bos: int | None) -> list[int]:
    """Random ids, the same for every engine: with BOS in front where there is one.

    `what` names the run, so that no two runs read the same text.
    """
    draw = random.Random(f"{seed} {what}")
    found = [draw.randrange(vocab) for _ in range(tokens)]
    if bos is not None and found:
        found[0] = bos
    return found


class Slot:
    """A place for one engine of a sweep: what is loaded in it, or why nothing is (`failed`).

    Has the runs and the peak of the test at hand, and keeps a depth that was read once. What it
    reads is drawn from `seed` and the name of the run. `sole`: no other engine is in this
    process, whose memory would be in every peak.
    """

    def __init__(
        self, name: EngineName, load: Callable[[Settings], Engine], seed: int, *, sole: bool
    ) -> None:
        self.name = name
        self.sole = sole
        self.engine: Engine | None = None
        self.settings: Settings | None = None
        self.failed: Failure | None = None
        self.hint: str | None = None
        self.runs: list[Run] = []
        self.peak: int | None = None
        self.memory = PhaseMemory()
        self._load = load
        self._seed = seed
        self._room = 0
        self._filled = 0  # the depth that is at the beginning of the memory

    def open(self, settings: Settings, *, beside: Slot | None = None) -> None:
        """Loads the engine for those settings, unless the one that is there serves them too.

        Where the one `beside` was not loaded there is nothing to compare with: this fails alike.
        """
        if self.settings is None:
            self.failed = self.hint = None
            if beside is not None and beside.engine is None:
                self.failed, self.hint = beside.failed, beside.hint
            else:
                try:
                    self.engine = self._load(settings)
                except Exception as error:
                    self.failed, self.hint = failure(error)
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

    def prepare(self, test: Test, room: int, *, warmup: bool, on_status: Status) -> None:
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
                if warmup:
                    self._warm_up(self.engine, test, on_status)

    def repeat(self, test: Test, of: int, on_status: Status) -> None:
        """The next of so many repetitions, in an empty memory or one with the depth in it."""
        if self.engine is not None and self.failed is None:
            with self._attempt():
                self.runs.append(self._run(self.engine, test, of, on_status))

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Keeps the peak of what is done inside, or the failure."""
        with Peak(self._gpu) as peak:
            try:
                yield
            except Exception as error:
                self.failed, self.hint = failure(error)
                self._room = self._filled = 0  # the next test begins with a new memory
                return
        self.peak = most(self.peak, peak.nbytes)

    @property
    def _gpu(self) -> torch.device | None:
        """The GPU whose memory counts, None where it is the process's."""
        device = "" if self.engine is None else self.engine.info.device
        return torch.device(device) if device.startswith("cuda") else None

    def _make_room(self, engine: Engine, test: Test, room: int) -> None:
        if test.n_depth and self._filled == test.n_depth and self._room >= test.capacity:
            return
        try:
            self._start(engine, room)
        except (OutOfMemory, UsageError):
            if room == test.capacity:
                raise
            self._start(engine, test.capacity)

    def _start(self, engine: Engine, room: int) -> None:
        assert self.settings is not None
        self._room = self._filled = 0
        engine.start(room, self.settings.n_threads, self.settings.chunk)
        self._room = room

    def _warm_up(self, engine: Engine, test: Test, on_status: Status) -> None:
        """Behind the depth: what is there need not be read again."""
        keep = self._filled
        with engine.computing():
            engine.rewind(keep)
            if test.n_prompt:
                on_status("warmup prompt run")
                self._read(engine, "warm-up", test.n_prompt)
                engine.rewind(keep)
            if test.n_gen:
                on_status("warmup generation run")
                with self.memory.phase("decode"):
                    engine.step(self._ids("warm-up", 1)[0])
                engine.rewind(keep)

    def _run(self, engine: Engine, test: Test, of: int, on_status: Status) -> Run:
        number = len(self.runs)  # after a failure none is run
        counted = f"{number + 1}/{of}"
        with engine.computing():
            if test.n_depth:
                cached = self._filled == test.n_depth
                on_status(f"depth run {counted}" + (" (cached)" if cached else ""))
                if not cached:
                    engine.rewind(0)
                    self._filled = 0
                    self._read(engine, "depth", test.n_depth)
                    self._filled = test.n_depth
            engine.rewind(test.n_depth)
            on_status(f"{'prompt' if test.n_prompt else 'generation'} run {counted}")
            prompt = self._batches(f"{test.name} {number}", test.n_prompt)
            written = self._ids(f"{test.name} {number} after", test.n_gen)
            with gc_disabled():
                return self._timed(engine, prompt, written)

    def _timed(self, engine: Engine, prompt: list[list[int]], written: list[int]) -> Run:
        read, step = engine.read, engine.step
        first, marks = None, [0]
        if prompt:
            with self.memory.phase("prefill"):
                begin = perf_counter_ns()
                for batch in prompt:
                    read(batch)
                first = perf_counter_ns() - begin
        if written:  # reading the marks of the memory is in neither time
            with self.memory.phase("decode"):
                marks = [perf_counter_ns()]
                for id in written:
                    step(id)
                    marks.append(perf_counter_ns())
        return Run(
            total=(first or 0) + marks[-1] - marks[0],
            first=first,
            tokens=tuple(after - before for before, after in pairwise(marks)),
        )

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
        return random_ids(self._seed, what, tokens, self.engine.vocab, self.engine.bos)
