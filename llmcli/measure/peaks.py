"""The most memory that is held during something: resident, and on a GPU.

The system keeps one mark for a process, and so does PyTorch for a GPU: each `Peak` sets it back
when it begins. What a mark was before is remembered for the peaks that are open around it and
for `highest_bytes`. Reading and resetting takes microseconds. No torch is imported for a CPU.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.graph.spec import PHASES
from llmcli.limits import system_text
from llmcli.records.text import PhasePeak

if TYPE_CHECKING:
    import torch

_MARK_BACK = "5"  # what `clear_refs` takes to set VmHWM to what is resident now (man 5 proc)
_SLACK = 2**20  # the kernel adds up the pages of each processor only now and then


class Peak:
    """`with Peak(device) as peak: …`, then `peak.nbytes`: the most bytes that were held inside.

    `resident`: of the process, None where the system keeps no mark that can be set back and the
    process held more before. `device`: what PyTorch had allocated on a CUDA device, None on
    others and without one. `nbytes` is the second on a GPU, else the first. They may be nested
    (in one thread); while one is open they are the most so far.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = _gpu(device)
        self._marks: dict[torch.device | None, int | None] = {}
        self._before: int | None = None
        self._resets = False

    def __enter__(self) -> Peak:
        _read(self._gpu)
        self._resets = _set_back()
        self._before = _mark()
        if self._gpu is not None:
            import torch

            torch.cuda.synchronize(self._gpu)
            torch.cuda.reset_peak_memory_stats(self._gpu)
        _OPEN.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _read(self._gpu)
        _OPEN.remove(self)

    @property
    def nbytes(self) -> int | None:
        """Bytes on the GPU where there is one, else resident ones."""
        return self.resident if self._gpu is None else self.device

    @property
    def resident(self) -> int | None:
        """Bytes of the process in memory, files that are mapped and were read included."""
        held = self._held(None)
        if self._resets or held is None or self._before is None:
            return held
        return held if held > self._before else None

    @property
    def device(self) -> int | None:
        """Bytes of tensors on the GPU; what PyTorch keeps for later ones is not in it."""
        return None if self._gpu is None else self._held(self._gpu)

    def _held(self, place: torch.device | None) -> int | None:
        if self in _OPEN:
            _read(self._gpu)
        return self._marks.get(place)


_OPEN: list[Peak] = []
_HIGHEST: dict[torch.device | None, int | None] = {}  # since the process (None) began, and on GPUs


def _read(gpu: torch.device | None) -> None:
    """Reads both marks, for all that are open and before they are set back."""
    marks: dict[torch.device | None, int | None] = {None: _mark()}
    if gpu is not None:
        import torch

        marks[gpu] = int(torch.cuda.max_memory_allocated(gpu))
    for seen in (_HIGHEST, *(peak._marks for peak in _OPEN)):
        for place, mark in marks.items():
            seen[place] = most(seen.get(place), mark)


def _gpu(device: torch.device | None) -> torch.device | None:
    return device if device is not None and device.type == "cuda" else None


class PhaseMemory:
    """The memory peaks of phases, on `gpu` where they compute there.

    `with memory.phase("prefill"): …`, as often as something is read.
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
        """Peaks of the phases that ran, in their order."""
        return tuple(phase_peak(name, self._peaks[name]) for name in PHASES if name in self._peaks)


def phase_peak(phase: str, peaks: list[Peak]) -> PhasePeak:
    """The most of all times that the phase took place; unknown if it is of one of them."""
    resident, device = ([getattr(peak, one) for peak in peaks] for one in ("resident", "device"))
    return PhasePeak(
        phase=phase,
        resident_bytes=None if None in resident else most(*resident),
        device_bytes=None if None in device else most(*device),
    )


def most(*sizes: int | None) -> int | None:
    """The largest of those that are known; None where none is."""
    return max((nbytes for nbytes in sizes if nbytes is not None), default=None)


def highest_bytes(device: torch.device | None = None) -> int | None:
    """The most that the process has held since it began, on a GPU where `device` is one."""
    gpu = _gpu(device)
    _read(gpu)
    return _HIGHEST[gpu]


def resident_bytes() -> int | None:
    """Resident bytes of the process now; None where the system does not report them."""
    return _status("VmRSS")


def _set_back() -> bool:
    """Sets the mark to what is resident now; False where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text(_MARK_BACK)
    except OSError:
        return False
    mark, now = _mark(), resident_bytes()
    return mark is not None and now is not None and mark <= now + _SLACK


def _mark() -> int | None:
    """The most that was resident since the mark was set back, or since the process began."""
    marked = _status("VmHWM")
    if marked is not None:
        return marked
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status(name: str) -> int | None:
    """Bytes of a line of this process's status, which counts in units of 1024."""
    text = system_text(f"/proc/{os.getpid()}/status")
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
