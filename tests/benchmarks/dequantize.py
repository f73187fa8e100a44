"""Dequantization of every GGUF type beside the gguf package's, in turns; ends with 1 under 3×.

python tests/benchmarks/dequantize.py [--runs 9] [--rows 2048] [--threads 2] [--type Q4_K …]

Random blocks in rows of 4096 elements to float32. Both get fresh memory for the result (`fresh`);
loading has it already (`in place`), which the gguf package cannot use. Only a quiet machine tells:
where other processes want the same cores, PyTorch's threads wait for each other.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from bench_tools import arguments, environment, spread, table
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from llmcli.ops import quant

ROW = 4096  # elements
LEAST = 3.0


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(format: str, rows: int, runs: int) -> dict[str, list[float]]:
    """Seconds per run of the gguf package, of ours with fresh memory, and of ours in place."""
    elements, size = quant.FORMATS[format]
    packed = np.random.default_rng(0).integers(0, 256, (rows, ROW // elements * size), np.uint8)
    raw, kind = torch.from_numpy(packed), GGMLQuantizationType[format]
    out = torch.empty(rows, ROW)
    works: dict[str, Callable[[], object]] = {
        "gguf": lambda: gguf_dequantize(packed, kind),
        "fresh": lambda: quant.dequantize(raw, format, dtype=torch.float32),
        "in place": lambda: quant.dequantize(raw, format, dtype=torch.float32, out=out),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():  # once, for its tables
        work()
    for _ in range(runs):
        for name, work in works.items():
            times[name].append(seconds(work))
    return times


def ratio(times: dict[str, list[float]], name: str) -> float:
    """How many times as fast as the gguf package: the median over runs side by side."""
    return statistics.median(a / b for a, b in zip(times["gguf"], times[name], strict=True))


def main() -> int:
    parser = arguments(__doc__, runs=9, rows=2048, threads=2)
    parser.add_argument("--type", nargs="*", default=["BF16", *quant.DECODERS])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # random scales overflow
    found = {name: measured(name, options.rows, options.runs) for name in options.type}
    slow = [name for name, times in found.items() if ratio(times, "in place") < LEAST]
    if options.json:
        print(json.dumps({"environment": environment(options.threads), "seconds": found}))
        return int(bool(slow))
    rows = [["type", "gguf ns/element", "ours in place", "GB/s", "× in place", "× fresh"]]
    count = options.rows * ROW
    for name, times in found.items():
        each = {key: [1e9 * value / count for value in values] for key, values in times.items()}
        rate = 4 / statistics.median(each["in place"])  # of the float32 that are written
        times_as_fast = [f"{ratio(times, key):.1f}" for key in ("in place", "fresh")]
        both = [spread(each[key]) for key in ("gguf", "in place")]
        rows.append([name, *both, f"{rate:.1f}", *times_as_fast])
    print(" · ".join(f"{key} {value}" for key, value in environment(options.threads).items()))
    print(table(f"{options.runs} interleaved runs of {count / 2**20:g} Mi elements", rows))
    print(f"under {LEAST:g}×: {', '.join(slow) or 'none'}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
