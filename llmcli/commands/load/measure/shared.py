"""Matrices that are there twice, or that two parameters share."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.commands.load.report import Shared
from llmcli.config import ModelConfig

_SAMPLE = 4096  # bytes of the beginning, the middle and the end that are compared first
_PIECE = 1 << 22


def shared_tensors(
    checkpoint: Checkpoint, config: ModelConfig | None, weight_bytes: int | None
) -> Iterator[Shared]:
    """A tied head, of which `weight_bytes` are in memory; then stored matrices that are equal.

    Vectors are left out: norms are all ones in many a model. Tensors are read whole only where
    samples of them are equal.
    """
    if config is not None and config.head.tied:
        yield Shared(kind="tied", names=("head.W", "embed.W"), bytes=weight_bytes or 0)
    alike: dict[Hashable, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        if len(info.shape) > 1 and info.nbytes:
            alike.setdefault(_sample(checkpoint, info), []).append(info)
    for group in alike.values():
        if len(group) < 2:
            continue
        same: dict[bytes, list[TensorInfo]] = {}
        for info in group:
            same.setdefault(_digest(checkpoint, info), []).append(info)
        for equal in same.values():
            if len(equal) > 1:
                names = tuple(info.name for info in equal)
                yield Shared(kind="equal", names=names, bytes=equal[0].nbytes)


def _sample(checkpoint: Checkpoint, info: TensorInfo) -> Hashable:
    """What equal tensors have in common, and few others."""
    starts = (0, info.nbytes // 2, max(0, info.nbytes - _SAMPLE))
    pieces = (
        bytes(checkpoint.read(info.name, start, min(start + _SAMPLE, info.nbytes)))
        for start in starts
    )
    return info.format, info.shape, hashlib.blake2b(b"".join(pieces)).digest()


def _digest(checkpoint: Checkpoint, info: TensorInfo) -> bytes:
    found = hashlib.blake2b()
    for start in range(0, info.nbytes, _PIECE):
        found.update(checkpoint.read(info.name, start, min(start + _PIECE, info.nbytes)))
    return found.digest()
