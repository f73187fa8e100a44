"""The library of C kernels: availability, processor level, and calls.

It is built with the package if there is a C compiler. Without it PyTorch computes products of dense
weights, and weights in blocks are dequantized. The library is called through ctypes and depends on
neither Python nor torch.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmcli.errors import UsageError, first_line

VARIABLE = "LLMCLI_KERNELS"
TRITON_VARIABLE = "LLMCLI_TRITON"
# `enum level` in common.h
LEVELS = ("portable", "avx2", "avx512", "vnni", "avx512bf16", "amx", "dotprod")
# Triton's kernels for CUDA devices, in groups that can be switched: see `ops.on_card`
TRITON = "triton"
GROUPS = ("attention", "products", "packed", "sampling")
_KEPT: list[Any] = []  # memory referenced by the library
_LIBRARY = Path(__file__).with_name("_native.abi3.so")
_VERSION = 30  # `llmcli_native_version` in levels.c


@dataclass
class TritonState:
    """What this process knows of Triton's kernels.

    `checked`: they agreed with PyTorch's operations (`ops.on_card.check`). `choices_checked`: those
    for sampling were compared (`check_choices`). `off`: why none is used, empty if they are.
    `groups_off`: groups that are not used, and why. `warn` is called when any are turned off;
    commands write a note.
    """

    checked: bool = False
    choices_checked: bool = False
    off: str = ""
    groups_off: dict[str, str] = field(default_factory=dict)
    warn: Callable[[str], object] = warnings.warn


TRITON_STATE = TritonState()


def check() -> None:
    """Raise UsageError if $LLMCLI_KERNELS or $LLMCLI_TRITON is unknown or unavailable."""
    if _wanted():
        level()
    if os.environ.get(TRITON_VARIABLE):
        _groups()


def status() -> str:
    """The level in use, `off`, or the reason why there is none, for display and JSON.

    Raises UsageError like `check`.
    """
    return level() or ("off" if _wanted() == "off" else str(_library()))


@cache
def level() -> str | None:
    """The processor's best level, or that of $LLMCLI_KERNELS; None: no kernels.

    Raises UsageError like `check`.
    """
    wanted = _wanted()
    if wanted == "off":
        return None
    if wanted and wanted not in LEVELS:
        hint = f"set it to off, {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, or unset it"
        if wanted == TRITON:
            hint = f"unset it: Triton's kernels are on by default; {TRITON_VARIABLE} selects them"
        raise UsageError(f"`{VARIABLE}={wanted}` is not a level of the kernels", hint=hint)
    library = _library()
    if isinstance(library, str):
        if wanted:
            raise UsageError(
                f"there are no kernels for `{VARIABLE}={wanted}`: {library}",
                hint=f"unset {VARIABLE}, or install the package again where there is a C compiler",
            )
        return None
    available = levels()
    if wanted and wanted not in available:
        raise UsageError(
            f"this processor cannot run the kernels of `{VARIABLE}={wanted}`",
            hint=f"set it to {' or '.join(['off', *available])}, or unset it",
        )
    return wanted or available[-1]


def levels() -> list[str]:
    """The processor's levels, from the lowest to the best; empty without the library."""
    library = _library()
    if isinstance(library, str):
        return []
    bits = library.llmcli_native_levels()
    return [name for bit, name in enumerate(LEVELS) if bits >> bit & 1]


def triton() -> tuple[str, ...]:
    """The groups of Triton's kernels in use on CUDA devices. Raises UsageError like `check`."""
    groups = _groups()
    if TRITON_STATE.off or isinstance(groups, str):
        return ()
    off = TRITON_STATE.groups_off
    return tuple(group for group in groups if group not in off) if off else groups


def triton_status() -> str:
    """These groups and whether they were checked, or why there are none; as `status`."""
    groups = _groups()
    if isinstance(groups, str):
        return groups
    if TRITON_STATE.off:
        return f"off ({TRITON_STATE.off})"
    on, state = triton(), TRITON_STATE
    done = state.choices_checked if on == ("sampling",) else state.checked
    checked = "checked" if done else "checked when first used"
    words = [f"{', '.join(on)} ({checked})"] if on else []
    words += [f"{group} off ({why})" for group, why in state.groups_off.items()]
    return "; ".join(words)


@cache
def _groups() -> tuple[str, ...] | str:
    """The groups that $LLMCLI_TRITON selects, by default all, or why there are none."""
    wanted = os.environ.get(TRITON_VARIABLE, "")
    groups = tuple(wanted.replace(" ", "").split(",")) if wanted else GROUPS
    if wanted != "off" and not set(groups) <= set(GROUPS):
        raise UsageError(
            f"`{TRITON_VARIABLE}={wanted}` does not name groups of Triton's kernels",
            hint=f"set it to off, or to some of {','.join(GROUPS)}, or unset it",
        )
    if "off" in (wanted, _wanted()):
        return "off"
    lacking = _triton_lacks()
    if wanted and lacking:
        raise UsageError(
            f"there are no kernels for `{TRITON_VARIABLE}={wanted}`: {lacking}",
            hint=f"unset {TRITON_VARIABLE}, or install what is missing",
        )
    return lacking or groups


def _triton_lacks() -> str:
    """What Triton needs to launch its kernels and is missing here; empty if nothing is."""
    import sysconfig
    from shutil import which

    if find_spec("triton") is None:
        return "not installed"
    if not (os.environ.get("CC") or which("gcc") or which("clang")):  # as it looks for one
        return "no C compiler"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return "" if header.exists() else f"no {header}"


def kernels_of(device: str) -> str | None:
    """The kernels for packed weights on a `cpu` or `cuda` device: `level()`, or `triton`.

    None without any. Raises UsageError like `check`.
    """
    if device == "cpu":
        return level()
    return TRITON if device == "cuda" and "packed" in triton() else None


def _wanted() -> str:
    return os.environ.get(VARIABLE, "")


@cache
def _library() -> Any:
    """The ctypes library, or a string with the reason why there is none."""
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


def level_number() -> int:
    """The number of the level in `enum level`; requires `level()`."""
    name = level()
    assert name is not None
    return LEVELS.index(name)


@cache
def function(name: str, arguments: str, *, returns: bool = False) -> Any:
    """An exported function, looked up once; requires `level()`.

    `arguments`: `p` for addresses, `n` for 64-bit integers (also the return type if `returns`), `d`
    for float64.
    """
    import ctypes

    call = getattr(_library(), name)
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}
    call.argtypes = [kinds[kind] for kind in arguments]
    call.restype = ctypes.c_int64 if returns else None
    return call


@cache
def team(threads: int) -> int:
    """The address of a `struct team` (common.h) with PyTorch's OpenMP threads and our level."""
    import ctypes

    numbers = (ctypes.c_int64 * 3)(level_number(), _team() or 0, threads)
    _KEPT.append(numbers)
    return ctypes.addressof(numbers)


@cache
def _team() -> int | None:
    """The address of `GOMP_parallel` in PyTorch's OpenMP library.

    A second OpenMP would start additional threads. The loader finds PyTorch's among the
    dependencies of its extension module; LLVM's and Intel's have it too.
    """
    import ctypes

    torch: Any = sys.modules.get("torch")
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
