"""This machine's processor: its name, and the features that decide which arithmetic is fast."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from functools import cache

from llmcli.limits import system_text

# the rest of a processor's flags is noise here
FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@cache
def name() -> str:
    """The processor's name; its architecture where the system has none."""
    if found := _cpuinfo("model name|Model"):
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
def flags() -> frozenset[str]:
    """The processor's feature flags with Linux's names; empty if unreadable."""
    return frozenset(_cpuinfo("flags|Features").split())


def has_bfloat16() -> bool:
    """Whether the processor has bfloat16 multiplication: AVX512-BF16 or AMX."""
    return not flags().isdisjoint({"avx512_bf16", "amx_bf16"})


def has_float16() -> bool:
    """Whether the processor has float16 multiplication: AVX512-FP16, AMX-FP16 or Arm's.

    All of Apple's have it, whose flags are unreadable.
    """
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple or not flags().isdisjoint({"avx512_fp16", "amx_fp16", "asimdhp"})


def _cpuinfo(keys: str) -> str:
    found = re.search(rf"^(?:{keys})\s*:\s*(.+)$", system_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else ""
