"""Time to open GGUF files with vocabularies of 262k tokens: the header, then the tokenizer.

PYTHONPATH=tests python tests/benchmarks/open_vocabulary.py [--runs 7] [--json]

One file as Gemma's (SentencePiece: tokens, scores and types), one as of a byte-level BPE with
450k merges besides; written for the run. The interpreter's start and imports are not counted;
the best of the runs is held against the limit, because a busy machine only ever adds. Exits 1
where the first file takes longer than 0.2 s.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_tools import arguments, spread, table
from gguf_bytes import ARRAY, F32, I32, STRING, gguf, pair

from llmcli.checkpoints import open_checkpoint
from llmcli.text.load import load_tokenizer
from llmcli.text.spelling import byte_letters

TOKENS, MERGES = 262_144, 450_000
LIMIT = 0.2  # seconds, header and tokenizer together


def _words(dice: random.Random, begin: list[str]) -> list[str]:
    """Made-up words of 2 to 10 letters after `begin`, unique; their lengths are as of real ones."""
    words = dict.fromkeys(begin)
    while len(words) < TOKENS:
        letters = dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))
        words["▁" * dice.randrange(2) + "".join(letters)] = None
    return list(words)


def sentencepiece(path: Path) -> None:
    """A file with tokens, scores and types."""
    begin = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = _words(random.Random(0), begin)
    scores = pair("tokenizer.ggml.scores", ARRAY, (F32, [-float(i) for i in range(TOKENS)]))
    types = [2, 3, 3] + [6] * 256 + [1] * (TOKENS - 259)
    _write(path, "llama", tokens, scores, types=types)


def byte_level(path: Path) -> None:
    """A file with tokens, types and merges: all words over eight letters, all ways to cut them."""
    tokens = list(byte_letters())
    for length in range(2, 7):
        tokens += ["".join(word) for word in itertools.product("abcdefgh", repeat=length)]
    tokens = tokens[:TOKENS]
    merges = [f"{word[:at]} {word[at:]}" for word in tokens for at in range(1, len(word))]
    more = (
        pair("tokenizer.ggml.pre", STRING, "llama-bpe"),
        pair("tokenizer.ggml.merges", ARRAY, (STRING, merges[:MERGES])),
    )
    _write(path, "gpt2", tokens, *more, types=[1] * TOKENS)


def _write(path: Path, kind: str, tokens: list[str], *more: bytes, types: list[int]) -> None:
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("tokenizer.ggml.model", STRING, kind),
        pair("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        pair("tokenizer.ggml.token_type", ARRAY, (I32, types)),
    ]
    path.write_bytes(gguf([*pairs, *more]))


def opened(path: Path) -> tuple[float, float]:
    """Seconds of (header, tokenizer)."""
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    middle = time.perf_counter()
    if load_tokenizer(checkpoint) is None:
        raise SystemExit("no tokenizer")
    return middle - start, time.perf_counter() - middle


def main() -> None:
    """Prints both files' times; exits 1 where the limit is not kept."""
    options = arguments(__doc__, runs=7).parse_args()
    kinds = {"SentencePiece": sentencepiece, "byte-level BPE, 450k merges": byte_level}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    with TemporaryDirectory() as folder:
        for write in kinds.values():
            write(Path(folder) / f"{write.__name__}.gguf")
            opened(Path(folder) / f"{write.__name__}.gguf")  # imports
        for _ in range(options.runs):
            for name, write in kinds.items():
                seconds[name].append(opened(Path(folder) / f"{write.__name__}.gguf"))
    best = {name: min(header + rest for header, rest in runs) for name, runs in seconds.items()}
    if options.json:
        print(json.dumps({"limit": LIMIT, "best": best, "seconds": seconds}))
    else:
        rows = [["file", "header s", "tokenizer s", "best together"]]
        for name, runs in seconds.items():
            header, rest = zip(*runs, strict=True)
            rows.append([name, spread(header, 3), spread(rest, 3), f"{best[name]:.3f}"])
        print(table(f"{TOKENS} tokens, limit {LIMIT} s", rows))
    sys.exit(best["SentencePiece"] > LIMIT)


if __name__ == "__main__":
    main()
