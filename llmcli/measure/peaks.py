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
    from types import TracebackType

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
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._resident: int | None = None
        self._device: int | None = None
        self._before: int | None = None
        self._resets = False

    def __enter__(self) -> Peak:
        _MARKS.read(self._gpu)
        self._resets = _set_back()
        self._before = _mark()
        if self._gpu is not None:
            import torch

            torch.cuda.synchronize(self._gpu)
            torch.cuda.reset_peak_memory_stats(self._gpu)
        _MARKS.open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _MARKS.read(self._gpu)
        _MARKS.open.remove(self)

    @property
    def nbytes(self) -> int | None:
        """Bytes on the GPU where there is one, else resident ones."""
        return self.resident if self._gpu is None else self.device

    @property
    def resident(self) -> int | None:
        """Bytes of the process in memory, files that are mapped and were read included."""
        self._update()
        if self._resets or self._resident is None or self._before is None:
            return self._resident
        return self._resident if self._resident > self._before else None

    @property
    def device(self) -> int | None:
        """Bytes of tensors on the GPU; what PyTorch keeps for later ones is not in it."""
        self._update()
        return self._device

    def _update(self) -> None:
        if self in _MARKS.open:
            _MARKS.read(self._gpu)

    def hold(self, resident: int | None, device: int | None, gpu: torch.device | None) -> None:
        """The marks as they were read; the device's counts if it is the same one."""
        self._resident = most(self._resident, resident)
        if self._gpu is not None and self._gpu == gpu:
            self._device = most(self._device, device)


class _Marks:
    """The marks as they were before they were reset."""

    def __init__(self) -> None:
        self.open: list[Peak] = []
        self.resident: int | None = None
        self.devices: dict[torch.device, int] = {}

    def read(self, gpu: torch.device | None) -> None:
        """Reads both marks, and hands them to all that are open."""
        resident, device = _mark(), None
        self.resident = most(self.resident, resident)
        if gpu is not None:
            import torch

            device = int(torch.cuda.max_memory_allocated(gpu))
            self.devices[gpu] = max(device, self.devices.get(gpu, 0))
        for peak in self.open:
            peak.hold(resident, device, gpu)


_MARKS = _Marks()


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
        found = [name for name in PHASES if name in self._peaks]
        return tuple(phase_peak(name, self._peaks[name]) for name in found)


def phase_peak(phase: str, peaks: list[Peak]) -> PhasePeak:
    """The most of all times that the phase took place; unknown if it is of one of them."""

    def known(sizes: list[int | None]) -> int | None:
        return None if None in sizes else most(*sizes)

    return PhasePeak(
        phase=phase,
        resident_bytes=known([peak.resident for peak in peaks]),
        device_bytes=known([peak.device for peak in peaks]),
    )


def most(*sizes: int | None) -> int | None:
    """The largest of those that are known; None where none is."""
    return max((nbytes for nbytes in sizes if nbytes is not None), default=None)


def highest_bytes(device: torch.device | None = None) -> int | None:
    """The most that the process has held since it began, on a GPU where `device` is one."""
    gpu = device if device is not None and device.type == "cuda" else None
    _MARKS.read(gpu)
    return _MARKS.resident if gpu is None else _MARKS.devices[gpu]


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
