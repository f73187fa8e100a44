"""Where a model runs, in which arithmetic, and whether it fits there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llmcli.anatomy.arithmetic import WIDE
from llmcli.errors import OutOfMemory, UsageError
from llmcli.limits import free_memory
from llmcli.ops import processor

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """`auto` (CUDA, else the CPU), `cpu`, `cuda`, `cuda:1` or `mps`.

    `auto` leaves Apple's GPU out: llmcli has not been tried there. Raises UsageError for anything
    else and for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdigit())):
        raise UsageError(
            f"`{name}` is not a device", hint="use auto, cpu, cuda, cuda:0 … or mps"
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UsageError(
            f"there is no device `{name}`: PyTorch sees {found} CUDA devices",
            hint="use `--device cpu`" if not found else f"use cuda:0 … cuda:{found - 1}",
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("there is no device `mps` here", hint="use `--device cpu`")
    return torch.device(name)


def check_dtype(name: str, device: torch.device) -> None:
    """Raises UsageError for an unknown name, and for what the device has not got."""
    if name not in ("auto", WIDE, *DTYPES):
        raise UsageError(f"`{name}` is not a dtype", hint=f"use auto, {', '.join(DTYPES)}")
    if name == "float64" and device.type == "mps":
        raise UsageError("the device `mps` has no float64", hint="use `--device cpu`")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "mps" or processor.has_bfloat16()


def float64_device(device: torch.device) -> torch.device:
    """Where numbers of `device` are computed with in float64: there, or on the CPU.

    Apple's GPU has no float64; of devices other than CUDA nothing is assumed.
    """
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def on_the_way(x: Tensor) -> Callable[[], Tensor]:
    """Starts to copy `x` to the host: what is returned waits for the copy, and not for more.

    Of CUDA's; other devices are waited for at once.
    """
    if x.device.type != "cuda":
        here = x.cpu()
        return lambda: here
    with torch.cuda.device(x.device):
        there = x.to("cpu", non_blocking=True)  # in pinned memory
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

    def wait() -> Tensor:
        event.synchronize()
        return there

    return wait


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that was started; a CPU has when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def keep_freed_memory() -> None:
    """Has the allocator of a CPU keep what activations leave, for the next layer's.

    By default glibc gives every block above a limit of its own back to the system, which then
    clears it page by page for the next layer: 90,000 page faults and a fifth of the time for 512
    tokens of SmolLM2. Up to 64 MiB are kept, in blocks of up to 32, the most that glibc allows.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, 64 << 20)  # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD


def release_freed_memory() -> None:
    """Gives back to the system what was freed and kept, after much was freed at once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """PyTorch's operations on a CPU with so many threads, None: as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of `device` in bytes, within a container's limit; None where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def require_memory(
    nbytes: int, device: torch.device, what: str, hint: str | Callable[[], str]
) -> None:
    """Raises OutOfMemory where `nbytes` for `what` exceed what is free on `device`.

    A hint that takes time to find is a function, which is called only then.

    Asked before allocating: Linux grants memory it has not got and kills the process later.
    """
    free = available_bytes(device)
    if free is not None and nbytes > free:
        raise OutOfMemory(
            f"{what} need {gib(nbytes)} but only {gib(free)} are free on `{device}`",
            hint=hint if isinstance(hint, str) else hint(),
        )


def gib(nbytes: int) -> str:
    """`1.25 GiB`, or MiB below a tenth of that."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"
