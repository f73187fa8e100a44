"""Matches added tokens in a text and encodes the rest with SentencePiece.

As transformers (tokenization_utils_sentencepiece.py): leftmost match, then longest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from llmcli.text.sentencepiece import PieceEncoder, PieceModel, Pieces

_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token matched in a text; `lstrip`, `rstrip`: including whitespace before or after it."""

    text: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False


class MarkedEncoder:
    """Text → ids with added tokens, with the interface of `tokenizers.Tokenizer`.

    Of overlapping matches the leftmost counts, then the longest. `always`: every stretch between
    tokens gets the model's leading space, not only the first.
    """

    def __init__(self, model: PieceModel, added: tuple[AddedToken, ...], *, always: bool) -> None:
        self.encode_special_tokens = False
        inside = model
        if not always:
            inside = replace(model, normalizer=replace(model.normalizer, space_prefix=False))
        self._first = PieceEncoder(model)
        self._inside = self._first if inside is model else PieceEncoder(inside)
        self._tokens = {
            plain: {t.text: t for t in added if not (plain and t.special)}
            for plain in (False, True)
        }

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Marked:
        """Ids of `text`; with `encode_special_tokens`, special tokens in it are plain text."""
        return Marked(parts=tuple(self._parts(text)))

    def _parts(self, text: str) -> Iterator[tuple[int | Pieces, int, int]]:
        at = 0
        for token, begin, end in _found(text, self._tokens[self.encode_special_tokens]):
            if begin < at:
                continue  # inside whitespace absorbed by the previous token
            before = text[at:begin].rstrip() if token.lstrip else text[at:begin]
            if before:
                yield self._stretch(text, at, at + len(before))
            yield token.id, begin, end
            behind = _SPACES.match(text, end) if token.rstrip else None
            at = behind.end() if behind is not None else end
        if at < len(text):
            yield self._stretch(text, at, len(text))

    def _stretch(self, text: str, at: int, end: int) -> tuple[Pieces, int, int]:
        encoder = self._inside if at else self._first
        return encoder.encode(text[at:end]), at, end


def _found(text: str, tokens: Mapping[str, AddedToken]) -> Iterator[tuple[AddedToken, int, int]]:
    """Yield tokens in `text` with their start and end, leftmost first, then longest.

    Looked up by length at every possible first character: one regular expression takes seconds for
    a long text and hundreds of tokens.
    """
    if not tokens:
        return
    lengths: dict[str, set[int]] = {}
    for name in tokens:
        lengths.setdefault(name[0], set()).add(len(name))
    sorted_lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
    begins = re.compile("[" + "".join(map(re.escape, lengths)) + "]")
    at = 0
    while (match := begins.search(text, at)) is not None:
        begin = match.start()
        at = begin + 1
        for length in sorted_lengths[match[0]]:
            token = tokens.get(text[begin : begin + length])
            if token is not None:
                at = begin + len(token.text)  # the text may end before `length`
                yield token, begin, at
                break


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A text as added tokens and stretches of pieces, each with start and end in characters."""

    parts: tuple[tuple[int | Pieces, int, int], ...]

    @cached_property
    def ids(self) -> list[int]:
        """All ids in the text's order."""
        found = ([part] if isinstance(part, int) else part.ids for part, _, _ in self.parts)
        return list(chain.from_iterable(found))

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """First and last character + 1 of every id."""
        spans: list[tuple[int, int]] = []
        for part, at, end in self.parts:
            if isinstance(part, int):
                spans.append((at, end))
            else:
                spans.extend((at + a, at + b) for a, b in part.offsets)
        return spans
