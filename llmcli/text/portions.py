"""Splits a long text so that its parts have the tokens of the whole.

The `tokenizers` library takes about 200 bytes of memory per byte of text. Byte-level vocabularies
split a text into words before merging and never merge across words: a split between two words,
before the space, does not change the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmcli.text.pretokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    import tokenizers

PORTION = 1 << 17  # characters of a part: 25 MiB while encoding
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
# An added token that may touch or cross a split point.
_TOUCHING_WORDS = re.compile("^ ?[A-Za-z]|[A-Za-z] |[A-Za-z]$")
# Expressions without lookbehind; tests check that all of them split here.
_KNOWN = frozenset(pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns)
_PROBE = "ab cd"
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")


def portions(text: str, size: int = PORTION) -> Iterator[tuple[int, int]]:
    """Yield (start, end) in characters of parts of `text`, split between words.

    Parts have about `size` characters, or more up to the next pair of words.
    """
    begin = 0
    while (cut := _BETWEEN_WORDS.search(text, begin + size)) is not None:
        yield begin, cut.start()
        begin = cut.start()
    yield begin, len(text)


def divisible(backend: tokenizers.Tokenizer) -> bool:
    """Whether parts of a text have the tokens of the whole: only if all steps are known."""
    from tokenizers.models import BPE

    if not isinstance(backend.model, BPE) or backend.pre_tokenizer is None:
        return False
    normalizer = state_of(backend.normalizer)
    cutter = state_of(backend.pre_tokenizer)
    steps = cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else [cutter]
    cut = backend.pre_tokenizer.pre_tokenize_str(_PROBE)
    added = (token.content for token in backend.get_added_tokens_decoder().values())
    return (
        normalizer.get("type", "NFC") in _NORMALIZERS
        and all(map(_is_known, steps))
        and not any(map(_TOUCHING_WORDS.search, added))
        and any(end == _PROBE.index(" ") for _, (_, end) in cut)
    )


def state_of(part: Any) -> dict[str, Any]:
    """A step of the library in the form of tokenizer.json; empty for None."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _is_known(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}:
            return pattern.get("Regex") in _KNOWN
    return False
