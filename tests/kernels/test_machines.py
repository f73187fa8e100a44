"""The kernels under sanitizers, by another compiler and on ARM: the same bits everywhere.

`fuzz` is tests/fuzz/fuzz_packed.c, random blocks of every format by several threads; `steps` are
attend.c and what it calls, all other operations at one level. They print hashes of what they gave.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import children
import pytest
from kernel_sources import COMPILER, FLAGS, FUZZER, HEADERS, levels_of, needs

from llmcli.kernels import native

pytestmark = pytest.mark.machine

STEPS = ("attend.c", "experts.c", "recurrent.c", "steps.c")
PROGRAMS = {"fuzz": [FUZZER], "steps": [str(Path(__file__).with_name(name)) for name in STEPS]}
EVERY_LEVEL, PORTABLE, DOTPROD = "0", "1", str(1 << native.LEVELS.index("dotprod"))
# a race is in how rows are given out, whatever their numbers are; and takes five times as long
BLOCKS = {"memory": "2000", "thread": "1000"}
# Clang has other optimizations, which is why the objects are its own; a machine may have it without
# the library that looks for races, which is therefore the usual compiler's. Traps in place of words
# and no pointers' checks are half the time of compiling: the fuzzer's script has and says it all.
CLANG = ["clang"] if shutil.which("clang") else COMPILER
CHEAPER = ["-fno-sanitize=null,pointer-overflow,object-size", "-fsanitize-undefined-trap-on-error"]
SANITIZED = {
    "memory": (COMPILER, ["-O0", "-fsanitize=address,undefined", *CHEAPER]),
    "thread": (CLANG, ["-O1", "-fsanitize=thread"]),
}
ARM, EMULATOR = ["aarch64-linux-gnu-gcc", "-static"], "qemu-aarch64"


@pytest.fixture(scope="session")
def linked(built, objects):
    """`linked(program, of, compiler, flags)`: with a library, or with the package's objects.

    These have the name `of` and are compiled once for both programs, by `compiler` as the program
    by `linker`.
    """

    def program(name, of, compiler=COMPILER, flags=(), linker=COMPILER):
        needs(compiler[0], linker[0])
        own = isinstance(of, Path)
        label, kernels = (of.stem, [of]) if own else (of, objects(of, [*compiler, *flags]))
        files = [HEADERS, *PROGRAMS[name], *kernels, "-lm"]
        return built(f"{name}-{label}", [*linker, *FLAGS, *flags, "-pthread", *files])

    return program


def said(*argv):
    run = children.run(list(map(str, argv)), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr or f"a trap: without {CHEAPER[-1]} it says why"
    assert len(set(run.stdout.split())) >= len(STEPS)
    return run.stdout


def fuzzed(*program, levels=EVERY_LEVEL, blocks=BLOCKS["memory"]):
    return said(*program, levels, 1, blocks)


@pytest.fixture(scope="module")
def ours(linked, packaged):
    """What the library of the package gives at its portable level, by kind of blocks; and steps."""
    fuzz, steps = (linked(name, packaged) for name in PROGRAMS)
    found = {kind: fuzzed(fuzz, levels=PORTABLE, blocks=blocks) for kind, blocks in BLOCKS.items()}
    return found | {"steps": said(steps, 0)}


def test_every_level_has_the_same_bits(linked, packaged, ours):
    steps = linked("steps", packaged)
    assert {said(steps, level) for level in levels_of(packaged)} == {ours["steps"]}


@pytest.mark.parametrize("kind", SANITIZED)
def test_sanitizers_find_nothing(linked, packaged, ours, tmp_path, kind):
    compiler, flags = SANITIZED[kind]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    made = [*COMPILER, *flags, str(probe), "-o", str(tmp_path / "probe")]
    checked = children.run(made, capture_output=True)
    if checked.returncode or children.run([str(tmp_path / "probe")]).returncode:
        pytest.skip(f"the compiler has no sanitizer of the kind {kind}")
    fuzz, steps = (linked(name, kind, compiler, flags) for name in PROGRAMS)
    assert fuzzed(fuzz, blocks=BLOCKS[kind]) == ours[kind]
    some = levels_of(packaged)[: None if kind == "memory" else 3]  # one of each width of vectors
    assert {said(steps, level) for level in some} == {ours["steps"]}


def test_emulated_levels_have_the_same_bits(linked, emulated, ours):
    fuzz, steps = (linked(name, emulated) for name in PROGRAMS)
    assert fuzzed(fuzz) == ours["memory"]
    levels = range(native.LEVELS.index("amx") + 1)
    assert {said(steps, level) for level in levels} == {ours["steps"]}


def test_arm_has_the_same_bits(linked, ours):
    needs(ARM[0], EMULATOR)
    fuzz, steps = (linked(name, "arm", ARM, linker=ARM) for name in PROGRAMS)
    for level in (EVERY_LEVEL, DOTPROD):
        assert fuzzed(EMULATOR, fuzz, levels=level) == ours["memory"]
    for level in (0, native.LEVELS.index("dotprod")):
        assert said(EMULATOR, steps, level) == ours["steps"]
