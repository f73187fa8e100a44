"""The kernels under sanitizers, and on ARM: random blocks, the same bits everywhere.

The program is tests/fuzz/fuzz_packed.c; it prints a hash of what each format gave.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import children
import pytest
from kernel_sources import COMPILER, FLAGS, ROOT, levels_of, needs

from llmcli.kernels import native

pytestmark = pytest.mark.machine

EVERY_LEVEL, PORTABLE, DOTPROD = "0", "1", str(1 << native.LEVELS.index("dotprod"))
SEED = "1"
# a race is in how rows are given out, whatever their numbers are; and takes five times as long
BLOCKS = {"memory": "5000", "thread": "1000"}


def hashes(*argv, kind="memory"):
    run = children.run([*argv, SEED, BLOCKS[kind]], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(set(run.stdout.split())) == 2 * 14
    return run.stdout


FUZZ = [str(Path(__file__).parents[1] / "fuzz" / "fuzz_packed.c")]
STEPS = [str(Path(__file__).with_name(name)) for name in ("attend.c", "experts.c", "recurrent.c")]


@pytest.fixture(scope="session")
def linked(built, objects, packaged):
    """`linked(name, sources, of, compiler)`: a program of these and of the package's objects, which
    have the name `of`: they are compiled once for all programs; "cc" is the library of `packaged`.
    """

    def program(name, sources, of, compiler):
        needs(compiler[0])
        kernels = [str(packaged)] if of == "cc" else objects(of, compiler)
        files = [f"-I{ROOT / 'llmcli' / 'kernels'}", *sources, *kernels]
        return built(name, [compiler[0], *FLAGS, *compiler[1:], "-pthread", *files, "-lm"])

    return program


@pytest.fixture(scope="module")
def ours(linked):
    """`ours(kind)`: this machine's, at its portable level."""
    program = linked("fuzz_packed", FUZZ, "cc", COMPILER)
    return lambda kind: hashes(str(program), PORTABLE, kind=kind)


# The fuzzer's script has all checks of `undefined`; without these GCC takes half the time, as Clang
# does for threads.
UNDEFINED = ["-fsanitize=address,undefined", "-fno-sanitize=null,pointer-overflow,object-size"]
CLANG = ["clang"] if shutil.which("clang") else COMPILER
SANITIZED = {
    kind: [*compiler, *flags, "-O0", "-fno-sanitize-recover=all"]
    for kind, compiler, flags in (
        ("memory", COMPILER, UNDEFINED), ("thread", CLANG, ["-fsanitize=thread"]),
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", SANITIZED)
def test_sanitizers_find_nothing(linked, ours, tmp_path, kind):
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    made = [*SANITIZED[kind], str(probe), "-o", str(tmp_path / "probe")]
    checked = children.run(made, capture_output=True)
    if checked.returncode or children.run([str(tmp_path / "probe")]).returncode:
        pytest.skip(f"the compiler has no sanitizer of the kind {kind}")
    program = linked(f"fuzz_{kind}", FUZZ, kind, SANITIZED[kind])
    assert hashes(str(program), EVERY_LEVEL, kind=kind) == ours(kind)


ARM, EMULATOR = ["aarch64-linux-gnu-gcc", "-static"], "qemu-aarch64"


@pytest.mark.parametrize("level", [EVERY_LEVEL, DOTPROD])
def test_arm_has_the_same_bits(linked, ours, level):
    needs(ARM[0], EMULATOR)
    assert hashes(EMULATOR, str(linked("fuzz_arm", FUZZ, "arm", ARM)), level) == ours("memory")


def test_attention_experts_and_recurrences_have_the_same_bits_everywhere(packaged, linked):
    ours = linked("attend", STEPS, "cc", COMPILER)
    levels = [str(level) for level in range(len(native.LEVELS)) if levels_of(packaged) >> level & 1]
    hashes = {children.run([str(ours), level], capture_output=True).stdout for level in levels}
    assert len(hashes) == 1
    assert hashes != {b""}
    made = [*SANITIZED["memory"], "-xc", "-", "-o", "/dev/null"]
    probe = children.run(made, capture_output=True, input=b"int main(void) { return 0; }")
    if probe.returncode == 0:
        checked = linked("attend_checked", STEPS, "memory", SANITIZED["memory"])
        for level in levels:
            run = children.run([str(checked), level], capture_output=True)
            assert run.returncode == 0, run.stderr
            assert {run.stdout} == hashes
    if shutil.which(ARM[0]) and shutil.which(EMULATOR):
        foreign = linked("attend_arm", STEPS, "arm", ARM)
        for level in ("0", "5"):
            run = children.run([EMULATOR, str(foreign), level], capture_output=True)
            assert {run.stdout} == hashes
