"""llmcli against transformers on the same weights: decode, prefill, first token, memory.

    python tests/benchmarks/generate_vs_transformers.py [--dtype bfloat16] [--json]

Both read one GGUF file (SmolLM2 unless `--model` names another Llama), compute in the same dtype
with the same number of threads and generate the same number of greedy tokens, end-of-text
ignored. Runs are interleaved in one process, in alternating order, so that a slow spell of the
machine meets both; the ratio is taken pair by pair. First token and peak memory (VmHWM) are those
of fresh processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_tools import ROOT, arguments, environment, run_llmcli, run_python, spread, table

# the working tree's llmcli, and the parity tests' reading of a GGUF into transformers
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "parity")]

# ruff: noqa: E402
from parity_smollm2 import transformers_from_gguf

from llmcli.checkpoints import open_model
from llmcli.engine.sampling import Sampling
from llmcli.engine.stream import TextRequest, stream
from llmcli.loading.load import load_checkpoint
from llmcli.model import Model

DECODE_TARGET, PREFILL_TARGET, MEMORY_TARGET = 1.4, 1.0, 1.3
PROMPT = "The capital of France is"


class Clock:
    """A transformers streamer that only notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def decode_theirs(model: Any, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
    """Tokens per second between the first new token and the last; the tokens."""
    clock, ids = Clock(), torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0, streamer=clock,
    )  # fmt: skip
    # the prompt itself is put first
    return (tokens - 1) / (clock.times[-1] - clock.times[1]), out[0, len(prompt) :].tolist()


def decode_ours(model: Model, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
    times, ids = [], []
    request = TextRequest(
        prompts=[prompt], sampling=Sampling(temperature=0), limit=tokens, ignore_eos=True
    )
    for token in stream(model, request):
        times.append(time.perf_counter())
        ids.append(token.id)
    return (tokens - 1) / (times[-1] - times[0]), ids


@torch.inference_mode()
def prefill_theirs(model: Any, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return ids.shape[1] / (time.perf_counter() - start)


def prefill_ours(model: Model, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model.decoder(ids, model.decoder.new_state(1, ids.shape[1]), logits="last")
    return ids.shape[1] / (time.perf_counter() - start)


def interleave(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> dict[str, list[float]]:
    """Both once unmeasured, then `pairs` pairs in alternating order."""
    ours(), theirs()
    rates: dict[str, list[float]] = {"llmcli": [], "transformers": [], "ratio": []}
    for i in range(pairs):
        if i % 2:
            b, a = theirs(), ours()
        else:
            a, b = ours(), theirs()
        rates["llmcli"].append(a)
        rates["transformers"].append(b)
        rates["ratio"].append(a / b)
    return rates


def speeds(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    ours = load_checkpoint(open_model(str(path)), device="cpu", dtype=options.dtype)
    theirs = transformers_from_gguf(path, dtype)
    theirs.set_attn_implementation("sdpa")
    theirs.generation_config.eos_token_id = None
    assert ours.tokenizer is not None
    prompt = ours.tokenizer.encode(PROMPT)
    texts: dict[str, list[int]] = {}

    def decode(side: str, run: Callable[..., tuple[float, list[int]]], model: Any) -> float:
        rate, texts[side] = run(model, prompt, options.tokens)
        return rate

    page = torch.randint(ours.config.vocab, (1, options.prompt_tokens))
    report: dict[str, Any] = {
        "decode": interleave(
            lambda: decode("llmcli", decode_ours, ours),
            lambda: decode("transformers", decode_theirs, theirs),
            options.pairs,
        ),
        "prefill": interleave(
            lambda: prefill_ours(ours, page), lambda: prefill_theirs(theirs, page), options.pairs
        ),
    }
    same = [a == b for a, b in zip(texts["llmcli"], texts["transformers"], strict=True)]
    report["same_tokens"] = same.index(False) if False in same else len(same)
    report["weight_bytes"] = ours.weight_bytes
    return report


def fresh(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """First token and memory of fresh `llmcli generate` processes, medians over the runs."""
    arguments = ["generate", PROMPT, "-m", str(path), "--raw", "--greedy", "--json",
                 "--dtype", options.dtype, "--threads", str(options.threads)]
    runs: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        runs.setdefault(name, []).append(value)

    torch_only = "import torch; torch.ones(2) + 1"
    for _ in range(options.pairs):
        note("python", run_python("pass").seconds)
        bare = run_python(torch_only, threads=options.threads)
        note("python + torch", bare.seconds)
        note("torch_bytes", bare.peak)
        first = run_llmcli([*arguments, "-n", "1"], threads=options.threads)
        timings = json.loads(first.stdout)["timings"]
        note("llmcli, one token", first.seconds)
        note("of it load", timings["load_s"])
        note("of it first token after load", timings["first_token_s"])
        longer = run_llmcli([*arguments, "-n", "32", "--ignore-eos"], threads=options.threads)
        note("peak_bytes", longer.peak)
    return runs


def show(report: dict[str, Any], options: argparse.Namespace) -> str:
    rows = [["", "llmcli tok/s", "transformers tok/s", "ratio", "wanted"]]
    for name, target in (("decode", DECODE_TARGET), ("prefill", PREFILL_TARGET)):
        rates = report[name]
        met = "met" if statistics.median(rates["ratio"]) >= target else "NOT met"
        rows.append([name, *(spread(rates[side], 1) for side in ("llmcli", "transformers")),
                     spread(rates["ratio"]), f"{target:.1f} {met}"])
    parts = [table(
        f"{options.dtype}, {options.threads} threads, {options.pairs} interleaved pairs:"
        f" {options.tokens} greedy tokens, a prompt of {options.prompt_tokens}", rows),
        f"  greedy tokens equal: {report['same_tokens']} of {options.tokens}"]
    runs = report["fresh"]
    seconds = [[name, spread(values, 2)] for name, values in runs.items() if "_bytes" not in name]
    parts.append(table("first token, seconds of a fresh process", seconds))
    peak, bare = (statistics.median(runs[key]) for key in ("peak_bytes", "torch_bytes"))
    whole = report["weight_bytes"] + bare
    met = "met" if peak <= MEMORY_TARGET * whole else "NOT met"
    memory = [[name, f"{value / 2**20:.0f} MiB"] for name, value in (
        ("weights in their final format", report["weight_bytes"]),
        ("interpreter with torch", bare), ("llmcli generate, VmHWM", peak))]
    memory.append(["ratio", f"{peak / whole:.2f}, at most {MEMORY_TARGET} wanted: {met}"])
    parts.append(table("peak memory", memory))
    parts.append(table("environment", [[k, v] for k, v in report["environment"].items()]))
    return "\n\n".join(parts)


def main() -> None:
    parser = arguments(__doc__, pairs=5, tokens=64, prompt_tokens=512, threads=2)
    parser.add_argument("-m", "--model", help="a Llama in GGUF (default: the catalog's smollm2)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (path,) = open_model(options.model).files
    report: dict[str, Any] = {"environment": environment(options.threads)}
    report["options"] = vars(options) | {"model": path.name}
    report |= speeds(options, path)
    report["fresh"] = fresh(options, path)
    print(json.dumps(report) if options.json else show(report, options))


if __name__ == "__main__":
    main()
