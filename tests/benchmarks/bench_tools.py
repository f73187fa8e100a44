"""What the benchmarks share: fresh processes with their peak memory, spreads, tables."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.environ["LLMCLI_CONFIG"] = ""  # nothing is measured with the developer's own settings

# The child prints its own high-water mark when it ends: its parent's getrusage would count the
# parent's memory too, since fork and exec carry the old mark over. Every child ends as llmcli
# does, on the spot, without taking its modules down.
_CHILD = """
import os, runpy, sys
leave = os._exit
def report(code):
    with open("/proc/self/status") as status:
        mark = [line.split()[1] for line in status if line.startswith("VmHWM")]
    sys.stderr.write(f"\\nVmHWM {mark[0]}\\n")
    sys.stderr.flush()
    leave(code)
os._exit = report
"""
_END = "\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)"


@dataclass(frozen=True)
class Ran:
    """One finished process: seconds on the wall, its VmHWM in bytes, what it printed."""

    seconds: float
    peak: int
    stdout: str


def run_python(
    code: str, *, threads: int | None = None, environ: Mapping[str, str] | None = None
) -> Ran:
    """Runs `code` in a fresh interpreter; raises RuntimeError with its stderr where it fails."""
    return _run([sys.executable, "-c", _CHILD + code + _END], threads, environ or {})


def run_llmcli(
    arguments: Sequence[str],
    *,
    threads: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """`llmcli ARGUMENTS` in a fresh interpreter, as `python -m llmcli` runs it."""
    code = f"sys.argv = {['llmcli', *arguments]!r}\nrunpy.run_module('llmcli', run_name='__main__')"
    return run_python(code, threads=threads, environ=environ)


def _environ() -> dict[str, str]:
    """Ours, in which Python keeps compiled files: an installed program has them."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(ROOT)}


def _run(command: Sequence[str], threads: int | None, environ: Mapping[str, str]) -> Ran:
    environment = _environ() | environ
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"{command[-1][-200:]} ended with {done.returncode}:\n{done.stderr}")
    peak = int(done.stderr.rsplit("VmHWM", 1)[1]) * 1024
    return Ran(seconds, peak, done.stdout)


def timed_process(command: Sequence[str]) -> float:
    """Seconds on the wall of `command`; raises CalledProcessError where it fails."""
    start = time.perf_counter()
    subprocess.run(
        command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=_environ()
    )
    return time.perf_counter() - start


def arguments(description: str, **defaults: int | str) -> argparse.ArgumentParser:
    """Reads `--json` and an option for each default, of its type."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range: `1.52 (1.47 to 1.60)`."""
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in aligned columns under a title."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def environment(threads: int) -> dict[str, str]:
    """The machine and the versions that a figure means nothing without."""
    import torch
    import transformers

    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "load": f"{os.getloadavg()[0]:.2f}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
