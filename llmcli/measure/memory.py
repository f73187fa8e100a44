"""What memory this machine has. No torch.

PyTorch is asked nothing: importing it takes longer than everything here, and a driver context
on a GPU takes memory itself. `devices` answers the same questions where torch is at hand.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from shutil import which

from llmcli.limits import free_memory
from llmcli.measure.environment import features, memory_bytes, processor, torch_version
from llmcli.records.info import Device

_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap")
_SECONDS = 3  # a driver in trouble answers after minutes, or never
_MIB = 2**20


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
        name=processor(),
        total_bytes=memory_bytes(),
        free_bytes=free_memory(),
        bfloat16=not {"avx512_bf16", "amx_bf16"}.isdisjoint(features()),
    )


def nvidia_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """NVIDIA's GPUs as `nvidia-smi` lists them; none where it is not there.

    `CUDA_VISIBLE_DEVICES` chooses and orders them, as it does for PyTorch.
    """
    if which("nvidia-smi") is None:
        return ()
    lines = _nvidia_smi(_QUERY)
    if lines is None:  # an old driver does not know `compute_cap`
        lines = _nvidia_smi(_QUERY[:-1])
    rows = [[cell.strip() for cell in line.split(",")] for line in lines or ()]
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


def _nvidia_smi(fields: tuple[str, ...]) -> list[str] | None:
    """One line a GPU; None where `nvidia-smi` fails or takes too long."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.splitlines()


def _mebibytes(text: str) -> int | None:
    """Bytes of `81920`; None for `[N/A]`."""
    return int(text) * _MIB if text.isdigit() else None
