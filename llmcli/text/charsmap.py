"""Validates SentencePiece's replacement table (`precompiled_charsmap`) before C++ reads it.

Layout (google/sentencepiece, normalizer.cc; darts-clone, darts.h): a little-endian u32 with the
size of the trie in bytes, the trie as u32 units, then replacement strings that end with NUL. The
library follows the trie's offsets without checking them.
"""

from __future__ import annotations

from llmcli.errors import CheckpointError

_BLOCK = 256  # units: a step is an XOR with one byte, which stays in the block
_HINT = "the file is damaged; fetch or convert it again"


def check_charsmap(data: bytes) -> None:
    """Raise CheckpointError unless every lookup in the table stays inside it.

    An empty table is valid.
    """
    if not data:
        return
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    if len(data) <= 4 + size or size == 0 or size % (4 * _BLOCK):
        raise CheckpointError("the table of replacements has an impossible size", hint=_HINT)
    units = np.frombuffer(data, "<u4", size // 4, offset=4).astype(np.int64)
    texts = data[4 + size :]
    at = np.arange(len(units))
    is_value = units >= 1 << 31
    offset = (units >> 10) << ((units >> 6) & 8)
    target = np.where(is_value, 0, at ^ offset)
    if (target >= len(units)).any():
        raise CheckpointError("the table of replacements has an offset outside of it", hint=_HINT)
    # Units with bit 8 have a value, in the unit at their offset.
    values = units[target[~is_value & ((units >> 8) & 1 == 1)]] & 0x7FFFFFFF
    if (values >= len(texts)).any() or texts[-1:] != b"\0":
        raise CheckpointError("the table of replacements has a text outside of it", hint=_HINT)
