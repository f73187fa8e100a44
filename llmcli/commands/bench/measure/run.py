"""One engine through one test: warm-up, depth, and runs whose every token is timed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns

from llmcli.commands.bench.measure.engine import Engine
from llmcli.commands.bench.report.results import Settings, Test
from llmcli.errors import OutOfMemory, UsageError
from llmcli.measure.held import Held
from llmcli.measure.quiet import quiet

Said = Callable[[str], None]


def random_ids(seed: int, what: str, tokens: int, vocab: int, bos: int | None) -> list[int]:
    """Random ids, the same for every engine: with BOS in front where there is one.

    `what` names the run, so that no two runs read the same text.
    """
    draw = random.Random(f"{seed} {what}")
    found = [draw.randrange(vocab) for _ in range(tokens)]
    if bos is not None and found:
        found[0] = bos
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """Nanoseconds of one repetition, `total` of reading and writing together.

    `first` until the prompt's last logits are there, None without a prompt; `tokens` of each
    generated one.
    """

    total: int
    first: int | None
    tokens: tuple[int, ...]


class Bench:
    """An engine with the settings of one configuration; keeps a depth that was read once.

    What it reads is drawn from `seed` and the name of the run. `held`: the memory that the test
    at hand takes.
    """

    def __init__(self, engine: Engine, settings: Settings, seed: int) -> None:
        self.engine = engine
        self.held = Held()
        self._settings = settings
        self._seed = seed
        self._room = 0
        self._filled = 0  # depth that lies at the beginning of the memory

    def prepare(self, test: Test, room: int, *, warmup: bool, said: Said) -> None:
        """A memory for the test, and a warm-up run: its prompt, and one token if it writes some.

        `room` is what the following tests of the same depth need, too: with it the depth is
        read once for all of them. Where so much does not fit, the machine or the positions that
        the model has learned, the test has its own.
        """
        if not (test.depth and self._filled == test.depth and self._room >= test.capacity):
            try:
                self._start(room)
            except (OutOfMemory, UsageError):
                if room == test.capacity:
                    raise
                self._start(test.capacity)
        if not warmup:
            return
        with self.engine.computing():
            self._warm_up(test, said)

    def _warm_up(self, test: Test, said: Said) -> None:
        keep = self._filled  # the warm-up goes behind it: what is there need not be read again
        self.engine.rewind(keep)
        if test.n_prompt:
            said("warmup prompt run")
            self._read(self._ids("warm-up", test.n_prompt))
            self.engine.rewind(keep)
        if test.n_gen:
            said("warmup generation run")
            with self.held.phase("decode"):
                self.engine.step(self._ids("warm-up", 1)[0])
            self.engine.rewind(keep)

    def repeat(self, test: Test, number: int, of: int, said: Said) -> Run:
        """Repetition `number` (from 0) on an empty memory, or one with the depth in it."""
        with self.engine.computing():
            return self._repeat(test, number, f"{number + 1}/{of}", said)

    def _repeat(self, test: Test, number: int, counted: str, said: Said) -> Run:
        if test.depth:
            cached = self._filled == test.depth
            said(f"depth run {counted}" + (" (cached)" if cached else ""))
            if not cached:
                self.engine.rewind(0)
                self._filled = 0
                self._read(self._ids("depth", test.depth))
                self._filled = test.depth
        self.engine.rewind(test.depth)
        said(f"{'prompt' if test.n_prompt else 'generation'} run {counted}")
        prompt = self._ids(f"{test.name} {number}", test.n_prompt)
        written = self._ids(f"{test.name} {number} after", test.n_gen)
        with quiet():
            return self._timed(self._split(prompt), written)

    def forget(self) -> None:
        """After an error nothing is known of the memory: the next test begins with a new one."""
        self._room = self._filled = 0

    def _timed(self, prompt: list[list[int]], written: list[int]) -> Run:
        read, step = self.engine.read, self.engine.step
        first, marks = None, [0]
        if prompt:
            with self.held.phase("prefill"):
                begin = perf_counter_ns()
                for piece in prompt:
                    read(piece)
                first = perf_counter_ns() - begin
        if written:  # reading the marks of the memory is in neither time
            with self.held.phase("decode"):
                marks = [perf_counter_ns()]
                for id in written:
                    step(id)
                    marks.append(perf_counter_ns())
        return Run(
            total=(first or 0) + marks[-1] - marks[0],
            first=first,
            tokens=tuple(after - before for before, after in pairwise(marks)),
        )

    def _start(self, room: int) -> None:
        self.forget()
        self.engine.start(room, self._settings.n_threads, self._settings.chunk)
        self._room = room

    def _read(self, ids: list[int]) -> None:
        with self.held.phase("prefill"):
            for piece in self._split(ids):
                self.engine.read(piece)

    def _split(self, ids: list[int]) -> list[list[int]]:
        found, done = [], 0
        for size in self._settings.pieces(len(ids)):
            found.append(ids[done : done + size])
            done += size
        return found

    def _ids(self, what: str, tokens: int) -> list[int]:
        return random_ids(self._seed, what, tokens, self.engine.vocab, self.engine.bos)
