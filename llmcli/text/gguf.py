"""The tokenizer of a GGUF file: BPE over bytes or characters, or SentencePiece.

Built from the untrusted keys `tokenizer.ggml.*` by the rules of llama.cpp (src/llama-vocab.cpp):
types are corrected and end tokens found by the tokens' text (`llama_vocab::impl::load`), texts are
split at special tokens first. Where llama.cpp aborts (a duplicate token) or only warns (a merge of
unknown tokens), an error is raised.

SentencePiece (kinds `llama`, merges, and `t5`, Unigram) has two intended differences. Plain text
never encodes to a hidden token (BOS, `</s>`), whereas llama.cpp merges `<`, `s>` to one. And
Unigram is the library's: it falls back to bytes for unknown characters if the vocabulary has them,
and treats `▁` in a text as a space.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text import sentencepiece
from llmcli.text.added import AddedToken, AddedTokens
from llmcli.text.chat import ChatTemplate
from llmcli.text.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from llmcli.text.sentencepiece import (
    BYTE_TOKENS,
    PieceEncoder,
    PieceModel,
    byte_ids,
    check_strings,
)
from llmcli.text.spelling import Spelling, byte_letters, is_unicode
from llmcli.text.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep")
Ids = Mapping[str, int | None]  # the special ids by their names
Keys = dict[str, Any]  # the untrusted metadata `tokenizer.ggml.*`, without that prefix


def _tokens(keys: Keys) -> list[str]:
    """The tokens; empty ones get llama.cpp's placeholder."""
    tokens = _strings(keys, "tokens")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    check_strings(tokens)
    return tokens


def _types(keys: Keys, count: int) -> Sequence[int]:
    """The types of `count` tokens; if absent, all are normal; 0 (undefined) if not a number."""
    types = _entries(keys, "token_type", count) or [1] * count
    try:
        return array("i", types)
    except (TypeError, OverflowError):
        return [kind if isinstance(kind, int) else 0 for kind in types]


def _scores(keys: Keys, count: int) -> array[float]:
    """The float32 scores of `count` tokens; if absent, all are zero."""
    try:
        return array("f", _entries(keys, "scores", count) or bytes(4 * count))
    except (TypeError, OverflowError, ValueError):
        raise CheckpointError(f"`{KEY}scores` is not a list of numbers") from None


def _entries(keys: Keys, name: str, count: int) -> Sequence[Any] | None:
    """A list with one entry for each of `count` tokens, or more; None if absent."""
    values = keys.get(name)
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) < count:
        raise CheckpointError(f"`{KEY}{name}` does not have one entry for each of {count} tokens")
    return values if len(values) == count else values[:count]


def _strings(keys: Keys, name: str) -> list[str]:
    values = keys.get(name)
    if not isinstance(values, list) or not all(map(str.__instancecheck__, values)):
        raise CheckpointError(f"`{KEY}{name}` is not a list of strings")
    return values


def _flag(keys: Keys, name: str, usual: bool) -> bool:
    value = keys.get(name)
    return usual if value is None else bool(value)


def _ids(
    keys: Keys, count: int, notes: list[str], usual: Mapping[str, int]
) -> dict[str, int | None]:
    """Read the special ids (`bos`, `eos`, …), with defaults from `usual`.

    An id outside of `count` tokens counts as absent and adds to `notes`, as in llama.cpp.
    """
    found: dict[str, int | None] = {}
    for name in ID_NAMES:
        value = keys.get(f"{name}_token_id")
        if isinstance(value, bool) or not isinstance(value, int | None):
            given = shown(value, 40)
            raise CheckpointError(f"`{KEY}{name}_token_id` is {given}, which is not an id")
        if value is not None and not 0 <= value < count:
            key = f"`{KEY}{name}_token_id`"
            notes.append(f"{key} is {value}, but there are {count} tokens: it is ignored")
            value = None
        if value is None:
            value = usual.get(name, count)
        found[name] = value if value < count else None
    return found


def _prefix(keys: Keys, bos: int | None, *, usual: bool) -> tuple[int, ...]:
    """BOS if the file's `add_bos_token` is set, or by default if `usual`."""
    asked = keys.get("add_bos_token")
    if bos is None and asked:
        raise CheckpointError(f"`{KEY}add_bos_token` is true but there is no `bos_token_id`")
    return () if bos is None or not (usual if asked is None else asked) else (bos,)


def _template(metadata: Mapping[str, Any], strings: Sequence[str], ids: Ids) -> ChatTemplate | None:
    """The chat template with its special tokens; without a default, the first named one."""
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    if source is None:
        source = next((metadata[name] for name in metadata if name.startswith(f"{key}.")), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`tokenizer.chat_template` is not a string")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = ((names[name], index) for name, index in ids.items() if name in names)
    special = {name: strings[index] for name, index in found if index is not None}
    return ChatTemplate(source, special_tokens=special)


# llama.cpp's token attributes, as flags. Plain integers: vocabularies have 250k tokens.
UNDEFINED, UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 0, 1, 2, 4, 8, 16, 32
# Tokens hidden in text by default; and tokens matched before merging.
HIDDEN = CONTROL | UNKNOWN
_MATCHED = HIDDEN | USER_DEFINED
# `tokenizer.ggml.token_type` numbers (gguf.TokenType) → attribute.
_BY_NUMBER = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}
# Tokens that end a text.
_ENDINGS = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] "
    "[EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<|return|> <|call|> "  # gpt-oss
    "<|flush|> <|calls|> "  # solar-open
    "<｜end▁of▁sentence｜> "  # DeepSeek
    "[e~["  # MiniMax
)
# Fill-in-the-middle tokens that also end a text: kind → texts.
_FIM_ENDINGS = {
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
# Fill-in-the-middle tokens that do not end a text; also always control tokens.
_FIM_PARTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> "
    "<|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> "
    "<|code_middle|> <|middle|>",
}
# gpt-oss's channel tokens: part of the text, never hidden.
_SHOWN = "<|channel|> <|message|> <|start|> <|constrain|>"
_KNOWN = frozenset(
    " ".join([_ENDINGS, _SHOWN, *_FIM_ENDINGS.values(), *_FIM_PARTS.values()]).split()
)


def _classified(
    strings: Sequence[str], numbers: Sequence[int], ids: Ids
) -> tuple[list[int], frozenset[int]]:
    """Determine the attributes of every token, and the ids that end a generation.

    `strings` and `numbers`: the file's tokens and token types; `ids`: its special ids (`eos`,
    `eot`, `eom`, `fim_…`). Missing ones are found by text; for several matches llama.cpp takes the
    first in its hash table, here the lowest id.
    """
    at = {string: index for index, string in enumerate(strings) if string in _KNOWN}
    known = {number: _BY_NUMBER.get(number, UNDEFINED) for number in set(numbers)}
    types = list(map(known.__getitem__, numbers))
    ends: set[int] = set()
    for kind, texts in (_FIM_ENDINGS | _FIM_PARTS).items():
        named = ids.get(kind)
        present = sorted(at[text] for text in texts.split() if text in at)
        found = present[:1] if named is None else []
        for index in found:
            types[index] |= CONTROL
        if kind in _FIM_ENDINGS:
            ends.update(found if named is None else [named])
    for index in (at[text] for text in _ENDINGS.split() if text in at):
        types[index] |= CONTROL
        ends.add(index)
    for index in (at[text] for text in _SHOWN.split() if text in at):
        types[index] = USER_DEFINED
    ends.update(named for kind in ("eos", "eot", "eom") if (named := ids.get(kind)) is not None)
    _correct(types, ends, at)
    return types, frozenset(ends)


def _correct(types: list[int], ends: set[int], at: Mapping[str, int]) -> None:
    """Fix `ends` for two families that use another family's end token inside their texts."""
    asked = ("<|call|>", "<|calls|>", "<|return|>", "<|flush|>", "<|end|>", "<|tool_response>")
    written = {text for text in (*asked, "</s>") if at.get(text) in ends}
    call = bool(written & {"<|call|>", "<|calls|>"})
    if call and written & {"<|return|>", "<|flush|>"} and "<|end|>" in written:
        ends.discard(at["<|end|>"])
        types[at["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= written:
        ends.discard(at["</s>"])
        types[at["</s>"]] = NORMAL


# Default special ids of SentencePiece tokenizers: `llama` merges, `t5` is Unigram.
_PIECE_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
# Special tokens of these models, all but three, absorb the whitespace after them. The file does not
# record it; llama.cpp uses the model's name too.
_STRIPPING = ("phi-3", "phi3")
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def _matched(
    strings: Sequence[str], types: Sequence[int], among: Sequence[int], *, stripping: bool
) -> AddedTokens:
    """Tokens matched in a text before merging, longest first in bytes.

    `stripping`: special tokens absorb the whitespace after them.
    """
    found = [index for index in among if types[index] & _MATCHED]
    found.sort(key=lambda index: (-len(strings[index].encode("utf-8", "replace")), index))
    added = {
        index: AddedToken(
            content=(text := strings[index]),
            special=bool(types[index] & HIDDEN),
            rstrip=stripping and text not in _NOT_STRIPPING,
        )
        for index in found
    }
    return AddedTokens(added, leftmost=False)


def _pieces(
    keys: Keys, strings: list[str], types: list[int], ids: Ids, *, unigram: bool
) -> dict[str, Any]:
    """The tokenizer's fields of SentencePiece.

    A space is put before a text, and BOS, by default only if it merges. The merging kind has no
    other normalization, as in llama.cpp.
    """
    count = len(strings)
    prefixed = _flag(keys, "add_space_prefix", not unigram)
    given = keys.get("precompiled_charsmap") if unigram else None
    try:
        charsmap = bytes(byte & 255 for byte in given or ())
    except TypeError:
        raise CheckpointError(f"`{KEY}precompiled_charsmap` is not a list of bytes") from None
    model = PieceModel(
        strings=strings,
        scores=_scores(keys, count),
        kinds=_kinds(strings, types, ids["unknown"], unigram),
        unigram=unigram,
        space_prefix=prefixed,
        merge_spaces=unigram and _flag(keys, "remove_extra_whitespaces", False),
        charsmap=charsmap,
    )
    return {
        "backend": PieceEncoder(model.checked()),
        "spelling": Spelling(replace=(("▁", " "),), byte_fallback=True, strip=int(prefixed)),
        "name": f"gguf {'Unigram' if unigram else 'SentencePiece'}",
        "prefix": _prefix(keys, ids["bos"], usual=not unigram),
        "filler": None if sentencepiece.UNKNOWN in model.kinds else count,
    }


def _kinds(strings: list[str], types: list[int], unknown: int | None, unigram: bool) -> list[int]:
    """The library's kind of every token.

    All but hidden tokens take part in merges, as in llama.cpp; user-defined ones were matched in
    the text before. In Unigram the latter do not take part.
    """
    plain, apart = sentencepiece.NORMAL, sentencepiece.CONTROL
    table = dict.fromkeys(range(64), plain)
    table |= {t: apart for t in table if t & HIDDEN or t == BYTE}
    if unigram:
        table |= {USER_DEFINED: apart, UNUSED: sentencepiece.UNUSED}
    kinds = list(map(table.__getitem__, types))
    for index in byte_ids(strings):
        if not types[index] & HIDDEN:
            kinds[index] = sentencepiece.BYTE
    if kinds.count(sentencepiece.BYTE) != 256:
        kinds = [apart if k == sentencepiece.BYTE else k for k in kinds]
    if unknown is not None and kinds[unknown] != sentencepiece.BYTE:
        kinds[unknown] = sentencepiece.UNKNOWN
    return kinds


# Kinds that only llama.cpp supports; no model that llmcli runs has one.
_OTHERS = {"bert": "WordPiece", "rwkv": "RWKV", "plamo2": "PLaMo 2"}


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Build the tokenizer of a GGUF file's metadata; None if the file has none.

    Raises `UnsupportedModel` for unknown kinds, `CheckpointError` for contradictory metadata. BPE
    with an unknown or missing pre-tokenizer gets llama.cpp's `default` and a note, since a wrong
    rule makes the output worse.
    """
    keys = {key.removeprefix(KEY): metadata[key] for key in metadata if key.startswith(KEY)}
    kind = keys.get("model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    usual = _PIECE_IDS.get(kind) if isinstance(kind, str) else None
    if usual is None and kind not in ("gpt2", "gemma4"):
        known = _OTHERS.get(str(kind))
        raise UnsupportedModel(
            f"the tokenizer kind `{shown(kind)}`{f' ({known})' if known else ''} inside a GGUF "
            "file is not supported",
            hint="known: gpt2 (byte-level BPE), gemma4 (BPE), llama (SentencePiece), t5 (Unigram); "
            "use a checkpoint with a tokenizer.json",
        )
    notes: list[str] = []
    pre = "" if usual else _pre_tokenizer(keys, kind, notes)
    strings = _tokens(keys)
    ids = _ids(keys, len(strings), notes, usual or {})
    types, ends = _classified(strings, _types(keys, len(strings)), ids)
    if usual:
        fields = _pieces(keys, strings, types, ids, unigram=kind == "t5")
    else:
        fields = _bpe(keys, strings, ids, pre)
    model = str(metadata.get("general.name", "")).lower()
    stripping = bool(usual) and any(text in model for text in _STRIPPING)
    odd = [index for index, kind in enumerate(types) if kind != NORMAL]  # few of very many
    added = _matched(strings, types, odd, stripping=stripping)
    return Tokenizer(
        **fields,
        strings=strings,
        silent=frozenset(index for index in odd if types[index] in (UNUSED, UNDEFINED)),
        special_ids=added.special_ids,
        bos_id=ids["bos"],
        eos_ids=ends,
        added=added,
        chat_template=_template(metadata, strings, ids),
        notes=tuple(notes),
    )


def _pre_tokenizer(keys: Keys, kind: str, notes: list[str]) -> str:
    """The name of the pre-tokenizer; `default` and a note if it is unknown or missing."""
    pre = kind if kind == "gemma4" else keys.get("pre")
    if isinstance(pre, str) and pre in PRE_TOKENIZERS:
        return pre
    said = f"pre-tokenizer `{shown(pre)}` is unknown" if pre else "file names no pre-tokenizer"
    notes.append(
        f"the {said} (`{KEY}pre`): text is cut by llama.cpp's `default` rule, and the model's "
        "answers get worse where it was trained with another one"
    )
    return "default"


def _merges(keys: Keys) -> list[tuple[str, str]]:
    """Read the merges as pairs, split at the first space after the first character."""
    merges = _strings(keys, "merges")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    if any(not first or not second or " " in second for first, second in pairs):  # not that plain
        pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise CheckpointError(f"a merge (`{KEY}merges`) is not a pair")
    return list(dict.fromkeys(pairs))  # the first of equal merges counts


def _bpe(keys: Keys, strings: list[str], ids: Ids, pre: str) -> dict[str, Any]:
    """The tokenizer's fields of the library's BPE, with a filler for bytes without a token.

    Real vocabularies lack bytes (SmolLM2's has no 0x04). Without the filler the library would merge
    across a dropped byte, unlike llama.cpp.
    """
    import tokenizers
    from tokenizers.models import BPE

    rule = PRE_TOKENIZERS[pre]
    # Kimi K2's files may have none
    merges = [] if pre == "kimi-k2" and "merges" not in keys else _merges(keys)
    vocab = dict(zip(strings, range(len(strings)), strict=True))
    if not is_unicode("".join(strings)):  # the library cannot hold those; they occur in no text
        for string in [string for string in strings if not is_unicode(string)]:
            index = vocab.pop(string)
            vocab[f"\x00invalid {index}\x00"] = index
    needed = BYTE_TOKENS if rule.raw else byte_letters().keys()
    filler, unknown = None, None
    if not needed <= vocab.keys():
        filler, unknown = len(strings), "\x00filler\x00"
        vocab[unknown] = filler
    try:
        model = BPE(
            vocab,
            merges,
            unk_token=unknown,
            ignore_merges=rule.ignore_merges,
            byte_fallback=rule.raw,
        )
    except Exception as error:
        why = shown(error, 120)
        raise CheckpointError(f"the tokenizer's merges do not fit its vocabulary: {why}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = build_pre_tokenizer(rule)
    if rule.raw:
        backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    raw = Spelling(replace=(("▁", " "),), byte_fallback=True)
    line_ends: dict[str, int] = {}
    if rule.line_ends:  # BOS is always added
        keys = keys | {"add_bos_token": True}
        line_ends = {text: index for index, text in enumerate(strings) if not text.strip("\n")}
    return {
        "backend": backend,
        "spelling": raw if rule.raw else Spelling(byte_level=True),
        "name": f"gguf {'' if rule.raw else 'byte-level '}BPE, {pre}",
        "prefix": _prefix(keys, ids["bos"], usual=rule.add_bos),
        "filler": filler,
        "line_ends": line_ends,
    }
