"""Selects the tokenizer of a GGUF file, and builds BPE over bytes or characters.

Rules from llama.cpp (src/llama-vocab.cpp): keys `tokenizer.ggml.*`, token types, special tokens
found by text, and the order of splits. Where llama.cpp only warns (a merge of unknown tokens), an
error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text.endings import marked, settle
from llmcli.text.ggufkeys import (
    BROKEN,
    KEY,
    ids_of,
    prefix_of,
    strings_of,
    template_of,
    tokens_of,
    types_of,
)
from llmcli.text.ggufpieces import PIECE_KINDS, from_pieces
from llmcli.text.pretokenizers import PRE_TOKENIZERS, PreTokenizerRule, build_pre_tokenizer
from llmcli.text.sentencepiece import BYTE_TOKENS
from llmcli.text.spelling import Spelling, byte_letters
from llmcli.text.tokenizer import Tokenizer, Vocabulary

if TYPE_CHECKING:
    import tokenizers

# Kinds that only llama.cpp supports; no model that llmcli runs has one.
_OTHERS = {"bert": "WordPiece", "rwkv": "RWKV", "plamo2": "PLaMo 2"}


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Build the tokenizer of a GGUF file's metadata; None if the file has none.

    Raises `UnsupportedModel` for unknown kinds, `CheckpointError` for contradictory metadata. BPE
    with an unknown or missing pre-tokenizer gets llama.cpp's `default` and a note, since a wrong
    rule makes the output worse.
    """
    kind = metadata.get(KEY + "model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if isinstance(kind, str) and kind in PIECE_KINDS:
        return from_pieces(metadata, PIECE_KINDS[kind])
    if kind not in ("gpt2", "gemma4"):
        known = _OTHERS.get(str(kind))
        raise UnsupportedModel(
            f"the tokenizer kind `{shown(kind)}`{f' ({known})' if known else ''} inside a GGUF "
            "file is not supported",
            hint="known: gpt2 (byte-level BPE), gemma4 (BPE), llama (SentencePiece), t5 (Unigram); "
            "use a checkpoint with a tokenizer.json",
        )
    pre = kind if kind == "gemma4" else metadata.get(KEY + "pre")
    notes: list[str] = []
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        said = f"pre-tokenizer `{shown(pre)}` is unknown" if pre else "file names no pre-tokenizer"
        notes.append(
            f"the {said} (`{KEY}pre`): text is cut by llama.cpp's `default` rule, and the model's "
            "answers get worse where it was trained with another one"
        )
        pre = "default"
    return _build(metadata, pre, notes)


def _build(metadata: Mapping[str, Any], pre: str, notes: list[str]) -> Tokenizer:
    rule = PRE_TOKENIZERS[pre]
    strings = tokens_of(metadata)
    ids = ids_of(metadata, len(strings), notes)
    types, ends = settle(strings, types_of(metadata, len(strings)), ids)
    # Kimi K2's files may have none
    merges = [] if pre == "kimi-k2" and KEY + "merges" not in metadata else _merges(metadata)
    backend, filler = _backend(strings, merges, rule)
    marks = marked(strings, types, rstrip=lambda _: False)
    if rule.line_ends:
        metadata = {**metadata, KEY + "add_bos_token": True}
    spelling = Spelling(replace=(("▁", " "),), byte_fallback=True)
    return Tokenizer(
        backend,
        Vocabulary(
            strings=strings,
            spelling=spelling if rule.raw else Spelling(byte_level=True),
            literal=marks.literal,
            silent=marks.silent,
            special_ids=marks.hidden,
            bos_id=ids["bos"],
            eos_ids=ends,
            prefix=prefix_of(metadata, ids["bos"], usual=rule.add_bos),
        ),
        name=f"gguf {'' if rule.raw else 'byte-level '}BPE, {pre}",
        specials=marks.specials,
        filler=filler,
        chat_template=template_of(metadata, strings, ids),
        notes=notes,
        line_ends={s: i for i, s in enumerate(strings) if rule.line_ends and not s.strip("\n")},
    )


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Read `tokenizer.ggml.merges` as pairs, split at the first space after the first character."""
    merges = strings_of(metadata, "merges")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    if any(not first or not second or " " in second for first, second in pairs):  # not that plain
        pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise CheckpointError("a merge (`tokenizer.ggml.merges`) is not a pair", hint=BROKEN)
    return list(dict.fromkeys(pairs))  # the first of equal merges counts


def _backend(
    strings: list[str], merges: list[tuple[str, str]], rule: PreTokenizerRule
) -> tuple[tokenizers.Tokenizer, int | None]:
    """The library's BPE, and a filler id for bytes without a token (None: all have one).

    Real vocabularies lack bytes (SmolLM2's has no 0x04). Without the filler the library would merge
    across a dropped byte, unlike llama.cpp.
    """
    import tokenizers
    from tokenizers.models import BPE

    # The library cannot hold tokens that are not UTF-8; they cannot occur in text. They are rare:
    # the whole vocabulary is tried first.
    try:
        "".join(strings).encode()
        vocab = dict(zip(strings, range(len(strings)), strict=True))
    except UnicodeEncodeError:
        vocab = {_holdable(string, index): index for index, string in enumerate(strings)}
    needed = BYTE_TOKENS if rule.raw else byte_letters().keys()
    filler = None if needed <= vocab.keys() else len(strings)
    unknown = "\x00filler\x00"
    if filler is not None:
        vocab[unknown] = filler
    try:
        model = BPE(
            vocab,
            merges,
            unk_token=unknown if filler is not None else None,
            ignore_merges=rule.ignore_merges,
            byte_fallback=rule.raw,
        )
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer's merges do not fit its vocabulary: {shown(error, 120)}", hint=BROKEN
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = build_pre_tokenizer(rule)
    if rule.raw:
        backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    return backend, filler


def _holdable(string: str, index: int) -> str:
    try:
        string.encode()
    except UnicodeEncodeError:
        return f"\x00invalid {index}\x00"
    return string
