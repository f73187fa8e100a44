"""Fuzzing the kernels of packed blocks: any bytes, at every level, under sanitizers.

    python tests/fuzz/fuzz_packed.py --blocks 10000000 [--seed 1] [--sanitize thread]

needs a C compiler with the sanitizers' libraries and tries so many random blocks of each format
(half an hour of ten million each; see fuzz_packed.c). A short run is in tests/kernels.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = map(str, (TESTS.parent, TESTS, TESTS / "kernels"))

import children  # noqa: E402
from kernel_sources import COMPILER, FLAGS, FUZZER, HEADERS, SOURCES  # noqa: E402


def main() -> int:
    """Build the program, run it and tell how it ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitize", default="address,undefined")
    options = parser.parse_args()
    checked = ["-O1", "-g", "-fno-sanitize-recover=all", f"-fsanitize={options.sanitize}"]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "fuzz_packed")
        command = [*COMPILER, *FLAGS, *checked, "-pthread", HEADERS, FUZZER, *SOURCES, "-lm"]
        children.run([*command, "-o", program], check=True)
        return children.run([program, "0", str(options.seed), str(options.blocks)]).returncode


if __name__ == "__main__":
    sys.exit(main())
