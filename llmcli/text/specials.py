"""Matches special tokens in a text before merging, as in llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_C_SPACES = " \t\n\v\f\r"  # characters of C's `isspace`


@dataclass(frozen=True, kw_only=True)
class SpecialToken:
    """A token matched in the text before merging.

    `control` tokens are matched only if special tokens are parsed, others always. Those with
    `rstrip` absorb the whitespace after them.
    """

    text: str
    id: int
    control: bool
    rstrip: bool = False


def split_specials(
    text: str, specials: Sequence[SpecialToken], parse_special: bool
) -> list[tuple[str | SpecialToken, int]]:
    """Split `text` at special tokens, one token at a time over the whole text.

    Returns tokens and the text between them, each with its start in characters. For overlaps the
    order (longest first) decides, as in llama.cpp (src/llama-vocab.cpp, `tokenizer_st_partition`),
    unlike the leftmost match of a regular expression.
    """
    fragments: list[tuple[str | SpecialToken, int]] = [(text, 0)] if text else []
    for special in specials:
        if (special.control and not parse_special) or special.text not in text:
            continue
        cut: list[tuple[str | SpecialToken, int]] = []
        for fragment, at in fragments:
            if not isinstance(fragment, str):
                cut.append((fragment, at))
                continue
            for index, stretch in enumerate(fragment.split(special.text)):
                if index:
                    cut.append((special, at))
                    at += len(special.text)
                kept = stretch.lstrip(_C_SPACES) if index and special.rstrip else stretch
                if kept:
                    cut.append((kept, at + len(stretch) - len(kept)))
                at += len(stretch)
        fragments = cut
    return fragments
