"""Decodes tokens one at a time, without incomplete characters."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.text.tokenizer import Tokenizer


class StreamDecoder:
    """Text of a growing token sequence, with separators and the lead applied.

    The results of `push` and `finish`, concatenated, equal `tokenizer.decode(ids)` with the same
    `skip_special` and `markers`. `first` False: the text that decoding would append to an earlier
    text (some vocabularies drop a space at the start of a text). Incomplete characters are held
    back; invalid bytes become U+FFFD, one for each maximal invalid part (as Unicode recommends).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        markers: bool = False,
        first: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()
        if skip_special:
            self._hidden = tokenizer.hidden_ids if markers else tokenizer.special_ids
        self._first = first
        self._strip = tokenizer.spelling.strip if first else 0
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters completed by `token`."""
        return self._text.decode(self.push_bytes(token))

    def finish(self) -> str:
        """The bytes held back, as U+FFFD; the decoder must not be used afterwards."""
        return self._text.decode(b"", True)

    def push_bytes(self, token: int) -> bytes:
        """Like `push`, but the bytes that `token` adds; empty for hidden and unknown ids."""
        if token in self._hidden or not self._tokenizer.has(token):
            return b""
        chunk = self._tokenizer.token_bytes(token, first=self._first)
        if not self._first:
            chunk = self._tokenizer.spelling.separator.encode() + chunk
        self._first = False
        if self._strip and chunk:
            kept = chunk[: self._strip].lstrip(b" ") + chunk[self._strip :]
            self._strip = 0 if kept else self._strip - len(chunk)
            return kept
        return chunk
