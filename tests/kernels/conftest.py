"""The kernels as the source tree has them, whatever is installed."""

from __future__ import annotations

import shlex
import shutil
import sysconfig
import tomllib
from pathlib import Path

import children
import pytest

from llmcli.kernels import native

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library, built with the flags of the package; skips where there is no C compiler."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip("there is no C compiler")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    path = tmp_path_factory.mktemp("kernels") / "_native.abi3.so"
    flags = [*extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    sources = [str(ROOT / source) for source in extension["sources"]]
    children.run([*compiler, *flags, *sources, "-o", str(path)], check=True)
    return path


@pytest.fixture
def use(monkeypatch):
    """`use(library, level)`: that library, and `level` as $LLMCLI_KERNELS; "" unsets it."""

    def forget():
        for cached in (native.level, native._library, native._product):
            cached.cache_clear()

    def chosen(path, level=""):
        monkeypatch.setattr(native, "_LIBRARY", path)
        monkeypatch.setenv("LLMCLI_KERNELS", level)
        forget()

    yield chosen
    monkeypatch.undo()
    forget()
