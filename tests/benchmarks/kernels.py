"""Read rate of the bfloat16 kernel beside PyTorch's ways to the same product, in turns.

python tests/benchmarks/kernels.py [--runs 30] [--rows 1 4 16] [--threads 1 2] [--json]

Each product takes the next of so many copies of its matrix that none is still in a cache. `torch`
is F.linear, whose results are rounded to bfloat16; `chunks` converts the weights to float32, which
is what runs where there is no kernel. The ratios are medians over runs side by side.

Only a quiet machine tells. `--cpu-time` counts the seconds that the thread ran instead of those on
the wall, for one thread on a machine that is not quiet.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_tools import arguments, environment, spread, table

from llmcli.kernels import native
from llmcli.ops import product

# (N, K): SmolLM2's head, gate|up, q|k|v, out and down, then the gate of an 8B model.
SHAPES = ((49152, 576), (3072, 576), (960, 576), (576, 576), (576, 1536), (14336, 4096))
CACHE = 600 << 20  # bytes of copies: larger than any last-level cache


def measured(
    shape: tuple[int, int], rows: int, runs: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per run of each way."""
    x = torch.randn(rows, shape[1]).bfloat16()
    copies = [torch.randn(shape).bfloat16()]
    copies += [copies[0].clone() for _ in range(max(3, CACHE // copies[0].nbytes))]
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "kernel": lambda w: product.by_kernel(x, w, None),
        "torch": lambda w: F.linear(x, w),
        "chunks": lambda w: product._in_chunks(x, w),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    turn = 0
    for run in range(-1, runs):  # the first is for the threads and the libraries
        for name, way in ways.items():
            turn += 1
            start = clock()
            way(copies[turn % len(copies)])
            if run >= 0:
                times[name].append(clock() - start)
    return times


def main() -> int:
    parser = arguments(__doc__, runs=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    if native.level() is None:
        print(f"kernels: {native.status()}", file=sys.stderr)
        return 1
    clock = time.thread_time if options.cpu_time else time.perf_counter
    found, lines = [], [["threads", "N", "K", "M", "GB/s", "× torch", "× chunks"]]
    for threads in dict.fromkeys(options.threads):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            for rows in options.rows:
                times = measured(shape, rows, options.runs, clock)
                found.append({"threads": threads, "shape": shape, "rows": rows, "seconds": times})
                rates = [2e-9 * shape[0] * shape[1] / s for s in times["kernel"]]
                speedups = [
                    statistics.median(
                        a / b for a, b in zip(times[way], times["kernel"], strict=True)
                    )
                    for way in ("torch", "chunks")
                ]
                counts = [str(count) for count in (threads, *shape, rows)]
                lines.append([*counts, spread(rates, 1), *(f"{each:.2f}" for each in speedups)])
    machine = environment(options.threads[-1]) | {"kernels": native.status()}
    if options.json:
        print(json.dumps({"environment": machine, "products": found}))
        return 0
    print(" · ".join(f"{key} {value}" for key, value in machine.items()))
    print(table(f"medians of {options.runs} interleaved runs, cold weights", lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
