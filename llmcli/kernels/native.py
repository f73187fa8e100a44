"""The library of C kernels: whether there is one, its processor level, and how it is called.

`native.c` is built with the package where there is a C compiler; without it the same products
are computed by PyTorch. The library is called through ctypes and knows neither Python nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llmcli.errors import UsageError, first_line

VARIABLE = "LLMCLI_KERNELS"
LEVELS = ("portable", "avx2", "avx512")  # `enum level` in native.c
_LIBRARY = Path(__file__).with_name("_native.abi3.so")
_VERSION = 1  # `llmcli_native_version` in native.c


def check() -> None:
    """Raises UsageError for a level in $LLMCLI_KERNELS that is unknown or not to be had here."""
    if _wanted():
        level()


def status() -> str:
    """The level in use, `off`, or why there is none; for people and for JSON.

    Raises UsageError as `check` does.
    """
    return level() or ("off" if _wanted() == "off" else str(_library()))


@cache
def level() -> str | None:
    """The best level that this processor has, or that $LLMCLI_KERNELS names; None: no kernels.

    Raises UsageError as `check` does.
    """
    wanted = _wanted()
    if wanted == "off":
        return None
    if wanted and wanted not in LEVELS:
        raise UsageError(
            f"`{VARIABLE}={wanted}` is not a level of the kernels",
            hint=f"set it to off, {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, or unset it",
        )
    library = _library()
    if isinstance(library, str):
        if wanted:
            raise UsageError(
                f"there are no kernels for `{VARIABLE}={wanted}`: {library}",
                hint=f"unset {VARIABLE}, or install the package again where there is a C compiler",
            )
        return None
    bits = library.llmcli_native_levels()
    available = [name for bit, name in enumerate(LEVELS) if bits >> bit & 1]
    if wanted and wanted not in available:
        raise UsageError(
            f"this processor cannot run the kernels of `{VARIABLE}={wanted}`",
            hint=f"set it to {' or '.join(['off', *available])}, or unset it",
        )
    return wanted or available[-1]


def product_bf16(
    x: tuple[int, int], w: tuple[int, int], out: tuple[int, int], shape: tuple[int, int, int],
    threads: int,
) -> None:  # fmt: skip
    """`out[m, n] = Σ_k x[m, k] w[n, k]` of bfloat16 numbers, with sums and results in float32.

    `x` `[M, K]`, `w` `[N, K]` and `out` `[M, N]` are each the address of the first number and
    the distance of rows in elements; within a row the numbers lie together. `shape` is
    (M, N, K). Results are equal bit for bit over M, `threads` and levels. The threads are
    PyTorch's own OpenMP team; where its library has none that can be called (`GOMP_parallel`),
    the product runs on the calling thread alone. Only where `level()` is not None; raises
    MemoryError without memory for x in float32.
    """
    call, code, team = _product()
    if call(*x, *w, *out, *shape, code, team, threads):
        raise MemoryError(f"no memory for {shape[0]} rows of {shape[2]} float32 numbers")


def _wanted() -> str:
    return os.environ.get(VARIABLE, "")


@cache
def _library() -> Any:
    """The library as ctypes has it, or a string: why there is none."""
    import ctypes

    if not _LIBRARY.exists():
        return "not built (no C compiler when it was installed)"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        version = library.llmcli_native_version()
    except (OSError, AttributeError) as error:
        return f"cannot be loaded ({first_line(error)})"
    if version != _VERSION:
        return "stale (built from another version: install llmcli again)"
    return library


@cache
def _product() -> tuple[Callable[..., int], int, int | None]:
    """The function, the number of the level, and the address of `GOMP_parallel`."""
    import ctypes

    name = level()
    assert name is not None
    call = _library().llmcli_product_bf16
    address, number = ctypes.c_void_p, ctypes.c_int64
    matrices, sizes = [address, number] * 3, [number] * 3
    call.argtypes = [*matrices, *sizes, ctypes.c_int, address, ctypes.c_uint]
    return call, LEVELS.index(name), _team()


def _team() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP library that PyTorch itself is linked with.

    A second OpenMP would start threads of its own beside PyTorch's. The loader finds PyTorch's
    among the libraries that its extension module depends on; LLVM's and Intel's have it too.
    """
    import ctypes

    torch: Any = sys.modules.get("torch")
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
