"""The memory that one engine held during a test, phase by phase."""

from __future__ import annotations

import torch

from llmcli.measure.peaks import Peak
from llmcli.measure.stopwatch import phase_peak
from llmcli.reports.text import PhasePeak

PHASES = ("prefill", "decode")


class Held:
    """The peaks of one test, on `gpu` where the engine computes there.

    `with held.phase("prefill"): …`, as often as something is read.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        self._gpu = gpu
        self._peaks: dict[str, list[Peak]] = {}

    def phase(self, name: str) -> Peak:
        """To be held open while that is done; opening it takes microseconds."""
        peak = Peak(self._gpu)
        self._peaks.setdefault(name, []).append(peak)
        return peak

    @property
    def peaks(self) -> tuple[PhasePeak, ...]:
        """Of the phases that took place, in their order."""
        found = [name for name in PHASES if name in self._peaks]
        return tuple(phase_peak(name, self._peaks[name]) for name in found)
