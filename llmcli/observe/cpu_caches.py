"""The caches of the processor, as Linux describes them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cpu_caches(threads: int, root: Path = Path("/")) -> tuple[tuple[str, int], ...]:
    """(`L2`, bytes), (`L3`, bytes) …: what so many threads have together, smallest first.

    Of the processors that this process may run on; a cache that several of them share counts
    once, and one of their own once for each thread. Empty where the system does not say (outside
    Linux, in some sandboxes). `root` is for tests.
    """
    found: dict[int, dict[str, int]] = {}  # level → which processors share it → bytes
    for processor in _processors():
        cache = root / f"sys/devices/system/cpu/cpu{processor}/cache"
        for index in sorted(cache.glob("index*")):
            level, size = _read(index / "level"), _bytes(_read(index / "size"))
            if not level.isdigit() or size is None or _read(index / "type") == "Instruction":
                continue
            shared = _read(index / "shared_cpu_map") or str(processor)
            found.setdefault(int(level), {})[shared] = size
    return tuple(
        (f"L{level}", sum(sorted(sizes.values(), reverse=True)[:threads]))
        for level, sizes in sorted(found.items())
        if level > 1
    )


def _processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _bytes(text: str) -> int | None:
    """Bytes of `32768K`; None for anything else."""
    number, unit = text[:-1], text[-1:]
    return int(number) * _UNITS[unit] if number.isdigit() and unit in _UNITS else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
