"""Decode alone and beside a busy program, by how long OpenMP's threads wait before they sleep.

    python tests/benchmarks/busy_neighbour.py [--pairs 5] [--spins 300000,auto] [--load] [--json]

Each run is a fresh `llmcli bench` of SmolLM2 with GOMP_SPINCOUNT set: 300,000 rounds is what GNU's
OpenMP does where nothing is set; `auto` is what llmcli sets, which looks when it starts whether
others run. A pair is a run alone and one beside
`--neighbours` programs that compute without end; all values of the variable take their turn in
every pair, in another order each time. `--load` does the same with loading, as float32, a
checkpoint of 1.2 GiB in bfloat16, which all threads convert.

Wanted of llmcli's own value: beside one busy program at most 3 times slower than alone, and alone
at least 0.97 of the speed with 300,000 rounds. Ends with 1 where one of them is not so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_tools import ROOT, arguments, environment, run_llmcli, run_python, spread, table

sys.path.insert(0, str(ROOT))
from llmcli import OPENMP_VARIABLES

OURS, LIBRARY = "auto", "300000"
SLOWER, IDLE = 3.0, 0.97

CHECKPOINT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=10, num_attention_heads=16,
    num_key_value_heads=16, vocab_size=32000, tie_word_embeddings=True, max_position_embeddings=512,
)
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(config).save_pretrained({folder!r})
"""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many programs that compute without end, gone afterwards."""
    code = "print(flush=True)\nwhile True: pass"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(count)
    ]
    try:
        for one in running:
            one.stdout.readline()
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def spin(spins: str) -> dict[str, str]:
    """The environment of a run; of `auto` without any of the variables."""
    return dict.fromkeys(OPENMP_VARIABLES, "") if spins == OURS else {"GOMP_SPINCOUNT": spins}


def decode(spins: str, options: argparse.Namespace) -> float:
    """Tokens per second, the median of a process's runs."""
    arguments = ["bench", "-m", options.model, "-p", "0", "-n", str(options.tokens), "-r",
                 str(options.runs), "--no-ceilings", "-o", "json", "--dtype", options.dtype,
                 "-t", str(options.threads)]  # fmt: skip
    ran = run_llmcli(arguments, threads=options.threads, environ=spin(spins))
    return statistics.median(json.loads(ran.stdout)[0]["samples_ts"])


def load(spins: str, options: argparse.Namespace) -> float:
    """GiB of the file per second that loading it takes."""
    arguments = ["bench", "-m", options.folder, "-p", "1", "-n", "0", "-r", "1", "--no-warmup",
                 "--no-ceilings", "-o", "json", "--dtype", "float32",
                 "-t", str(options.threads)]  # fmt: skip
    ran = run_llmcli(arguments, threads=options.threads, environ=spin(spins))
    size = sum(file.stat().st_size for file in Path(options.folder).glob("*.safetensors"))
    return size / 2**30 / json.loads(ran.stdout)[0]["load_s"]


def measure(what, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Rates by the value of the variable, alone and beside, a number for each pair."""
    found = {spins: {"alone": [], "beside": []} for spins in options.spins}
    for pair in range(options.pairs):
        turn = pair % len(options.spins)
        for spins in options.spins[turn:] + options.spins[:turn]:
            found[spins]["alone"].append(what(spins, options))
            with neighbours(options.neighbours):
                found[spins]["beside"].append(what(spins, options))
            print(f"pair {pair + 1} of {options.pairs}: {spins}: {found[spins]['alone'][-1]:.2f}, "
                  f"beside {found[spins]['beside'][-1]:.2f}", file=sys.stderr)  # fmt: skip
    return found


def show(title: str, found: dict[str, dict[str, list[float]]], unit: str) -> list[str]:
    """Prints the table; what of the wanted is not so."""
    rows = [["rounds", f"alone, {unit}", "beside", "alone ÷ beside", "alone ÷ that with 300000"]]
    wrong = []
    for spins, rates in found.items():
        slower = [a / b for a, b in zip(rates["alone"], rates["beside"], strict=True)]
        row = [spins, spread(rates["alone"]), spread(rates["beside"]), spread(slower), ""]
        if spins == OURS and statistics.median(slower) > SLOWER:
            wrong.append(f"{title}: {statistics.median(slower):.2f} times slower beside another")
        if LIBRARY in found:
            pairs = zip(rates["alone"], found[LIBRARY]["alone"], strict=True)
            idle = [ours / theirs for ours, theirs in pairs]
            row[-1] = spread(idle)
            if spins == OURS and statistics.median(idle) < IDLE:
                wrong.append(f"{title}: {statistics.median(idle):.2f} of the speed alone")
        rows.append(row)
    print(table(title, rows))
    return wrong


def main() -> int:
    parser = arguments(
        __doc__.splitlines()[0], pairs=5, spins=f"{LIBRARY},{OURS}", neighbours=1, model="smollm2",
        dtype="auto", threads=2, tokens=24, runs=3,
    )  # fmt: skip
    parser.add_argument("--load", action="store_true", help="loading, too")
    options = parser.parse_args()
    options.spins = options.spins.split(",")
    found = {"decode": measure(decode, options)}
    if options.load:
        with tempfile.TemporaryDirectory() as options.folder:
            run_python(CHECKPOINT.format(folder=options.folder))
            found["load"] = measure(load, options)
    if options.json:
        header = environment(options.threads)
        print(json.dumps({"environment": header, "rates": found}, indent=1))
        return 0
    wrong = show(f"decode of {options.model}, {options.dtype}", found["decode"], "tokens/s")
    if options.load:
        show("loading 1.2 GiB as float32", found["load"], "GiB/s")
    print(", ".join(f"{name} {value}" for name, value in environment(options.threads).items()))
    print(
        "\n".join(wrong) or f"at most {SLOWER} times slower beside another, at least {IDLE} alone"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
