"""The tokenizer of a directory with a SentencePiece model and no tokenizer.json.

As in transformers: control pieces and added tokens (tokenizer_config.json, added_tokens.json) are
matched in the text, the rest is encoded by SentencePiece (tokenization_utils_sentencepiece.py,
tokenization_utils_tokenizers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import read_object, shown
from llmcli.errors import CheckpointError
from llmcli.text.added import AddedToken, MarkedEncoder
from llmcli.text.piecefile import read_pieces
from llmcli.text.sentencepiece import CONTROL, PieceModel
from llmcli.text.settings import (
    chat_template_of,
    eos_ids,
    named_tokens,
    read_settings,
    rows_of,
    special_tokens,
    token_text,
)
from llmcli.text.spelling import Spelling
from llmcli.text.tokenizer import Tokenizer, Vocabulary

_NAMES = ("tokenizer.model", "spiece.model")
_BROKEN = "the file is damaged; fetch it again"
_MOST_DIGITS = 20  # of an id; Python limits the digits of integers
_MOST_ADDED = 1 << 20  # ids beyond the model's; more gaps would fill the memory


def find_pieces(directory: Path) -> Path | None:
    """The directory's SentencePiece model; None if there is a tokenizer.json or no model."""
    if (directory / "tokenizer.json").is_file():
        return None
    paths = (directory / name for name in _NAMES)
    return next((path for path in paths if path.is_file()), None)


def from_piece_file(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Build the tokenizer of the SentencePiece model at `path` and its settings.

    `config` and `generation` (config.json, generation_config.json) provide additional end ids.
    Raises CheckpointError for broken files, UnsupportedModel for unknown kinds.
    """
    settings = read_settings(path.parent)
    file = read_pieces(path)
    named = {"bos_token": file.bos, "eos_token": file.eos, "unk_token": file.unknown}
    named |= named_tokens(settings)
    added = _added(path.parent, settings, file.model, set(named.values()), rows_of(config or {}))
    strings = _strings(file.model, added)
    at = {token.text: token.id for token in added.values()}
    bos, eos = at.get(named["bos_token"]), at.get(named["eos_token"])
    ends = {*eos_ids(config), *eos_ids(generation), *([] if eos is None else [eos])}
    prefixed = settings.get("add_prefix_space")
    model = file.model
    if isinstance(prefixed, bool):
        model = replace(model, normalizer=replace(model.normalizer, space_prefix=prefixed))
    adds_bos = settings.get("add_bos_token", not model.unigram)
    return Tokenizer(
        MarkedEncoder(
            model, tuple(added.values()), always=bool(settings.get("legacy", model.unigram))
        ),
        Vocabulary(
            strings=strings,
            spelling=Spelling(
                replace=(("▁", " "),),
                byte_fallback=True,
                strip=1 if model.normalizer.space_prefix else 0,
            ),
            literal=frozenset(added),
            silent=frozenset(),
            special_ids=frozenset(t.id for t in added.values() if t.special),
            bos_id=bos,
            eos_ids=frozenset(index for index in ends if 0 <= index < len(strings)),
            prefix=(bos,) if adds_bos and bos is not None else (),
        ),
        name=f"{path.name}, {'Unigram' if model.unigram else 'BPE'}",
        chat_template=chat_template_of(path.parent, settings, named),
        split_special=settings.get("split_special_tokens") is True,
    )


def _added(
    directory: Path,
    settings: Mapping[str, Any],
    model: PieceModel,
    named: set[str],
    rows: int | None,
) -> dict[int, AddedToken]:
    """Id → token for all tokens matched in a text.

    Special tokens defined only in the settings get the next ids, up to the `rows` of the embedding.
    """
    listed_as_special = {token_text(token): None for token in special_tokens(settings)}
    named = named.union(text for text in listed_as_special if text)
    added = {
        index: AddedToken(text=model.strings[index], id=index, special=True)
        for index, kind in enumerate(model.kinds)
        if kind == CONTROL or model.strings[index] in named
    }
    extra = read_object(directory / "added_tokens.json") or {}
    listed = settings.get("added_tokens_decoder")
    for text, index in extra.items():
        added[_checked(index)] = AddedToken(text=text, id=index, special=text in named)
    for key, token in (listed if isinstance(listed, dict) else {}).items():
        number = key.isdecimal() and key.isascii() and len(key) <= _MOST_DIGITS
        index = _checked(int(key) if number else key)
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"the added token {index} has no text", hint=_BROKEN)
        added[index] = AddedToken(
            text=content,
            id=index,
            special=bool(token.get("special", False)) or content in named,
            lstrip=bool(token.get("lstrip", False)),
            rstrip=bool(token.get("rstrip", False)),
        )
    known = {token.text for token in added.values()}
    free = max(len(model.strings), 1 + max(added, default=-1))
    new = (text for text in listed_as_special if text and text not in known)
    for index, text in enumerate(new, free):
        if rows is None or index < rows:
            added[index] = AddedToken(text=text, id=index, special=True)
    return {index: token for index, token in added.items() if token.text}


def _checked(index: Any) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 1 << 31:
        raise CheckpointError(f"the added token's id `{shown(index, 40)}` is none", hint=_BROKEN)
    return index


def _strings(model: PieceModel, added: Mapping[int, AddedToken]) -> list[str | None]:
    strings: list[str | None] = list(model.strings)
    last = max(added, default=0)
    if last >= len(strings) + _MOST_ADDED:
        raise CheckpointError(f"an added token has the id {last}", hint=_BROKEN)
    strings += [None] * (last + 1 - len(strings))
    for index, token in added.items():
        strings[index] = token.text
    return strings
