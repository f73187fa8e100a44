"""What the kernels are built of, and with what; what is expected of their numbers."""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import shutil
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch
from tensors import drawn

from llmcli.kernels import native
from llmcli.ops import compiled

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
(EXTENSION,) = PROJECT["tool"]["setuptools"]["ext-modules"]
FLAGS = [*EXTENSION["extra-compile-args"], "-Wall", "-Wextra", "-Werror"]
SOURCES = [str(ROOT / source) for source in EXTENSION["sources"]]
HEADERS = f"-I{ROOT / 'llmcli' / 'kernels'}"
FUZZER = str(HERE.parent / "fuzz" / "fuzz_packed.c")
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e38, -1e38, 1e-40)
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def needs(*programs):
    for name in programs:
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")


def levels_of(library):
    """Numbers of those that this processor has."""
    bits = ctypes.CDLL(str(library)).llmcli_native_levels()
    return [level for level in range(len(native.LEVELS)) if bits >> level & 1]


def by_pytorch(monkeypatch, function, *args):
    """What a function computes where there is no kernel: its twin."""
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "takes", lambda *_: False)
        return function(*args)


def scores_like(tokens, experts, kind, seed=0):
    """`[tokens, experts]`: around 0, all equal, of few values, or some of `SPECIAL` among them."""
    x = drawn(tokens, experts, seed=seed)
    if kind == "equal":
        return torch.full_like(x, 0.3)
    if kind == "ties":
        return x.round()
    if kind == "special":
        generator = torch.Generator().manual_seed(seed + 1)
        where = torch.rand(x.shape, generator=generator) < 0.3
        which = torch.randint(len(SPECIAL), x.shape, generator=generator)
        x[where] = torch.tensor(SPECIAL)[which][where]
    return x
