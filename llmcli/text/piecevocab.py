"""The tokenizer of a directory with a SentencePiece model and no tokenizer.json.

As transformers reads one: the model's control pieces and the added tokens (tokenizer_config.json,
added_tokens.json) are cut out of the text, what is between them goes to SentencePiece
(tokenization_utils_sentencepiece.py, tokenization_utils_tokenizers.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import read_object, shown
from llmcli.errors import CheckpointError
from llmcli.text.piecefile import read_pieces
from llmcli.text.sentencepiece import CONTROL, PieceEncoder, PieceModel, Pieces
from llmcli.text.settings import chat_template_of, eos_ids, named_tokens, read_settings
from llmcli.text.spelling import Spelling
from llmcli.text.tokenizer import Tokenizer, Vocabulary

_NAMES = ("tokenizer.model", "spiece.model")
_BROKEN = "the file is damaged; fetch it again"
_SPACES = re.compile(r"\s+")
_MOST_DIGITS = 20  # of an id that is a key; Python refuses to read some thousands
_MOST_ADDED = 1 << 20  # ids beyond the model's; more would fill the memory with holes


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that is cut out of a text; `lstrip`, `rstrip`: with the whitespace beside it."""

    text: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False


def find_pieces(directory: Path) -> Path | None:
    """The directory's SentencePiece model, if that is what describes its tokenizer."""
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
    """The tokenizer of the SentencePiece model at `path` and the settings beside it.

    `config` and `generation` are config.json and generation_config.json, which name further
    ids that end a text. Raises CheckpointError for broken files, UnsupportedModel for kinds of
    models that llmcli does not know.
    """
    settings = read_settings(path.parent)
    file = read_pieces(path)
    named = {"bos_token": file.bos, "eos_token": file.eos, "unk_token": file.unknown}
    named |= named_tokens(settings)
    added = _added(path.parent, settings, file.model, set(named.values()))
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
    )


class MarkedEncoder:
    """Text → ids with added tokens, with the interface of `tokenizers.Tokenizer`.

    Of two tokens that overlap the one further left wins, of two that begin together the longer.
    `always`: every stretch between them gets the model's space in front, not only the first.
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
                continue  # it is among the whitespace that the one before took along
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
    """Tokens in `text` with their first character and end, from the left, the longest first.

    By length at every letter that begins one: an expression of all tokens takes seconds for a
    long text where there are hundreds of them.
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
    """A text as added tokens and stretches of pieces, each with its first character and end."""

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


def _added(
    directory: Path, settings: Mapping[str, Any], model: PieceModel, named: set[str]
) -> dict[int, AddedToken]:
    """Id → token of everything that is cut out of a text."""
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
