"""Fuzzing the kernels of packed blocks: any bytes, at every level, under sanitizers.

    python tests/fuzz/fuzz_packed.py --blocks 10000000 [--seed 1] [--sanitize thread]

needs a C compiler with the sanitizers' libraries and tries so many random blocks of each format
(half an hour of ten million each; see fuzz_packed.c). A short run is in tests/kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import children  # noqa: E402


def command(*flags: str) -> list[str]:
    """What follows a compiler's name, but for `-o PROGRAM`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    sources = [str(ROOT / source) for source in extension["sources"]]
    return [
        *extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", *flags, "-pthread",
        f"-I{ROOT / 'llmcli' / 'kernels'}", str(Path(__file__).with_name("fuzz_packed.c")),
        *sources, "-lm",
    ]  # fmt: skip


def main() -> int:
    """Build the program, run it and tell how it ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitize", default="address,undefined")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "fuzz_packed")
        flags = command("-O1", "-g", "-fno-sanitize-recover=all", f"-fsanitize={options.sanitize}")
        children.run([os.environ.get("CC", "cc"), *flags, "-o", program], check=True)
        arguments = ["0", str(options.seed), str(options.blocks)]
        return children.run([program, *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
