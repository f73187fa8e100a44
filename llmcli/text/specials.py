"""Special tokens that llama.cpp finds in a text by their own text, before anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_C_SPACES = " \t\n\v\f\r"  # what C's `isspace` takes


@dataclass(frozen=True, kw_only=True)
class SpecialToken:
    """A token that is looked for in the text before anything else.

    `control` tokens are found only where special tokens are parsed, the others always.
    Those with `rstrip` take the whitespace behind them along.
    """

    text: str
    id: int
    control: bool
    rstrip: bool = False


def split_specials(
    text: str, specials: Sequence[SpecialToken], parse_special: bool
) -> list[tuple[str | SpecialToken, int]]:
    """Cut special tokens out of `text`, one token after the other over the whole text.

    Returns what is between them and they themselves, each with the character it begins at. The
    order (longest first) decides where tokens overlap: llama.cpp, src/llama-vocab.cpp,
    `tokenizer_st_partition`. This is not the leftmost match that an alternation would give.
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
