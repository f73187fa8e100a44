"""Single wrong bits in a file's weights: what they do to the text, and what `load --check` finds.

    python tests/benchmarks/flipped_bits.py [--formats Q4_1 BF16] [--flips 1000] [--json]

SmolLM2 as it is published (Q4_1, its embedding in Q8_0), and the same numbers in bfloat16. Each
flip is drawn uniformly over the bits of all tensors; the file is not written: the bit is turned
where the checkpoint is read, so that loader and check run as they are. `text`: one of the 32 greedy
tokens after two prompts is another (their own tokens are read in one pass). `ruin`: the
log-probabilities of a page move by more than 0.1 on average. A flip is found where the scan sees
a number that is not finite, or an outlier; the sha256 of a file of the catalog finds every one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from bench_tools import ROOT, environment, table
from packed import requantized
from torch import Tensor

from llmcli.checkpoints import Checkpoint, open_checkpoint, open_model
from llmcli.commands.load.measure.numbers import stored_numbers
from llmcli.engine.session import Session
from llmcli.loading.filling import fill
from llmcli.loading.load import configured, fitting_plan, load_checkpoint
from llmcli.model import Model, Stages

QUESTIONS = ("What is the capital of France?", "Why is the sky blue?")
ANSWER = 32
RUIN = 0.1


class Flipped:
    """A checkpoint of which one bit is read as the other."""

    def __init__(self, checkpoint: Checkpoint, name: str, bit: int) -> None:
        self._checkpoint, self._name, self._bit = checkpoint, name, bit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """As the checkpoint's own."""
        data = self._checkpoint.read(name, start, stop)
        if name == self._name and start <= self._bit // 8 < stop:
            data[self._bit // 8 - start] ^= 1 << self._bit % 8
        return data


def logits_of(model: Model, ids: Tensor) -> Tensor:
    """`[B, T, V]`, of all sequences in one pass."""
    return model.decoder(ids, Session(model.decoder, len(ids), ids.shape[1]).state)


def measured(path: Path, flips: int, seed: int) -> list[dict[str, Any]]:
    """What became of each flip."""
    checkpoint = open_checkpoint(path)
    config, rules = configured(checkpoint)
    loads = defaultdict(list)
    for load_ in fitting_plan(checkpoint, rules, config).loads:
        loads[load_.source].append(load_)
    model = load_checkpoint(checkpoint)
    assert model.tokenizer is not None
    answers, first = [], []
    for question in QUESTIONS:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": question}])
        first.append(len(ids) - 1)
        for _ in range(ANSWER):
            ids = [*ids, int(logits_of(model, torch.tensor([ids]))[0, -1].argmax())]
        answers.append(ids)
    most = max(map(len, answers))
    page = model.tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))[:most]
    together = torch.tensor([page, *(ids + [0] * (most - len(ids)) for ids in answers)])

    def looked() -> tuple[Tensor, list[Tensor]]:
        logits = logits_of(model, together)
        after = logits[0, :-1].double().log_softmax(-1).gather(1, together[0, 1:, None])
        rows = enumerate(first)
        return after, [logits[1 + i, at : at + ANSWER].argmax(-1) for i, at in rows]

    page_of, words_of = looked()
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    draw = random.Random(seed)
    found = []
    for info in checkpoint.tensors.values():
        _, odd = stored_numbers(checkpoint, info) or (None, [])
        assert not odd, f"a false alarm: {odd}"
    for _ in range(flips):
        bit = draw.randrange(8 * total)
        for info in checkpoint.tensors.values():
            if bit < 8 * info.nbytes:
                break
            bit -= 8 * info.nbytes
        name = info.name
        wrong: Any = Flipped(checkpoint, name, bit)
        numbers, odd = stored_numbers(wrong, info) or (None, [])
        assert numbers is not None
        finite = numbers.finite == numbers.count
        for load_ in loads[name]:
            fill(model.decoder.weight(load_.target), wrong, load_, Stages())
        page_now, words_now = looked()
        moved = float((page_now - page_of).abs().mean())
        same = all(torch.equal(one, two) for one, two in zip(words_of, words_now, strict=True))
        for load_ in loads[name]:
            fill(model.decoder.weight(load_.target), checkpoint, load_, Stages())
        found.append({
            "tensor": name, "format": info.format, "bit": bit, "found": bool(odd) or not finite,
            "text": not same, "moved": moved, "ruin": not moved <= RUIN,  # NaN is ruin, too
        })  # fmt: skip
    assert torch.equal(looked()[0], page_of), "everything is as it was"
    return found


def counts(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """How many there are of each kind, and how many of these are found."""
    kinds = {
        "all": rows,
        "text": [row for row in rows if row["text"]],
        "|Δ| > 0.01": [row for row in rows if not row["moved"] <= 0.01],
        "ruin": [row for row in rows if row["ruin"]],
    }
    return {kind: (len(of), sum(row["found"] for row in of)) for kind, of in kinds.items()}


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=["Q4_1", "BF16"])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/packed-models"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    source = open_model("smollm2").path
    results, body = {}, []
    for name in args.formats:
        path = source if name == "Q4_1" else args.folder / f"smollm2-{name}.gguf"
        if not path.exists():
            requantized(source, name, path)
        begin = time.perf_counter()
        results[name] = measured(path, args.flips, args.seed)
        took = time.perf_counter() - begin
        cells = [f"{found} of {of}" for of, found in counts(results[name]).values()]
        body.append((name, *cells, "0", f"{took:.0f} s"))
    if args.json:
        print(json.dumps({"environment": environment(torch.get_num_threads()), "rows": results}))
        return 0
    heads = ("format", *(f"found of {kind}" for kind in counts([])), "false alarms", "time")
    print(table(f"SmolLM2, {args.flips} flips", [heads, *body]))
    print(environment(torch.get_num_threads()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
