"""The kernels under sanitizers, and on ARM: random blocks, the same bits everywhere.

The program is tests/fuzz/fuzz_packed.c; it prints a hash of what each format gave.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import children
import pytest
from conftest import COMPILER, EXTENSION, FLAGS, ROOT, SOURCES, levels_of, needs

from llmcli.kernels import native

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from fuzz_packed import command

EVERY_LEVEL, PORTABLE, DOTPROD = "0", "1", str(1 << native.LEVELS.index("dotprod"))
SEED, BLOCKS = "1", "5000"


def hashes(*argv):
    run = children.run([*argv, SEED, BLOCKS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(set(run.stdout.split())) == 2 * 14
    return run.stdout


@pytest.fixture(scope="module")
def ours(built):
    """This machine's, at its portable level."""
    needs(COMPILER[0])
    program = built("fuzz_packed", [*COMPILER, *command("-O1")])
    return hashes(str(program), PORTABLE)


# The fuzzer's script has all checks of `undefined`; without these GCC takes half the time.
UNDEFINED = ["-fsanitize=address,undefined", "-fno-sanitize=null,pointer-overflow,object-size"]


@pytest.mark.parametrize("sanitizers", [UNDEFINED, ["-fsanitize=thread"]], ids=["memory", "thread"])
def test_sanitizers_find_nothing(built, ours, tmp_path, sanitizers):
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    flags = [*COMPILER, *sanitizers]
    checked = children.run([*flags, str(probe), "-o", str(tmp_path / "probe")], capture_output=True)
    if checked.returncode or children.run([str(tmp_path / "probe")]).returncode:
        pytest.skip(f"the compiler has no {sanitizers[0]}")
    name = "fuzz" + sanitizers[0].replace("=", "_")
    program = built(name, [*flags, *command("-O0", "-fno-sanitize-recover=all")])
    assert hashes(str(program), EVERY_LEVEL) == ours


@pytest.mark.parametrize("level", [EVERY_LEVEL, DOTPROD])
def test_arm_has_the_same_bits(built, ours, level):
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    needs(compiler, emulator)
    program = built("fuzz_aarch64", [compiler, *command("-static")])
    assert hashes(emulator, str(program), level) == ours


STEPS = [
    *EXTENSION["extra-compile-args"], "-Wall", "-Wextra", "-Werror",
    f"-I{ROOT / 'llmcli' / 'kernels'}",
    *(str(Path(__file__).with_name(name)) for name in ("attend.c", "experts.c", "recurrent.c")),
    *SOURCES, "-lm",
]  # fmt: skip


def test_attention_experts_and_recurrences_have_the_same_bits_everywhere(built):
    needs(COMPILER[0])
    flags = ["-g", *UNDEFINED, "-fno-sanitize-recover=all"]
    plain = built("attend", [*COMPILER, *STEPS])
    library = built("cc.so", [*COMPILER, *FLAGS, "-shared", "-fPIC", *SOURCES])
    levels = [str(level) for level in range(len(native.LEVELS)) if levels_of(library) >> level & 1]
    hashes = {children.run([str(plain), level], capture_output=True).stdout for level in levels}
    assert len(hashes) == 1
    assert hashes != {b""}
    probe = children.run([*COMPILER, *flags, "-xc", "-", "-o", "/dev/null"], capture_output=True,
                         input=b"int main(void) { return 0; }")  # fmt: skip
    if probe.returncode == 0:
        checked = built("attend_checked", [*COMPILER, *STEPS, *flags, "-O0"])
        for level in levels:
            run = children.run([str(checked), level], capture_output=True)
            assert run.returncode == 0, run.stderr
            assert {run.stdout} == hashes
    if shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64"):
        foreign = built("attend_aarch64", ["aarch64-linux-gnu-gcc", "-static", *STEPS])
        for level in ("0", "5"):
            run = children.run(["qemu-aarch64", str(foreign), level], capture_output=True)
            assert {run.stdout} == hashes
