"""SentencePiece tokenizers inside a GGUF file: kinds `llama` (merges) and `t5` (Unigram).

As in llama.cpp (src/llama-vocab.cpp), with two intended differences. Plain text never encodes to a
hidden token (BOS, `</s>`), whereas llama.cpp merges `<`, `s>` to one. And Unigram is the library's:
it falls back to bytes for unknown characters if the vocabulary has them, and treats `▁` in a text
as a space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.errors import CheckpointError
from llmcli.text import endings, sentencepiece
from llmcli.text.charsmap import check_charsmap
from llmcli.text.endings import HIDDEN, marked, settle
from llmcli.text.ggufkeys import (
    BROKEN,
    KEY,
    ids_of,
    prefix_of,
    scores_of,
    template_of,
    tokens_of,
    types_of,
)
from llmcli.text.sentencepiece import Normalizer, PieceEncoder, PieceModel, byte_ids
from llmcli.text.spelling import Spelling
from llmcli.text.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, kw_only=True)
class PieceKind:
    """Defaults of a tokenizer kind: special ids, BOS, the leading space."""

    title: str
    unigram: bool
    ids: Mapping[str, int]
    add_bos: bool
    space_prefix: bool


PIECE_KINDS = {
    "llama": PieceKind(
        title="gguf SentencePiece",
        unigram=False,
        ids={"bos": 1, "eos": 2, "unknown": 0},
        add_bos=True,
        space_prefix=True,
    ),
    "t5": PieceKind(
        title="gguf Unigram",
        unigram=True,
        ids={"eos": 1, "unknown": 2, "padding": 0},
        add_bos=False,
        space_prefix=False,
    ),
}
# Special tokens of these models, all but three, absorb the whitespace after them. The file does not
# record it; llama.cpp uses the model's name too.
_STRIPPING = ("phi-3", "phi3")
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def from_pieces(metadata: Mapping[str, Any], kind: PieceKind) -> Tokenizer:
    """Build the tokenizer of a GGUF file whose `tokenizer.ggml.model` is `kind`.

    Raises CheckpointError for contradictory metadata.
    """
    strings = tokens_of(metadata)
    count = len(strings)
    notes: list[str] = []
    ids = ids_of(metadata, count, notes, kind.ids)
    types, ends = settle(strings, types_of(metadata, count), ids)
    prefixed = _flag(metadata, "add_space_prefix", kind.space_prefix)
    model = PieceModel(
        strings=strings,
        scores=scores_of(metadata, count),
        kinds=_kinds(strings, types, ids["unknown"], kind),
        unigram=kind.unigram,
        normalizer=_normalizer(metadata, kind, prefixed),
    )
    marks = marked(strings, types, rstrip=_stripping(metadata))
    return Tokenizer(
        PieceEncoder(model),
        Vocabulary(
            strings=strings,
            spelling=Spelling(
                replace=(("▁", " "),), byte_fallback=True, strip=1 if prefixed else 0
            ),
            literal=marks.literal,
            silent=marks.silent,
            special_ids=marks.hidden,
            bos_id=ids["bos"],
            eos_ids=ends,
            prefix=prefix_of(metadata, ids["bos"], usual=kind.add_bos),
        ),
        name=kind.title,
        specials=marks.specials,
        filler=None if sentencepiece.UNKNOWN in model.kinds else count,
        chat_template=template_of(metadata, strings, ids),
        notes=notes,
    )


def _kinds(strings: list[str], types: list[int], unknown: int | None, kind: PieceKind) -> list[int]:
    """The library's kind of every token.

    All but hidden tokens take part in merges, as in llama.cpp; user-defined ones were matched in
    the text before. In Unigram the latter do not take part.
    """
    plain, apart = sentencepiece.NORMAL, sentencepiece.CONTROL
    table = dict.fromkeys(range(64), plain)
    table |= {t: apart for t in table if t & HIDDEN or t == endings.BYTE}
    if kind.unigram:
        table |= {endings.USER_DEFINED: apart, endings.UNUSED: sentencepiece.UNUSED}
    kinds = list(map(table.__getitem__, types))
    for index in byte_ids(strings):
        if not types[index] & HIDDEN:
            kinds[index] = sentencepiece.BYTE
    if kinds.count(sentencepiece.BYTE) != 256:
        kinds = [apart if k == sentencepiece.BYTE else k for k in kinds]
    if unknown is not None and kinds[unknown] != sentencepiece.BYTE:
        kinds[unknown] = sentencepiece.UNKNOWN
    return kinds


def _normalizer(metadata: Mapping[str, Any], kind: PieceKind, prefixed: bool) -> Normalizer:
    """The normalizer; the merging kind has none beyond the leading space, as in llama.cpp."""
    if not kind.unigram:
        return Normalizer(space_prefix=prefixed, merge_spaces=False)
    given = metadata.get(KEY + "precompiled_charsmap")
    try:
        charsmap = bytes(byte & 255 for byte in given) if given else b""
    except TypeError:
        raise CheckpointError(
            f"`{KEY}precompiled_charsmap` is not a list of bytes", hint=BROKEN
        ) from None
    check_charsmap(charsmap)
    return Normalizer(
        space_prefix=prefixed,
        merge_spaces=_flag(metadata, "remove_extra_whitespaces", False),
        charsmap=charsmap,
    )


def _flag(metadata: Mapping[str, Any], name: str, usual: bool) -> bool:
    value = metadata.get(KEY + name)
    return usual if value is None else bool(value)


def _stripping(metadata: Mapping[str, Any]) -> Callable[[str], bool]:
    name = str(metadata.get("general.name", "")).lower()
    stripping = any(text in name for text in _STRIPPING)
    return lambda text: stripping and text not in _NOT_STRIPPING
