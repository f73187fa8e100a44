"""Devices: selection, dtypes, memory and threads."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llmcli import processor
from llmcli.errors import OutOfMemory, UsageError
from llmcli.graph.precision import WIDE
from llmcli.limits import free_memory
from llmcli.records.machine import CUDA_OPTIONS

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """`auto` (CUDA, else the CPU), `cpu`, `cuda`, `cuda:1` or `mps`.

    `auto` excludes Apple's GPU, where llmcli is untested. For CUDA, `CUDA_OPTIONS` are set. Raises
    UsageError for other names and for a missing device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu|mps|cuda(:(0|[1-9][0-9]*))?", name):
        raise UsageError(f"`{name}` is not a device", hint="use auto, cpu, cuda, cuda:0 … or mps")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UsageError(
            f"there is no device `{name}`: PyTorch sees {found} CUDA devices",
            hint="use `--device cpu`" if not found else f"use cuda:0 … cuda:{found - 1}",
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("there is no device `mps` here", hint="use `--device cpu`")
    if kind == "cuda":
        cudnn, tf32, narrow = CUDA_OPTIONS.values()
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        products = torch.backends.cuda.matmul
        products.allow_tf32 = tf32
        products.allow_bf16_reduced_precision_reduction = narrow
        products.allow_fp16_reduced_precision_reduction = narrow
    return torch.device(name)


def check_dtype(name: str, device: torch.device) -> None:
    """Raise UsageError for an unknown name, and for a dtype that the device lacks."""
    if name not in ("auto", WIDE, *DTYPES):
        raise UsageError(f"`{name}` is not a dtype", hint=f"use auto, {', '.join(DTYPES)}")
    if name == "float64" and device.type == "mps":
        raise UsageError("the device `mps` has no float64", hint="use `--device cpu`")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 instructions."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "mps" or processor.has_bfloat16()


def float64_device(device: torch.device) -> torch.device:
    """The device for float64 arithmetic: `device` itself, or the CPU.

    Apple's GPU has no float64; other devices than CUDA are assumed to lack it.
    """
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def copy_to_host_async(x: Tensor) -> Callable[[], Tensor]:
    """Start copying `x` to the host; the returned function waits for the copy only.

    For CUDA; on other devices the copy is synchronous.
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
    """Wait until the device has finished all work; a no-op for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def keep_freed_memory() -> None:
    """Make the CPU allocator keep freed activations for the next layer.

    By default glibc returns large blocks to the system, which then clears pages again for the next
    layer: 90,000 page faults and a fifth of the time for 512 tokens of SmolLM2. Up to 64 MiB are
    kept, in blocks of up to 32 MiB, glibc's maximum.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, 64 << 20)  # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD


def release_freed_memory() -> None:
    """Return freed memory to the system, after much was freed at once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def free_unreferenced() -> None:
    """Free what nothing refers to any more, such as a model and its cache, on every device."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where CUDA was never used


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run PyTorch's CPU operations with `count` threads; None: unchanged."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of `device` in bytes, within a container's limit; None if unknown.

    On CUDA with what PyTorch keeps of freed tensors for later ones.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return free_memory()


def require_memory(
    nbytes: int, device: torch.device, what: str, hint: str | Callable[[], str]
) -> None:
    """Raise OutOfMemory if `nbytes` for `what` exceed the free memory of `device`.

    `hint` may be a function, called only in this case.

    To be called before allocating: Linux overcommits memory and kills the process later.
    """
    free = available_bytes(device)
    if free is not None and nbytes > free:
        raise OutOfMemory(
            f"{what} need {gib(nbytes)} but only {gib(free)} are free on `{device}`",
            hint=hint if isinstance(hint, str) else hint(),
        )


def gib(nbytes: int) -> str:
    """`1.25 GiB`, or MiB below 0.1 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"
