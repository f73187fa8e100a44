"""Random numbers that depend only on (seed, sequence, step)."""

from __future__ import annotations

from hashlib import blake2b


def uniforms(seed: int, sequence: int, start: int, count: int) -> list[float]:
    """Return `count` numbers in [0, 1) of one sequence, from step `start` on.

    Each is a hash of (seed, sequence, step): the upper 53 bits of eight bytes of BLAKE2b,
    independent of other draws. `sequence` is the index of a prompt's sample: all prompts of a batch
    use 0, like each alone.
    """
    key = f"llmcli {sample_seed(seed, sequence)} ".encode()
    steps = (b"%d" % step for step in range(start, start + count))
    return [_hash(key + step) * 2.0**-53 for step in steps]


def sample_seed(seed: int, sequence: int) -> int:
    """Return the seed with which a single run reproduces sample `sequence` of a run with `seed`.

    Sample 0 has `seed` itself; other seeds are hashes (53 bits, exact in any JSON reader) rather
    than `seed + sequence`, so that runs with adjacent seeds share no texts.
    """
    return seed if sequence == 0 else _hash(f"llmcli sample {seed} {sequence}".encode())


def _hash(message: bytes) -> int:
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 11
