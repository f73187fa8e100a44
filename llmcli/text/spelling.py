"""Converts token strings to bytes: alphabets and decoders of byte-pair vocabularies.

A byte-level vocabulary (GPT-2) writes every byte as one printable letter; a SentencePiece-like one
(Llama 2) writes a space as `▁` and single bytes as `<0x0A>`. Streaming, offsets and display work on
these bytes, so a character split over tokens is not a special case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import UnsupportedModel

# Space removal of the `tokenizers` library, in its order (decoders/wordpiece.rs, `cleanup`).
_TIDY = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
_HEX = frozenset("0123456789abcdefABCDEF")


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's alphabet, letter → byte (openai/gpt-2, encoder.py, `bytes_to_unicode`).

    Printable bytes are their own Latin-1 letter; the other 68 take the letters from U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    letters = {chr(byte): byte for byte in own}
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return letters


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Conversion of a vocabulary's strings to bytes.

    `byte_level`: GPT-2's alphabet; a string with a letter outside it is literal. `replace`: (old,
    new) pairs applied to every string, in order. `byte_fallback`: `<0x0A>` is the byte 10. `strip`:
    number of leading spaces dropped from a whole text. `first_drops`: character removed at the
    start of a text's first token (Metaspace). `separator`: between tokens (only in vocabularies
    without a decoder). `continuation`: prefix of tokens that continue a word, removed; other tokens
    but a text's first get a leading space (WordPiece). `tidy`: (old, new) pairs applied to a token
    with its space, such as (" ,", ",").
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: int = 0
    first_drops: str | None = None
    separator: str = ""
    continuation: str = ""
    tidy: tuple[tuple[str, str], ...] = ()

    def to_bytes(self, string: str, *, first: bool = False) -> bytes:
        """The bytes of one token's string; `first`: it is the first token of a text."""
        if self.byte_level:
            letters = byte_letters()
            try:
                return bytes([letters[letter] for letter in string])
            except KeyError:
                return literal_bytes(string)
        if first and self.first_drops:
            string = string.replace(self.first_drops, "")
        for old, new in self.replace:
            string = string.replace(old, new)
        if self.continuation and not first:
            inside = string.startswith(self.continuation)
            string = string[len(self.continuation) :] if inside else f" {string}"
        for old, new in self.tidy:
            string = string.replace(old, new)
        if self.byte_fallback and (byte := _fallback_byte(string)) is not None:
            return byte
        return literal_bytes(string)


def is_unicode(string: str) -> bool:
    """Whether the string has no lone surrogates, which stand for invalid bytes."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def literal_bytes(string: str) -> bytes:
    """UTF-8 of a token's string; lone surrogates become the invalid bytes that they stand for."""
    return string.encode("utf-8", "surrogateescape")


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling:
    """Translate tokenizer.json's `decoder` (None: tokens are joined with spaces).

    Raises `UnsupportedModel` for decoders that do not concatenate the tokens' bytes.
    """
    if decoder is None:
        return Spelling(separator=" ")
    kind = decoder.get("type")
    if kind == "Metaspace":
        mark = str(decoder.get("replacement", "▁"))
        never = decoder.get("prepend_scheme") == "never"
        return Spelling(replace=((mark, " "),), first_drops=None if never else mark)
    if kind == "WordPiece" and decoder.get("prefix"):
        tidy = _TIDY if decoder.get("cleanup") else ()
        return Spelling(continuation=str(decoder["prefix"]), tidy=tidy)
    steps = list(decoder.get("decoders", [])) if kind == "Sequence" else [decoder]
    replace: list[tuple[str, str]] = []
    byte_level = byte_fallback = fused = False
    strip = 0
    for step in steps:
        kind = step.get("type")
        pattern = step.get("pattern", {})
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "Replace" and "String" in pattern and not fused:
            replace.append((str(pattern["String"]), str(step["content"])))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step.get("content") == " " and not step.get("stop"):
            strip += int(step.get("start", 0))
        else:
            raise UnsupportedModel(
                f"the tokenizer's decoder step `{shown(kind)}` is not one that llmcli knows",
                hint="known: ByteLevel, Metaspace, WordPiece, and in a row Replace, ByteFallback, "
                "Fuse, Strip",
            )
    return Spelling(
        byte_level=byte_level, replace=tuple(replace), byte_fallback=byte_fallback, strip=strip
    )


def _fallback_byte(string: str) -> bytes | None:
    if len(string) == 6 and string.startswith("<0x") and string.endswith(">"):
        digits = string[3:5]
        if _HEX.issuperset(digits):  # `int` also accepts signs, spaces and other digits
            return bytes([int(digits, 16)])
    return None
