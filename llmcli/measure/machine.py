"""The machine that a result depends on: its software, its memory, and what other programs take.

torch is never imported here: importing it takes longer than everything here, and a driver context
on a GPU takes memory itself. What only it knows is filled in where it already is imported;
`devices` answers the same questions where torch is at hand.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import which
from time import perf_counter
from typing import Any

import llmcli
from llmcli import processor
from llmcli.kernels import native
from llmcli.limits import free_memory, memory_limit, processor_numbers, processors, system_text
from llmcli.records.info import Device
from llmcli.records.machine import Environment, MachineLoad

_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap")
_SECONDS = 3  # a driver in trouble answers after minutes, or never
_MIB = 2**20


def environment(*, kernels: tuple[str, ...] = ()) -> Environment:
    """The environment header. `kernels`: names of those that computed the result.

    Raises UsageError where $LLMCLI_KERNELS or $LLMCLI_TRITON names what is not to be had.
    """
    torch: Any = sys.modules.get("torch")
    loaded = torch is not None and hasattr(torch, "get_num_threads")
    gpus, driver, cuda = _nvidia_files(), _nvidia_driver(), None
    if loaded:
        cuda = torch.version.cuda
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            gpus = tuple(torch.cuda.get_device_name(i) for i in range(count))
        elif torch.backends.mps.is_available():
            gpus = (processor.name(),)
    return Environment(
        llmcli=llmcli.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor.name(),
        cores=processors(),
        features=tuple(name for name in processor.FEATURES if name in processor.flags()),
        memory_bytes=memory_bytes(),
        gpus=gpus,
        driver=driver,
        torch=torch.__version__ if loaded else torch_version(),
        cuda=cuda,
        threads=torch.get_num_threads() if loaded else None,
        kernels=kernels,
        kernel_level=native.status(),
        triton=native.triton_status(),
    )


def torch_version() -> str | None:
    """The installed PyTorch's version from its metadata; None without PyTorch."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return None


def memory_bytes() -> int | None:
    """Memory of the machine in bytes, or of the container where that is limited to less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    limit = memory_limit()
    return total if limit is None else min(total, limit)


def _nvidia_files() -> tuple[str, ...]:
    """Names of NVIDIA cards from the driver's own files: no library has to be loaded."""
    paths = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = (_found(r"^Model:\s*(.+)$", path) for path in paths)
    return tuple(model for model in models if model is not None)


def _nvidia_driver() -> str | None:
    return _found(r"\s(\d+\.\d+(?:\.\d+)?)\s", "/proc/driver/nvidia/version")


def _found(pattern: str, path: str | Path) -> str | None:
    """What the group of a pattern is in a file of the system; None where it matches nothing."""
    found = re.search(pattern, system_text(path), re.MULTILINE)
    return found[1].strip() if found else None


def machine_devices(environ: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """NVIDIA's GPUs `cuda:0` …, Apple's `mps` (whose memory is the CPU's), then the CPU."""
    own = cpu()
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return (replace(own, device="mps", bfloat16=True), own)
    return (*nvidia_gpus(environ), own)


def cpu() -> Device:
    """The processor with the memory of the machine, or of its container where that is less."""
    return Device(
        device="cpu",
        name=processor.name(),
        total_bytes=memory_bytes(),
        free_bytes=free_memory(),
        bfloat16=processor.has_bfloat16(),
    )


def nvidia_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """NVIDIA's GPUs as `nvidia-smi` lists them; none where it is not there.

    `CUDA_VISIBLE_DEVICES` chooses and orders them, as it does for PyTorch.
    """
    if which("nvidia-smi") is None:
        return ()
    for fields in (_QUERY, _QUERY[:-1]):  # an old driver does not know `compute_cap`
        query = f"--query-gpu={','.join(fields)}"
        command = ("nvidia-smi", query, "--format=csv,noheader,nounits")
        if (text := program_output(*command, seconds=_SECONDS)) is not None:
            break
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    rows = _visible([row for row in rows if len(row) >= 5], environ.get("CUDA_VISIBLE_DEVICES"))
    usable = not (torch_version() or "").endswith("+cpu")
    return tuple(
        Device(
            device=f"cuda:{number}",
            name=row[2],
            total_bytes=_mebibytes(row[3]),
            free_bytes=_mebibytes(row[4]),
            # from the Ampere generation on; an old driver does not say, and has old cards
            bfloat16=len(row) > 5 and row[5].split(".")[0].isdigit() and float(row[5]) >= 8,
            usable=usable,
        )
        for number, row in enumerate(rows)
    )


def _visible(rows: list[list[str]], chosen: str | None) -> list[list[str]]:
    """The rows that `CUDA_VISIBLE_DEVICES` names, up to the first that is not there."""
    if chosen is None:
        return rows
    seen = []
    for name in (part.strip() for part in chosen.split(",")):
        match = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if not match:
            break
        seen.append(match[0])
    return seen


def program_output(*command: str, seconds: float) -> str | None:
    """What a program prints; None where it is not installed, fails or takes longer."""
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout


def _mebibytes(text: str) -> int | None:
    """Bytes of `81920`; None for `[N/A]`."""
    return int(text) * _MIB if text.isdigit() else None


class CpuContention:
    """Counts from when it is made; `load` is what there was since. `root` is for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._average: float | None = None
        with suppress(OSError):
            self._average = os.getloadavg()[0]
        self._begin = _seconds(root)

    def load(self, threads: int) -> MachineLoad:
        """The time that other programs took since then; this one computes with `threads`."""
        end = _seconds(self._root)
        wall, own, *system = (now - then for then, now in zip(self._begin, end, strict=False))
        seconds, others, stolen = max(wall, 1e-9), None, None
        if system:
            others, stolen = max(0.0, system[0] - own) / seconds, system[1] / seconds
        return MachineLoad(
            seconds=seconds,
            processors=processors(),
            threads=threads,
            others=others,
            stolen=stolen,
            load_average=self._average,
        )


def _seconds(root: Path) -> tuple[float, ...]:
    """Readings in seconds: the wall clock, this process's processor time, then the system's.

    The last are what all programs took and what the host took, by the clock ticks in `/proc/stat`
    of the processors that this process may use; absent where there is no such file.
    """
    times = os.times()
    own, wall = sum(times[:4]), perf_counter()
    text = system_text(root, "proc/stat")
    if not text:
        return wall, own
    ours = set(processor_numbers())
    busy = stolen = 0
    for number, counts in re.findall(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
        if int(number) in ours:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, counts.split())
            busy += user + nice + system + irq + softirq
            stolen += steal
    tick = os.sysconf("SC_CLK_TCK")
    return wall, own, busy / tick, stolen / tick
