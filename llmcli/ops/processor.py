"""Features of this machine's processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def flags() -> frozenset[str]:
    """The processor's feature flags with Linux's names; empty if unreadable."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def has_bfloat16() -> bool:
    """Whether the processor has bfloat16 multiplication: AVX512-BF16 or AMX."""
    return not flags().isdisjoint({"avx512_bf16", "amx_bf16"})
