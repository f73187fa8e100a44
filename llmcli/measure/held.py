"""The memory that was held while something ran, phase by phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.measure.peaks import Peak
from llmcli.records.text import PhasePeak

if TYPE_CHECKING:
    import torch

PHASES = ("prefill", "decode")


class Held:
    """The peaks of its phases, on `gpu` where it computes there.

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


def phase_peak(phase: str, peaks: list[Peak]) -> PhasePeak:
    """The most of all times that the phase took place; unknown if it is of one of them."""
    return PhasePeak(
        phase=phase,
        resident_bytes=_most([peak.resident for peak in peaks]),
        device_bytes=_most([peak.device for peak in peaks]),
    )


def _most(sizes: list[int | None]) -> int | None:
    known = [nbytes for nbytes in sizes if nbytes is not None]
    return max(known) if len(known) == len(sizes) else None
