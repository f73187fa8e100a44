"""The machine, the software and the settings that a result depends on.

torch is never imported here: what only it knows is filled in where it already is imported.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llmcli
from llmcli.kernels import native
from llmcli.limits import memory_limit, processors, system_text
from llmcli.records.machine import Environment

# what decides which arithmetic is fast; the rest of a processor's flags is noise here
FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def environment(*, kernels: tuple[str, ...] = ()) -> Environment:
    """The environment header. `kernels`: names of those that computed the result.

    Raises UsageError where $LLMCLI_KERNELS names a level that is not to be had.
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
            gpus = (processor(),)
    return Environment(
        llmcli=llmcli.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        cores=processors(),
        features=features(),
        memory_bytes=memory_bytes(),
        gpus=gpus,
        driver=driver,
        torch=torch.__version__ if loaded else torch_version(),
        cuda=cuda,
        threads=torch.get_num_threads() if loaded else None,
        kernels=kernels,
        kernel_level=native.status(),
    )


def torch_version() -> str | None:
    """The installed PyTorch's version from its metadata; None without PyTorch."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def memory_bytes() -> int | None:
    """Memory of the machine in bytes, or of the container where that is limited to less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    limit = memory_limit()
    return total if limit is None else min(total, limit)


@cache
def processor() -> str:
    """The processor's name."""
    found = _found(r"^(?:model name|Model)\s*:\s*(.+)$", "/proc/cpuinfo")
    if found is not None:
        return found
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


@cache
def features() -> tuple[str, ...]:
    """The processor's features that decide which arithmetic is fast."""
    have = (_found(r"^(?:flags|Features)\s*:\s*(.+)$", "/proc/cpuinfo") or "").split()
    return tuple(name for name in FEATURES if name in have)


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
