"""Random numbers that depend on (seed, sequence, step) and on nothing else."""

from __future__ import annotations

from hashlib import blake2b


def uniforms(seed: int, sequence: int, start: int, count: int) -> list[float]:
    """Return `count` numbers in [0, 1), those of steps `start` and on of one sequence.

    Each is a hash of (seed, sequence, step), the upper 53 bits of eight bytes of BLAKE2b, and
    nothing else: it does not matter what else is drawn, before it or beside it. `sequence` is
    the number of the sample of a prompt: all prompts of a batch draw with 0, as each does alone.
    """
    key = f"llmcli {sample_seed(seed, sequence)} ".encode()
    steps = (b"%d" % step for step in range(start, start + count))
    return [_hash(key + step) * 2.0**-53 for step in steps]


def sample_seed(seed: int, sequence: int) -> int:
    """Return the seed that alone gives what sample `sequence` of a run with `seed` gives.

    Sample 0 is the run without further samples; the others' seeds are hashes (53 bits, exact
    in any JSON reader) and not `seed + sequence`, so that runs with neighbouring seeds share
    no texts.
    """
    return seed if sequence == 0 else _hash(f"llmcli sample {seed} {sequence}".encode())


def _hash(message: bytes) -> int:
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 11
