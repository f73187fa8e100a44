"""An engine slot of a sweep: what is loaded in it, or why nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from llmcli.commands.bench.measure.engine import Engine
from llmcli.commands.bench.measure.run import Bench, Run
from llmcli.commands.bench.report.results import BenchRow, EngineName, Settings
from llmcli.errors import LlmcliError, as_lacking, as_out_of_memory, first_line
from llmcli.measure.held import Held
from llmcli.measure.peaks import Peak

Failure = tuple[int, str, str]  # exit code, kind, one line


def failure(error: Exception) -> Failure:
    """Of any exception: ours as they are, memory that is not there as OutOfMemory.

    Anything else is a bug here or in a peer: exit 1, the exception named.
    """
    known = error if isinstance(error, LlmcliError) else as_out_of_memory(error)
    known = known or as_lacking(error)
    if known is None:
        words = f"internal error: {type(error).__name__}: {first_line(error)}"
        return LlmcliError.code, LlmcliError.kind, words
    return known.code, known.kind, known.message


def hint_for(error: Exception) -> str | None:
    """What can be done about it, where that is known."""
    if isinstance(error, LlmcliError):
        return error.hint
    hint = "use a smaller model or shorter tests (`-p`, `-d`, `-ub`); `llmcli info` says what fits"
    known = as_out_of_memory(error, hint=hint) or as_lacking(error)
    return None if known is None else known.hint


Load = Callable[[Settings], Engine]


@dataclass
class EngineSlot:
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

    def open(self, settings: Settings, seed: int, *, beside: EngineSlot | None = None) -> None:
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
        return self.engine is not None and self.engine.info.device == "meta"

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
        info = self.engine.info
        row = replace(row, info=info, engine=info.engine, meta=self.meta)
        if not self.alone:
            row = replace(row, info=replace(info, base_bytes=None, load_peak=None))
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
        load = () if info.load_peak is None else (info.load_peak,)
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
    device = engine.info.device
    return torch.device(device) if device.startswith("cuda") else None
