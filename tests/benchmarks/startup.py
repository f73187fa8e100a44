"""Time of `llmcli --help` and `llmcli --version`, beside the bare interpreter's.

    python tests/benchmarks/startup.py [--runs 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from bench_tools import spread, table, timed_process

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "llmcli --version": [sys.executable, "-m", "llmcli", "--version"],
    "llmcli --help": [sys.executable, "-m", "llmcli", "--help"],
    "llmcli generate --help": [sys.executable, "-m", "llmcli", "generate", "--help"],
}
LIMIT = 0.2  # seconds, for --help and --version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():  # once, so that bytecode and files are cached
        timed_process(command)
    for _ in range(options.runs):
        for name, command in COMMANDS.items():
            seconds[name].append(timed_process(command))
    if options.json:
        print(json.dumps({"seconds": seconds, "limit": LIMIT}))
        return
    rows = [["command", "ms, median (range)", "under 200 ms"]]
    for name, values in seconds.items():
        under = "yes" if statistics.median(values) < LIMIT else "NO"
        rows.append([name, spread([1000 * value for value in values], 0), under])
    print(table(f"start-up, {options.runs} interleaved runs", rows))


if __name__ == "__main__":
    main()
