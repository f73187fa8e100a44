"""Where a long text may be cut so that its parts have the tokens of the whole.

The `tokenizers` library takes about 200 bytes of memory for each byte of a text. Byte-level
vocabularies cut a text into words before they merge anything, and never merge across words: a text
that is cut between two words, in front of the space, has the same tokens in parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmcli.text.pretokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    import tokenizers

PORTION = 1 << 17  # characters of a part: some 25 MiB while it is encoded
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
# Expressions that look at nothing in front of a match; of all those the tests prove that they cut.
_KNOWN = frozenset(pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns)
_PROBE = "ab cd"
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")


def portions(text: str, size: int = PORTION) -> Iterator[tuple[int, int]]:
    """First and last character + 1 of the parts of `text`, cut between words.

    Parts have about `size` characters; more where no two words stand side by side for so long.
    """
    begin = 0
    while (cut := _BETWEEN_WORDS.search(text, begin + size)) is not None:
        yield begin, cut.start()
        begin = cut.start()
    yield begin, len(text)


def divisible(backend: tokenizers.Tokenizer) -> bool:
    """Whether parts of a text have the tokens of the whole: only where all steps are known."""
    from tokenizers.models import BPE

    if not isinstance(backend.model, BPE) or backend.pre_tokenizer is None:
        return False
    normalizer = state_of(backend.normalizer)
    cutter = state_of(backend.pre_tokenizer)
    steps = cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else [cutter]
    added = (token.content for token in backend.get_added_tokens_decoder().values())
    return (
        normalizer.get("type", "NFC") in _NORMALIZERS
        and all(map(_is_known, steps))
        and not any(map(_touches_words, added))
        and any(end == _PROBE.index(" ") for _, (_, end) in _cut(backend))
    )


def state_of(part: Any) -> dict[str, Any]:
    """A step of the library's as tokenizer.json writes it; empty for none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _cut(backend: tokenizers.Tokenizer) -> list[tuple[str, tuple[int, int]]]:
    found: list[tuple[str, tuple[int, int]]] = backend.pre_tokenizer.pre_tokenize_str(_PROBE)
    return found


def _is_known(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}:
            return pattern.get("Regex") in _KNOWN
    return False


def _touches_words(added: str) -> bool:
    """Whether a token that is cut out of the text may lie across a cut, or beside it."""
    return re.search("^ ?[A-Za-z]|[A-Za-z] |[A-Za-z]$", added) is not None
