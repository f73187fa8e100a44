"""What a turn of a conversation costs beyond its new tokens, and what memory a long one takes.

    python tests/benchmarks/chat_turns.py [--model smollm2] [--turns 10] [--runs 5] [--json]

Each run is a conversation in a fresh process: messages of a hundred words, answers of 64 tokens.
Of every turn the seconds from the message to the first token (template, tokens, prompt), and those
that reading its new tokens alone takes, right after it behind the same past; and what is resident
beside the cache. Ends with 1 where the last turn's first token takes more than 0.15 s longer than
its new tokens, or memory grows by more than the cache and 8 MiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from bench_tools import environment, run_python, spread, table

MOST_S, MOST_BYTES = 0.15, 8 << 20

CODE = """
import gc, json, time, torch
torch.set_num_threads({threads})
from llmcli.checkpoints import open_model
from llmcli.engine.conversation import Conversation
from llmcli.engine.sampling import Sampling
from llmcli.loading.load import load_checkpoint
from llmcli.observe.peaks import resident_bytes
from llmcli.text.template_renderer import RENDERER

words = "apple river stone winter candle market window garden letter engine".split()
model = load_checkpoint(open_model({spec!r}, offline=True), device="cpu", dtype={dtype!r})
turns = []
with RENDERER:
    talk = Conversation(model, room=model.config.context)
    for turn in range({turns}):
        talk.say(" ".join(words[(turn + 3 * i) % len(words)] for i in range({words})))
        begin = time.perf_counter()
        answer = talk.answer(Sampling(seed=1), limit={new})
        next(answer)
        first = time.perf_counter() - begin
        list(answer)
        gc.collect()
        resident, session, bare = resident_bytes(), talk._session, []
        prompt, new = talk.tokens.prompt, talk.tokens.computed
        (ids,) = session.ids
        for _ in range(3):  # once more, right after, as the machine is now
            session.rewind(prompt - new)
            begin = time.perf_counter()
            session.prefill([ids[prompt - new:prompt]])
            bare.append(time.perf_counter() - begin)
        session.prefill([ids[prompt:]])
        turns.append(dict(
            first=first, bare=sorted(bare)[1], prompt=prompt, new=new,
            cache=session.state.nbytes, resident=resident,
        ))
print(json.dumps(turns))
"""


def measured(options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The turns of every run."""
    code = CODE.format(
        threads=options.threads, spec=options.model, dtype=options.dtype, turns=options.turns,
        words=options.words, new=options.tokens,
    )  # fmt: skip
    runs = range(options.runs)
    return [json.loads(run_python(code, threads=options.threads).stdout) for _ in runs]


def beyond_cache(run: list[dict[str, Any]]) -> int:
    """Bytes by which memory grew from the second turn to the last, beyond the cache.

    In the first one libraries allocate what they keep.
    """
    first, last = (turn["resident"] - turn["cache"] for turn in (run[1], run[-1]))
    return int(last - first)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = measured(options)
    extra = [run[-1]["first"] - run[-1]["bare"] for run in runs]
    grown = [beyond_cache(run) for run in runs]
    if options.json:
        print(json.dumps({"environment": environment(options.threads), "runs": runs}, indent=1))
    else:
        rows = [["turn", "prompt", "new", "first token", "its new tokens", "cache", "beside it"]]
        for number, turn in enumerate(runs[0], 1):
            rows.append([
                str(number), f"{turn['prompt']:,}", str(turn["new"]), f"{turn['first']:.3f} s",
                f"{turn['bare']:.3f} s", f"{turn['cache'] / 2**20:.1f} MiB",
                f"{(turn['resident'] - turn['cache']) / 2**20:.1f} MiB",
            ])  # fmt: skip
        print(table(f"{options.model}, {options.threads} threads, the first of the runs", rows))
        rows = [
            ["first token beyond its new tokens, last turn", spread([1000 * s for s in extra], 1),
             "ms"],
            ["memory beyond the cache, turn 2 to the last", spread([n / 2**20 for n in grown], 1),
             "MiB"],
        ]  # fmt: skip
        print(table(f"{options.runs} runs", rows))
        print(", ".join(f"{name} {value}" for name, value in environment(options.threads).items()))
    slow = statistics.median(extra) > MOST_S
    return int(slow or statistics.median(grown) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
