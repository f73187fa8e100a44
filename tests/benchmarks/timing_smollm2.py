"""Does `timing` add up, what does looking cost, and what is decode made of?

    python tests/benchmarks/timing_smollm2.py [--dtype bfloat16 float32] [--pairs 20] [--json]

Each run is a fresh `llmcli timing --json`: SmolLM2 in the dtypes asked for, and the bundled tiny
model, whose weights lie in a cache of most processors. Every figure is computed here from the
parts of every layer, not from the totals or sentences of the view:

- parts and gaps against the wall time, which another clock measured: within 2 %;
- the gaps: at most 5 %;
- the cost of looking: median and range of at least ten pairs in turns;
- products with one row (GEMV): how many a token, and their share of its time;
- what every part waits for, and that none reaches more than its ceiling.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from bench_tools import ROOT, arguments, environment, run_llmcli, spread, table

ADDS_UP, GAPS, PAIRS = 0.02, 0.05, 10
TEXT = ROOT / "tests" / "assets" / "held_out.txt"


def timed(model: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """The document of one `llmcli timing`; a red check of its own ends it with an error."""
    arguments = ["timing", options.text, "-m", model, "--dtype", dtype, "--json",
                 "-n", str(options.tokens), "--pairs", str(options.pairs),
                 "--threads", str(options.threads)]  # fmt: skip
    ran = run_llmcli(arguments, threads=options.threads)
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def figures(phase: dict[str, Any], layers: int) -> dict[str, Any]:
    """What is wanted of one phase, from the parts of all its layers."""
    wall, parts = phase["seconds"], phase["parts"]
    inside = sum(part["seconds"] for part in parts if part["part"] != "gaps")
    single = [part for part in parts if part["work"]["gemv"]]
    return {
        "wall_s": wall,
        "off": abs(inside + phase["gaps_s"] - wall) / wall,
        "gaps": phase["gaps_s"] / wall,
        "looking": phase["overhead"]["ratios"],
        "gemv_share": sum(part["seconds"] for part in single) / wall,
        "gemvs": sum(part["work"]["gemv"] for part in single) / phase["tokens"],
        "gemvs_by_hand": 4 * layers + 1,  # q|k|v, out, gate|up, down; the head
        "bounds": bounds(parts, wall),
        "most": max(part["of_bound"] for part in parts if part["of_bound"] is not None),
        "rows": [
            (total["part"], total["seconds"], total["bound"], total["of_bound"])
            for total in phase["totals"]
        ],
    }


def bounds(parts: Iterable[dict[str, Any]], wall: float) -> dict[str, float]:
    """Share of the wall time by what the parts wait for, the largest first."""
    shares: dict[str, float] = defaultdict(float)
    for part in parts:
        shares[part["bound"] or "nothing counted"] += part["seconds"] / wall
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def verdict(value: float, limit: float) -> str:
    return f"at most {limit:g} wanted: {'met' if value <= limit else 'NOT met'}"


def show_phase(name: str, one: dict[str, Any]) -> str:
    looking = one["looking"]
    rows = [
        ["wall time", f"{1e3 * one['wall_s']:.2f} ms", ""],
        ["parts and gaps against it", f"{one['off']:.2e}", verdict(one["off"], ADDS_UP)],
        ["gaps", f"{one['gaps']:.2%}", verdict(one["gaps"], GAPS)],
        ["looking ÷ not looking", spread(looking, 3), f"{len(looking)} pairs in turns"],
        ["the nearest a part comes to its ceiling", f"{one['most']:.2f}",
         verdict(one["most"], 1.0)],
        ["waits for", ", ".join(f"{kind} {share:.0%}" for kind, share in one["bounds"].items()),
         ""],
    ]  # fmt: skip
    if name == "decode":
        same = "equals" if one["gemvs"] == one["gemvs_by_hand"] else "is NOT"
        rows.append(["GEMV, share of the time", f"{one['gemv_share']:.1%}", ""])
        rows.append(
            ["GEMVs a token", f"{one['gemvs']:g}", f"{same} {one['gemvs_by_hand']} by hand"]
        )
    parts = [["part", "share", "waits for", "of its ceiling"]]
    for part, seconds, bound, reached in one["rows"]:
        share = f"{seconds / one['wall_s']:.1%}"
        parts.append([part, share, bound or "", "" if reached is None else f"{reached:.0%}"])
    return table(name, rows) + "\n" + table("", parts)


def layers_of(document: dict[str, Any]) -> int:
    numbers = {part["layer"] for phase in document["phases"] for part in phase["parts"]}
    return len(numbers - {None})


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = [("smollm2", dtype) for dtype in options.dtype] + [("tiny", "float32")]
    found = []
    for model, dtype in runs:
        document = timed(model, dtype, options)
        layers = layers_of(document)
        kept = ("working_set", "working_set_in", "ceilings", "peak", "base", "estimated", "ok")
        found.append({"model": model, "dtype": dtype, "prompt": document["prompt_tokens"]} | {
            **{name: document[name] for name in kept},
            "phases": {phase["name"]: figures(phase, layers) for phase in document["phases"]},
        })  # fmt: skip
    return found


def show(runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    texts = []
    for run in runs:
        reads = ", ".join(
            f"{rate['level']} {rate['bytes_per_s'] / 1e9:.1f}" for rate in run["ceilings"]["reads"]
        )
        held = "unknown"
        if None not in (run["peak"], run["base"]):
            held = f"{(run['peak'] - run['base']) / 2**20:.0f} MiB"
        texts.append(
            f"== {run['model']}, {run['dtype']}, {options.threads} threads, a prompt of "
            f"{run['prompt']} tokens and {options.tokens} new ones\n"
            f"  reads {run['working_set'] / 1e6:.0f} MB, which lie in {run['working_set_in']}; "
            f"ceilings in GB/s: {reads}\n"
            f"  memory beside what was there before: {held}, "
            f"{run['estimated'] / 2**20:.0f} MiB estimated"
        )
        texts += [show_phase(name, one) for name, one in run["phases"].items()]
    return "\n\n".join([*texts, table("environment", list(environment(options.threads).items()))])


def main() -> None:
    parser = arguments(__doc__, pairs=20, tokens=32, prompt_bytes=1500, threads=2)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args()
    if options.pairs < PAIRS:
        parser.error(f"fewer than {PAIRS} pairs say little")
    options.text = TEXT.read_text(encoding="utf-8")[: options.prompt_bytes]
    runs = measured(options)
    print(json.dumps(runs) if options.json else show(runs, options))


if __name__ == "__main__":
    main()
