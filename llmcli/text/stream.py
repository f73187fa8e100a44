"""Decodes tokens one at a time, without incomplete characters."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.text.tokenizer import Tokenizer


class ByteStream:
    """The bytes of a text, token by token, with separators and the lead applied.

    `first`: the text begins here (some vocabularies drop a space); False for tokens that continue a
    text. `shown`: special tokens that are not hidden.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        first: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special else frozenset()
        self._first = first
        self._strip = tokenizer.spelling.strip if first else 0

    def push(self, token: int) -> bytes:
        """The bytes that `token` adds to the text; empty for hidden and unknown ids."""
        if token in self._hidden or not self._tokenizer.has(token):
            return b""
        chunk = self._tokenizer.token_bytes(token, first=self._first)
        if not self._first:
            chunk = self._tokenizer.spelling.separator.encode() + chunk
        self._first = False
        while self._strip and chunk:
            if not chunk.startswith(b" "):
                self._strip = 0
                break
            chunk = chunk[1:]
            self._strip -= 1
        return chunk


class StreamDecoder:
    """Text of a growing token sequence.

    The results of `push` and `finish`, concatenated, equal `tokenizer.decode(ids)` with the same
    `shown`; with `first` False, the text that decoding would append to an earlier text. Incomplete
    characters are held back; invalid bytes become U+FFFD, one for each maximal invalid part (as
    Unicode recommends).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        first: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._bytes = ByteStream(tokenizer, skip_special=skip_special, first=first, shown=shown)
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters completed by `token`."""
        return self._text.decode(self._bytes.push(token))

    def finish(self) -> str:
        """The bytes held back, as U+FFFD; the decoder must not be used afterwards."""
        return self._text.decode(b"", True)
