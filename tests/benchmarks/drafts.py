"""Decoding with a draft beside decoding without: a text that repeats itself, one that does not.

    python tests/benchmarks/drafts.py [-m MODEL] [--draft ngram|MODEL] [--tokens 256] [--pairs 5]
        [--threads 2] [--json]

The first text is a paragraph that stands there three times and is continued greedily, the second
a story that is sampled. Each pair is the seconds of the same tokens, the prompt read before; the
ratio is how many times as fast the draft makes it. Tokens that differ are an error.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from bench_tools import environment, spread, table

from llmcli.engine.drafts import ModelDraft, NgramDraft
from llmcli.engine.sampler import Sampler
from llmcli.engine.sampling import Sampling
from llmcli.engine.session import Session
from llmcli.engine.speculation import Speculation
from llmcli.loading.load import load
from llmcli.model import Model

PARAGRAPH = (
    "The harbour lies behind a low wall of grey stone. In the morning the boats come in one by "
    "one, and the men lift their baskets onto the quay, where the women weigh the fish and write "
    "the numbers into a book with a blue cover. At noon the bell of the church rings, the gulls "
    "rise, and for an hour nobody speaks of the weather.\n\n"
)
STORY = "Write a story about a lighthouse keeper who finds a letter."


def decoded(
    model: Model, ids: list[int], sampling: Sampling, tokens: int, speculation: Speculation | None
) -> tuple[list[int], float]:
    """The tokens behind `ids`, and the seconds that they took."""
    session = Session(model.decoder, 1, len(ids) + tokens + 16)
    session.prefill([ids])
    sampler = Sampler(
        sampling, [ids], samples=1, vocab=model.config.vocab, device=model.device, logprobs=None,
        limit=tokens,
    )  # fmt: skip
    begin = time.perf_counter()
    steps = session.decode(sampler.pick)
    if speculation is not None:
        steps = speculation.decode(session, sampler)
    found = [next(steps)[0].id for _ in range(tokens)]
    return found, time.perf_counter() - begin


def measured(
    model: Model, small: Model | None, ids: list[int], sampling: Sampling, tokens: int, pairs: int
) -> dict[str, Any]:
    """The ratios of one text, and what the draft proposed."""
    found: dict[str, Any] = {"ratios": [], "tokens_per_s": []}
    decoded(model, ids, sampling, 8, None)
    for _ in range(pairs):
        right, alone = decoded(model, ids, sampling, tokens, None)
        draft = NgramDraft() if small is None else ModelDraft(small, model)
        speculation = Speculation(draft)
        other, drafted = decoded(model, ids, sampling, tokens, speculation)
        if other != right:
            raise SystemExit("the draft changed the text")
        found["ratios"].append(alone / drafted)
        found["tokens_per_s"].append(tokens / drafted)
        found |= speculation.describe()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model)
    small = None if options.draft == "ngram" else load(options.draft)
    assert model.tokenizer is not None
    texts = {
        "repeats itself": (model.tokenizer.encode(PARAGRAPH * 3), Sampling(temperature=0)),
        "does not": (
            model.tokenizer.encode_chat([{"role": "user", "content": STORY}]), Sampling(seed=1),
        ),
    }  # fmt: skip
    found = {
        name: measured(model, small, *text, options.tokens, options.pairs)
        for name, text in texts.items()
    }
    if options.json:
        print(json.dumps({"environment": environment(options.threads), "texts": found}))
        return
    rows = [["text", "tokens/s", "times as fast", "right of proposed"]]
    for name, one in found.items():
        share = f"{one['accepted']} of {one['proposed']}"
        rows.append([name, spread(one["tokens_per_s"], 0), spread(one["ratios"]), share])
    print(table(f"{options.model}, draft {options.draft}, {options.threads} threads", rows))


if __name__ == "__main__":
    main()
