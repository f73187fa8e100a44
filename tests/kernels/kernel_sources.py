"""What the kernels are built of, and with what."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
(EXTENSION,) = PROJECT["tool"]["setuptools"]["ext-modules"]
FLAGS = [*EXTENSION["extra-compile-args"], "-Wall", "-Wextra", "-Werror"]
SOURCES = [str(ROOT / source) for source in EXTENSION["sources"]]
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")


def needs(*programs):
    for name in programs:
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")


def levels_of(library):
    """Bit i: the processor has the level i."""
    return ctypes.CDLL(str(library)).llmcli_native_levels()
