"""One engine's place in a sweep: what is loaded in it, or why nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llmcli.measure.bench.engine import Engine
from llmcli.measure.bench.failure import Failure, failure
from llmcli.measure.bench.run import Bench, Run
from llmcli.measure.peaks import Peak
from llmcli.reports.bench import EngineName, Settings

Load = Callable[[Settings], Engine]


@dataclass
class Lane:
    """An engine with its settings, or `failed`; the runs and the peak of the test at hand."""

    name: EngineName
    load: Load
    settings: Settings | None = None
    engine: Engine | None = None
    bench: Bench | None = None
    failed: Failure | None = None
    runs: list[Run] = field(default_factory=list)
    peak: int | None = None

    def open(self, settings: Settings, seed: int) -> None:
        """The engine for those settings: the one that is there where it serves them too."""
        if self.settings is None:
            self.failed = None
            try:
                self.engine = self.load(settings)
            except Exception as error:
                self.failed = failure(error)
        self.settings = settings
        if self.engine is not None:
            self.bench = Bench(self.engine, settings, seed)

    def close(self) -> None:
        """Gives the engine back."""
        engine, self.engine, self.bench, self.settings = self.engine, None, None, None
        if engine is not None:
            engine.close()

    @property
    def meta(self) -> bool:
        """Whether there are only shapes: nothing to time."""
        return self.engine is not None and self.engine.ran.device == "meta"

    def attempt(self, action: Callable[[Bench], Run | None]) -> None:
        """Does it unless something has failed, and keeps the run, the peak, or the failure."""
        if self.bench is None or self.failed is not None:
            return
        with Peak(_gpu(self.bench.engine)) as peak:
            try:
                run = action(self.bench)
            except Exception as error:
                self.failed = failure(error)
                self.bench.forget()
                return
        self.runs += [run] if run is not None else []
        self.peak = max((n for n in (self.peak, peak.nbytes) if n is not None), default=None)


def _gpu(engine: Engine) -> torch.device | None:
    """The GPU whose memory counts, None where it is the process's."""
    device = engine.ran.device
    return torch.device(device) if device.startswith("cuda") else None
