"""Time of `--help`, `--version` and of what reads headers only, beside the bare interpreter's.

python tests/benchmarks/startup.py [--runs 15] [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_tools import arguments, spread, table, timed_process

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "llmcli --version": [sys.executable, "-m", "llmcli", "--version"],
    "llmcli --help": [sys.executable, "-m", "llmcli", "--help"],
    "llmcli generate --help": [sys.executable, "-m", "llmcli", "generate", "--help"],
}
LIMIT, LIMIT_OF_HEADERS = 0.2, 1.0  # seconds
# the configuration of a Llama of 70 B parameters, of which `shapes` and `info` need no weights
LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip


def of_headers(folder: str) -> dict[str, list[str]]:
    """The commands on the model there; GPUs are not asked for, which takes as long again."""
    model = ["-m", folder, "--device", "cpu"]
    return {
        f"llmcli {name}, 80 layers": [sys.executable, "-m", "llmcli", name, *model]
        for name in ("shapes", "info")
    }


def limit_of(name: str) -> float:
    """Seconds that the command may take."""
    return LIMIT_OF_HEADERS if "layers" in name else LIMIT


def measured(commands: dict[str, list[str]], runs: int) -> dict[str, list[float]]:
    """Seconds of each, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():  # once, so that bytecode and files are cached
        timed_process(command)
    for _ in range(runs):
        for name, command in commands.items():
            seconds[name].append(timed_process(command))
    return seconds


def main() -> None:
    options = arguments(__doc__, runs=15).parse_args()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE))
        seconds = measured(COMMANDS | of_headers(folder), options.runs)
    if options.json:
        limits = {name: limit_of(name) for name in seconds}
        print(json.dumps({"seconds": seconds, "limits": limits}))
        return
    rows = [["command", "ms, median (range)", "limit, ms", "kept"]]
    for name, values in seconds.items():
        limit = limit_of(name)
        kept = "yes" if statistics.median(values) < limit else "NO"
        times = spread([1000 * value for value in values], 0)
        rows.append([name, times, f"{1000 * limit:.0f}", kept])
    print(table(f"start-up, {options.runs} interleaved runs", rows))


if __name__ == "__main__":
    main()
