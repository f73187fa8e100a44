"""The kernels as the source tree has them, whatever is installed, in several builds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import children
import pytest
import tensors
import torch
from kernel_sources import COMPILER, EXTENSION, FLAGS, HERE, ROOT, SOURCES, levels_of, needs

from llmcli.kernels import native, program

if sys.platform != "win32":
    import fcntl

@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """`built(name, command)`: the file that a compiler makes, once for all workers of pytest.

    With `wait=False` it is left to the worker that makes it already.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def build(name, command, wait=True):
        path = folder / name
        with (folder / f"{name}.lock").open("w") as lock:
            if sys.platform != "win32":
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return path
            if not path.exists():
                part = folder / f"{name}.part"
                children.run([*command, "-o", str(part)], check=True)
                part.rename(path)
        return path

    return build


@pytest.fixture(scope="session")
def objects(built):
    """`objects(name, compiler)`: the object files that it makes of the package's sources.

    With a compiler's own flags behind the package's; they have that `name` for all tests.
    """

    def compiled(name, compiler):
        command = [compiler[0], *FLAGS, *compiler[1:], "-fPIC", "-pthread", "-c"]
        files = {f"{name}-{Path(source).stem}.o": [*command, source] for source in SOURCES}
        for file, make in files.items():  # two workers share them
            built(file, make, wait=False)
        return [str(built(file, make)) for file, make in files.items()]

    return compiled


def installed():
    """The package's own library, None where it is older than its sources."""
    written = [ROOT / path for path in (*EXTENSION["sources"], *EXTENSION["depends"])]
    if native._LIBRARY.exists() and native._LIBRARY.stat().st_mtime >= max(
        path.stat().st_mtime for path in written
    ):
        return native._LIBRARY
    return None


@pytest.fixture(scope="session")
def packaged(built, objects):
    """The library as the package builds it: the installed one, unless a source is newer."""
    if ours := installed():
        return ours
    needs(COMPILER[0])
    return built("cc.so", [*COMPILER, "-shared", *objects("cc", COMPILER)])


@pytest.fixture(scope="session")
def library(packaged):
    """That one; another compiler's has its bits (test_machines)."""
    return packaged


@pytest.fixture(scope="session")
def emulated(built, packaged):
    """The library at all levels, those that this processor lacks computed by SIMDe; or skips."""
    needs(COMPILER[0])
    if native.LEVELS.index("avx2") not in levels_of(packaged):
        pytest.skip("this processor has no AVX2")
    if native.LEVELS.index("vnni") in levels_of(packaged):
        pytest.skip("this processor has AVX-512 itself")
    probe = children.run([*COMPILER, "-E", "-include", "simde/x86/avx512.h", "-xc", os.devnull],
                         capture_output=True)  # fmt: skip
    if probe.returncode:
        pytest.skip("there is no SIMDe (libsimde-dev)")
    numbers = [f"-DVERSION={native._VERSION}", "-DLEVELS=63"]  # up to amx
    sources = [source for source in SOURCES if not source.endswith("levels.c")]
    # -Og: at -O0 all branches of what is inlined remain, and packed.c takes five times as long
    flags = ["-std=c11", "-Og", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi",
             "-D_DEFAULT_SOURCE"]  # fmt: skip
    wrapped = ["-include", str(HERE / "emulated.h"), *sources, str(HERE / "emulated.c"), *numbers]
    return built("emulated.so", [*COMPILER, *flags, "-shared", "-fPIC", *wrapped])


@pytest.fixture
def use(monkeypatch):
    """`use(library, level)`: that library, and `level` as $LLMCLI_KERNELS; "" unsets it."""

    def forget():
        for cached in (
            native.level, native._library, native._team, native.team, native.function
        ):  # fmt: skip
            cached.cache_clear()

    def chosen(path, level=""):
        monkeypatch.setattr(native, "_LIBRARY", path)
        monkeypatch.setenv("LLMCLI_KERNELS", level)
        forget()

    yield chosen
    monkeypatch.undo()
    forget()


@pytest.fixture
def levels(library, use):
    """`levels()`: those that this processor has, each in use when it is yielded."""

    def each():
        for number in levels_of(library):
            use(library, native.LEVELS[number])
            yield native.LEVELS[number]

    return each


@pytest.fixture
def every_level(levels, monkeypatch):
    """`every_level(compute)`: what kernels compute, with the same bits at each level."""
    ran, run = [], program.run
    monkeypatch.setattr(program, "run", lambda *ops, **rest: (ran.append(ops), run(*ops, **rest)))

    def computed(compute):
        found = []
        for level in levels():
            ran.clear()
            found.append(compute())
            assert ran, f"PyTorch computed it at {level}"
        for one in found[1:]:
            tensors.same(one, found[0])
        return found[0]

    return computed


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    """PyTorch's number of threads, which kernels use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
