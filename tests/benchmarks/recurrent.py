"""Recurrent models of random weights: decode and prompts beside transformers, and the slow twin.

    python tests/benchmarks/recurrent.py [--models qwen mamba2] [--depths 0 8192] [--prompt 4096]
        [--dtype auto] [--steps 16] [--runs 7] [--threads 2] [--folder FOLDER] [--json]

Small models with the blocks of Qwen3.5-0.8B (six of gated DeltaNet, two of gated attention) and of
Mamba2-130M (half of its blocks), which transformers writes into `--folder` once, in bfloat16. Both
engines read them in one process, ours in `--dtype`, transformers in bfloat16 (with `float32` in
that) with its own PyTorch code. Steps and prompts are made in turns, so that a slow spell of the
machine meets both; a ratio is that of two neighbours, shown as the median with the lowest and
highest. `twin`: the same prompt, its recurrences by `recur_steps` and all else as ever; and the
recurrences alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_tools import environment, spread, table

from llmcli.checkpoints import open_model
from llmcli.engine.session import Session
from llmcli.loading.load import load_checkpoint
from llmcli.nn import recurrent
from llmcli.ops.recurrence import recur_steps

DECODE_TARGET, PREFILL_TARGET, TWIN_TARGET = 1.4, 1.5, 10.0
BLOCK = ["linear_attention"] * 3 + ["full_attention"]
SHARED = {"vocab_size": 32000, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("qwen3_5_text", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "layer_types": 2 * BLOCK,
        "pad_token_id": None, "max_position_embeddings": 32768,
    }),
    "mamba2": ("mamba2", {
        "hidden_size": 768, "num_hidden_layers": 12, "num_heads": 24, "head_dim": 64,
        "n_groups": 1, "state_size": 128, "expand": 2, "pad_token_id": 0,
    }),
}  # fmt: skip


def made(folder: Path, model: str) -> Path:
    """The checkpoint, which is written where it is not there."""
    path = folder / model
    if not path.exists():
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        kind, settings = MODELS[model]
        config = AutoConfig.for_model(kind, **SHARED, **settings)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


class Ours:
    """A session of one sequence; it chooses the most likely token."""

    def __init__(self, path: Path, capacity: int, dtype: str) -> None:
        self.decoder = load_checkpoint(open_model(str(path)), dtype=dtype).decoder
        self.capacity = capacity

    def read(self, ids: Sequence[int]) -> None:
        self.session = Session(self.decoder, 1, self.capacity)
        self.session.prefill([list(ids)])

    def step(self) -> None:
        self.session.extend(self.session.logits_BV.argmax(-1, keepdim=True))


class Theirs:
    """The model of transformers with the cache that it makes."""

    def __init__(self, path: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        own = torch.float32 if dtype == "float32" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=own).eval()

    def read(self, ids: Sequence[int]) -> None:
        self.cache: dict[str, Any] = {}
        self._forward(torch.tensor([list(ids)]))

    def step(self) -> None:
        self._forward(self.logits.argmax(-1))

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        out = self.model(ids, use_cache=True, logits_to_keep=1, **self.cache)
        names = ("past_key_values", "cache_params")
        self.cache = {name: out[name] for name in names if out.get(name) is not None}
        self.logits = out.logits[:, -1:]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(runs: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Seconds of each, `runs` times after a first time that does not count."""
    found: list[list[float]] = [[] for _ in calls]
    for run in range(runs + 1):
        for at, call in list(enumerate(calls))[:: 1 if run % 2 else -1]:
            one = seconds(call)
            if run:
                found[at].append(one)
    return found


def decode(ours: Ours, theirs: Theirs, depth: int, steps: int, runs: int) -> list[list[float]]:
    """Seconds of a step of each, of `steps` together, behind a prompt of that many tokens."""
    ids = prompt(max(depth, 2))
    for engine in (ours, theirs):
        engine.read(ids)
        for _ in range(3):  # the first ones are no like the others: ours records the second
            engine.step()

    def some(engine: Ours | Theirs) -> Callable[[], None]:
        return lambda: [engine.step() for _ in range(steps)] and None

    return [[one / steps for one in all_] for all_ in in_turns(runs, some(ours), some(theirs))]


def prompt(length: int) -> list[int]:
    """So many random tokens."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 32000, (length,), generator=generator).tolist()


def by_twin(ours: Ours, ids: Sequence[int]) -> None:
    """The prompt with recurrences token by token."""
    usual = recurrent.recur
    recurrent.recur = recur_steps
    try:
        ours.read(ids)
    finally:
        recurrent.recur = usual


def scans(ours: Ours, ids: Sequence[int]) -> list[list[float]]:
    """Seconds of the recurrences alone, of all layers: as they run, and by the twin."""
    usual, found = recurrent.recur, []
    for scan in (usual, recur_steps):
        spent = [0.0]

        def timed(*args: Any, scan: Any = scan, spent: list[float] = spent) -> Any:
            begin = time.perf_counter()
            out = scan(*args)
            spent[0] += time.perf_counter() - begin
            return out

        recurrent.recur = timed
        try:
            ours.read(ids)
        finally:
            recurrent.recur = usual
        found.append(spent)
    return found


def row(name: str, found: list[list[float]], each: float, target: float) -> tuple[str, ...]:
    """Rates of both by their medians, and the ratio of neighbours."""
    ours, theirs = found
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    rates = (f"{each / statistics.median(one):.1f}" for one in (ours, theirs))
    return name, *rates, spread(ratios), f"≥ {target}"


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--depths", nargs="*", type=int, default=[0, 8192])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path("/tmp/recurrent"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, results = [], []
    for model in args.models:
        path = made(args.folder, model)
        room = max(args.prompt, *args.depths) + (args.runs + 2) * args.steps + 8
        ours, theirs = Ours(path, room, args.dtype), Theirs(path, args.dtype)
        tests = []
        for depth in args.depths:
            found = decode(ours, theirs, depth, args.steps, args.runs)
            tests.append((f"decode after {depth}", found, 1, DECODE_TARGET))
        if args.prompt:
            ids, few, name = prompt(args.prompt), max(args.runs // 3, 1), f"prompt of {args.prompt}"
            usual, slow = partial(ours.read, ids), partial(by_twin, ours, ids)
            found = in_turns(few, usual, partial(theirs.read, ids))
            tests.append((name, found, args.prompt, PREFILL_TARGET))
            found = in_turns(1, usual, slow)
            tests.append((f"{name} beside the twin", found, args.prompt, TWIN_TARGET))
            found = scans(ours, ids)
            tests.append(("its recurrences alone", found, args.prompt, TWIN_TARGET))
        for name, found, each, target in tests:
            rows.append((model, *row(name, found, each, target)))
            results.append({"model": model, "test": name, "seconds": found, "target": target})
    if args.json:
        print(json.dumps({"environment": environment(args.threads), "results": results}))
        return 0
    heads = ("model", "test", "tokens/s", "theirs", "ratio", "wanted")
    print(table("beside transformers, in turns", [heads, *rows]))
    print(environment(args.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
