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
from llmcli.limits import memory_limit, processors
from llmcli.records.environment import Environment

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
    """The installed PyTorch's version from its metadata, None where there is none."""
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
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    if found:
        return found[1].strip()
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
    """Those of the processor that decide which arithmetic is fast."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    have = set(found[1].split()) if found else set()
    return tuple(name for name in FEATURES if name in have)


def _nvidia_files() -> tuple[str, ...]:
    """Names of NVIDIA cards from the driver's own files: no library has to be loaded."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", _read(str(path)), re.MULTILINE)
        if found:
            models.append(found[1].strip())
    return tuple(models)


def _nvidia_driver() -> str | None:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read("/proc/driver/nvidia/version"))
    return found[1] if found else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
