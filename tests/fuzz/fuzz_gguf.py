"""Fuzzing the GGUF header parser: whatever the bytes, a sound table or one clear error.

    python tests/fuzz/fuzz_gguf.py -max_total_time=3600 NEW_INPUTS tests/fuzz/corpus/gguf

needs atheris (a coverage-guided fuzzer, `pip install atheris`) and tries many thousands of files
a second; NEW_INPUTS is a directory for what it finds interesting. The fixed corpus is replayed
by test_corpus.py without it.
"""

import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the parser is imported: its branches are counted
    import atheris

    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    with atheris.instrument_imports(include=["llmcli.checkpoints"]):
        import llmcli.checkpoints.gguf  # noqa: F401

from fuzzing import fuzz, sound
from gguf_bytes import ARRAY, STRING, gguf, pair, tensor, text

from llmcli.checkpoints.gguf import parse_gguf

HERE = Path("model.gguf")
EDGES = [
    *(0, 1, 2, 3, 4, 7, 8, 31, 32, 33, 63, 255, 256, 512, 513, 2**16 - 1, 2**16, 2**20, 2**20 + 1),
    *(2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**63 + 1),
    *(2**64 - 512, 2**64 - 64, 2**64 - 32, 2**64 - 8, 2**64 - 1),
]


def check(data: bytes) -> bool:
    """Parse; whether the file was accepted. Anything but a sound result or one error raises."""
    if (found := sound(lambda: parse_gguf(HERE, data))) is None:
        return False
    metadata, tensors = found
    assert all(isinstance(key, str) for key in metadata)
    assert all(type(value) in (int, float, bool, str, list) for value in metadata.values())
    spans = sorted((t.offset, t.offset + t.nbytes) for t in tensors.values())
    assert all(0 < begin < end <= len(data) for begin, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    return True


def in_proportion(check: Callable[[bytes], Any], data: bytes) -> Any:
    """What `check` says of a file, which takes no more memory than such a file may."""
    tracemalloc.start()
    found = check(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000 + 100 * len(data)
    return found


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """What the fuzzer's own changes hardly reach: whole pairs and tensors, and edges as numbers."""
    dice = random.Random(seed)
    content = bytearray(data[:most])
    if len(content) < 24:
        return gguf()[:most]
    for _ in range(dice.randint(1, 3)):
        how, at = dice.random(), dice.randrange(4, len(content) + 1)
        if how < 0.35:
            struct.pack_into("<Q", content, min(at, len(content) - 8), dice.choice(EDGES))
        elif how < 0.5:
            small = dice.choice([*range(45), 2**16, 2**30, 2**32 - 1])
            struct.pack_into("<I", content, min(at, len(content) - 4), small)
        elif how < 0.6:
            del content[at : at + dice.randint(1, 64)]
        elif how < 0.7:
            content[at:at] = bytes(dice.choice([1, 8, 32, 64, 512]))
        else:
            where = 16 if how < 0.9 else 8  # one more pair, one more tensor
            table = _pair(dice) if where == 16 else _tensor(dice)
            content[24:24] = table if where == 16 or not any(content[16:24]) else b""
            count = (struct.unpack_from("<Q", content, where)[0] + 1) % 2**64
            struct.pack_into("<Q", content, where, count)
        if len(content) < 24:
            break
    return bytes(content[:most])


def _pair(dice: random.Random) -> bytes:
    key = dice.choice(["general.alignment", "split.count", "split.no", "k", "é\n", "x" * 70])
    kind = dice.choice([*range(13), 13, 2**31])
    if kind == ARRAY:
        inner = dice.choice([*range(13), 99])
        count = dice.choice([0, 1, 2, 3, dice.choice(EDGES)])
        body = b"".join(text(b"t" * i) for i in range(3)) if inner == STRING else bytes(24)
        return text(key) + struct.pack("<IIQ", ARRAY, inner, count) + body
    if kind > 12:
        return text(key) + struct.pack("<IQ", kind, dice.choice(EDGES))
    try:
        return pair(key, kind, "s" * dice.randrange(40) if kind == STRING else dice.choice(EDGES))
    except struct.error:
        return pair(key, kind, 1)


def _tensor(dice: random.Random) -> bytes:
    dims = [dice.choice([*EDGES, 32, 256, 1, 1]) for _ in range(dice.choice([1, 1, 2, 3, 4, 5]))]
    offset = dice.choice([0, 0, 32, 64, *EDGES])
    rank = dice.choice([None, None, None, 0, 2**32 - 1])
    return tensor(dice.choice("abc"), dims, dice.randrange(45), offset, rank=rank)


if __name__ == "__main__":
    fuzz(check, mutate)
