"""The byte-pair tokenizer inside a GGUF file, built for the `tokenizers` library.

Facts from llama.cpp (src/llama-vocab.cpp): keys `tokenizer.ggml.*`, token types, the special
tokens it finds by their text, and the order in which text is cut. Where llama.cpp only warns
(an id out of range, a merge of unknown tokens, a missing pre-tokenizer) this is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import shown
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.text.chat import ChatTemplate
from llmcli.text.endings import (
    CONTROL,
    NORMAL,
    UNDEFINED,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    settle,
)
from llmcli.text.pretokenizers import PreTokenizerRule, build_pre_tokenizer, find_rule
from llmcli.text.spelling import Spelling, byte_letters
from llmcli.text.tokenizer import SpecialToken, Tokenizer, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."
_BROKEN = "the file is damaged or was written by a faulty converter; fetch or convert it again"
# Kinds that llama.cpp knows and that a later version of llmcli will.
_LATER = {"llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram", "rwkv": "RWKV"}


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that a GGUF file's metadata describes; None where it says it has none.

    Raises `UnsupportedModel` for kinds other than byte-level BPE and for pre-tokenizers without
    a known rule (a missing one too: llama.cpp then guesses, and warns that text gets worse),
    `CheckpointError` for metadata that contradicts itself.
    """
    kind = metadata.get(_KEY + "model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind != "gpt2":
        known = _LATER.get(str(kind))
        raise UnsupportedModel(
            f"the tokenizer kind `{shown(kind)}`{f' ({known})' if known else ''} inside a GGUF "
            "file is not supported yet",
            hint="known: gpt2 (byte-level BPE); use a checkpoint with a tokenizer.json",
        )
    pre = metadata.get(_KEY + "pre")
    if not isinstance(pre, str) or not pre:
        raise UnsupportedModel(
            "the file does not name its pre-tokenizer (`tokenizer.ggml.pre`)",
            hint="convert the model again with a current converter",
        )
    return _build(metadata, pre, find_rule(pre))


def _build(metadata: Mapping[str, Any], pre: str, rule: PreTokenizerRule) -> Tokenizer:
    strings = _tokens(metadata)
    ids = {name: _id(metadata, name, len(strings)) for name in _ID_NAMES}
    types, ends = settle(strings, _types(metadata, len(strings)), ids)
    backend, filler = _backend(strings, _merges(metadata), rule)
    odd = [index for index, kind in enumerate(types) if kind != NORMAL]
    matched = [index for index in odd if types[index] & (_HIDDEN | USER_DEFINED)]
    # Longest first, in bytes: the order in which they are cut out of a text.
    matched.sort(key=lambda index: (-len(strings[index].encode("utf-8", "replace")), index))
    hidden = frozenset(index for index in matched if types[index] & _HIDDEN)
    vocabulary = Vocabulary(
        strings=strings,
        spelling=Spelling(byte_level=True),
        literal=frozenset(matched),
        silent=frozenset(i for i in odd if types[i] in (UNUSED, UNDEFINED)),
        special_ids=hidden,
        bos_id=ids["bos"],
        eos_ids=ends,
        prefix=_prefix(metadata, rule, ids["bos"]),
    )
    return Tokenizer(
        backend,
        vocabulary,
        name=f"gguf byte-level BPE, {pre}",
        specials=tuple(
            SpecialToken(text=strings[index], id=index, control=index in hidden)
            for index in matched
        ),
        filler=filler,
        chat_template=_template(metadata, strings, ids),
    )


_HIDDEN = CONTROL | UNKNOWN
_ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep")


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """`tokenizer.ggml.tokens`, unique; empty ones get llama.cpp's placeholder."""
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise CheckpointError("the vocabulary (`tokenizer.ggml.tokens`) is empty", hint=_BROKEN)
    named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(named)) != len(named):
        last = {token: index for index, token in enumerate(named)}
        twice = next(token for index, token in enumerate(named) if last[token] != index)
        raise CheckpointError(f"the vocabulary has the token `{shown(twice)}` twice", hint=_BROKEN)
    return named


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`tokenizer.ggml.merges` as pairs: cut at the first space that is not the first letter."""
    merges = _strings(metadata, "merges")
    pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise CheckpointError("a merge (`tokenizer.ggml.merges`) is not a pair", hint=_BROKEN)
    return list(dict.fromkeys(pairs))  # of two equal merges the first one ranks


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    types = metadata.get(_KEY + "token_type")
    if types is None:
        return [1] * count
    if not isinstance(types, Sequence) or isinstance(types, str) or len(types) < count:
        raise CheckpointError(
            f"`tokenizer.ggml.token_type` does not have one entry for each of {count} tokens",
            hint=_BROKEN,
        )
    return [int(kind) if isinstance(kind, int) else 0 for kind in types[:count]]


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(_KEY + name)
    if not isinstance(values, list) or not all(map(str.__instancecheck__, values)):
        raise CheckpointError(f"`{_KEY}{name}` is not a list of strings", hint=_BROKEN)
    return values


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"{_KEY}{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise CheckpointError(
            f"`{_KEY}{name}_token_id` is {shown(value, 40)}, which is no id below {count}",
            hint=_BROKEN,
        )
    return value


def _prefix(
    metadata: Mapping[str, Any], rule: PreTokenizerRule, bos: int | None
) -> tuple[int, ...]:
    """BOS where the file asks for it, or, where it is silent, the pre-tokenizer's rule does."""
    asked = metadata.get(_KEY + "add_bos_token")
    if bos is None:
        if asked:
            raise CheckpointError(
                "`tokenizer.ggml.add_bos_token` is true but there is no `bos_token_id`",
                hint=_BROKEN,
            )
        return ()
    return (bos,) if (rule.add_bos if asked is None else asked) else ()


def _backend(
    strings: list[str], merges: list[tuple[str, str]], rule: PreTokenizerRule
) -> tuple[tokenizers.Tokenizer, int | None]:
    """The library's BPE, and the id that stands for bytes without a token (None: all have one).

    Real vocabularies lack bytes (SmolLM2's has no 0x04). Without the filler the library would
    join and merge what stands on both sides of a dropped byte, which llama.cpp does not.
    """
    import tokenizers
    from tokenizers.models import BPE

    # Bytes that were not UTF-8 in the file cannot occur in text; the library cannot hold them.
    vocab = {_holdable(string, index): index for index, string in enumerate(strings)}
    filler = None if byte_letters().keys() <= vocab.keys() else len(strings)
    unknown = "\x00filler\x00"
    if filler is not None:
        vocab[unknown] = filler
    try:
        model = BPE(
            vocab,
            merges,
            unk_token=unknown if filler is not None else None,
            ignore_merges=rule.ignore_merges,
        )
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer's merges do not fit its vocabulary: {shown(error, 120)}", hint=_BROKEN
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = build_pre_tokenizer(rule)
    return backend, filler


def _holdable(string: str, index: int) -> str:
    try:
        string.encode()
    except UnicodeEncodeError:
        return f"\x00invalid {index}\x00"
    return string


def _template(
    metadata: Mapping[str, Any], strings: list[str], ids: Mapping[str, int | None]
) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`tokenizer.chat_template` is not a string", hint=_BROKEN)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {
        names[name]: strings[index]
        for name, index in ids.items()
        if name in names and index is not None
    }
    return ChatTemplate(source, special_tokens=special)
