"""One engine's place in a sweep: what is loaded in it, or why nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from llmcli.commands.bench.measure.engine import Engine
from llmcli.commands.bench.measure.failure import Failure, failure, hint_for
from llmcli.commands.bench.measure.run import Bench, Run
from llmcli.commands.bench.report.results import BenchRow, EngineName, Settings
from llmcli.observe.held import Held
from llmcli.observe.peaks import Peak

Load = Callable[[Settings], Engine]


@dataclass
class Lane:
    """An engine with its settings, or `failed`; the runs and the peak of the test at hand.

    `alone`: no other engine is in this process, whose memory would be in every peak.
    """

    name: EngineName
    load: Load
    alone: bool = True
    settings: Settings | None = None
    engine: Engine | None = None
    bench: Bench | None = None
    failed: Failure | None = None
    hint: str | None = None
    runs: list[Run] = field(default_factory=list)
    peak: int | None = None

    def open(self, settings: Settings, seed: int, *, beside: Lane | None = None) -> None:
        """The engine for those settings: the one that is there where it serves them too.

        Where the one `beside` was not loaded there is nothing to compare with: this fails alike.
        """
        if self.settings is None:
            self.failed, self.hint = None, None
            if beside is not None and beside.engine is None:
                self.failed, self.hint = beside.failed, beside.hint
            else:
                self._load(settings)
        self.settings = settings
        if self.engine is not None:
            self.bench = Bench(self.engine, settings, seed)

    def _load(self, settings: Settings) -> None:
        try:
            self.engine = self.load(settings)
        except Exception as error:
            self.failed, self.hint = failure(error), hint_for(error)

    def close(self) -> None:
        """Gives the engine back."""
        engine, self.engine, self.bench, self.settings = self.engine, None, None, None
        if engine is not None:
            engine.close()

    @property
    def meta(self) -> bool:
        """Whether there are only shapes: nothing to time."""
        return self.engine is not None and self.engine.ran.device == "meta"

    def begin(self) -> None:
        """Another test: nothing of the one before is left."""
        self.runs, self.peak = [], None
        if self.bench is not None:
            self.failed = None
            self.bench.held = Held(_gpu(self.bench.engine))

    def measured(self, row: BenchRow) -> BenchRow:
        """The row with what the engine says of itself, the runs, and the memory if it is known."""
        if self.engine is None:
            return row
        ran = self.engine.ran
        row = replace(row, ran=ran, engine=ran.engine, meta=self.meta)
        if not self.alone:
            row = replace(row, ran=replace(ran, base_bytes=None, load_peak=None))
        if self.failed is not None or self.bench is None:
            return row
        row = replace(
            row,
            samples_ns=tuple(run.total for run in self.runs),
            first_ns=tuple(run.first for run in self.runs if run.first is not None),
            token_ns=tuple(ns for run in self.runs for ns in run.tokens),
        )
        if self.meta or not self.alone:
            return row
        load = () if ran.load_peak is None else (ran.load_peak,)
        return replace(row, peak_memory_bytes=self.peak, peaks=load + self.bench.held.peaks)

    def attempt(self, action: Callable[[Bench], Run | None]) -> None:
        """Does it unless something has failed, and keeps the run, the peak, or the failure."""
        if self.bench is None or self.failed is not None:
            return
        with Peak(_gpu(self.bench.engine)) as peak:
            try:
                run = action(self.bench)
            except Exception as error:
                self.failed, self.hint = failure(error), hint_for(error)
                self.bench.forget()
                return
        self.runs += [run] if run is not None else []
        self.peak = max((n for n in (self.peak, peak.nbytes) if n is not None), default=None)


def _gpu(engine: Engine) -> torch.device | None:
    """The GPU whose memory counts, None where it is the process's."""
    device = engine.ran.device
    return torch.device(device) if device.startswith("cuda") else None
