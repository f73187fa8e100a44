"""Added tokens: read from a tokenizer's settings, and cut out of a text before it is encoded."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import read_object, shown
from llmcli.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

BROKEN = "the file is damaged; fetch it again"
_MAX_ID = 1 << 24
_C_SPACES = " \t\n\v\f\r"  # characters of C's `isspace`
_SPACES = re.compile(r"\s+")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def token_text(token: Any) -> str | None:
    """A special token's text: a string, or an object with its `content`; None for anything else.

    Raises CheckpointError for a lone surrogate, which JSON can write: it has no bytes.
    """
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or not token:
        return None
    try:
        token.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"the token `{shown(token, 40)}` is not Unicode text", hint=BROKEN
        ) from None
    return token


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token matched in a text before the rest is encoded.

    `special` tokens are matched only if special tokens are parsed, others always. Those with
    `lstrip` or `rstrip` absorb the whitespace before or after them. `single_word` and `normalized`
    are flags for the `tokenizers` library. Equal tokens may have different ids.
    """

    text: str
    id: int = field(compare=False)
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @classmethod
    def read(cls, token: Any, id: int, *, special: bool) -> AddedToken:
        """Read a token with a `token_text`; by default, tokens that are not special are normalized.

        `token`: a string, or an object with flags.
        """
        given = {"normalized": not special} | (token if isinstance(token, dict) else {})
        flags = {name: bool(given.get(name, False)) for name in _FLAGS}
        return cls(text=token_text(token) or "", id=id, special=special, **flags)


def listed_tokens(
    settings: Mapping[str, Any], special: Container[str | None]
) -> dict[int, AddedToken]:
    """Id → token from `added_tokens_decoder` of tokenizer_config.json.

    Tokens whose text is in `special` are special even if their flag is not set.
    """
    listed = settings.get("added_tokens_decoder")
    found = {}
    for key, token in listed.items() if isinstance(listed, dict) else ():
        text = token_text(token) if isinstance(token, dict) else None
        if text is None or not (key.isdecimal() and key.isascii() and len(key) < 10):
            raise CheckpointError(
                f"the added token `{shown(key, 40)}` has no id or no text", hint=BROKEN
            )
        check_id("tokenizer_config.json", text, int(key))
        marked = text in special or bool(token.get("special"))
        found[int(key)] = AddedToken.read(token, int(key), special=marked)
    return found


def tokens_of_file(directory: Path, special: Container[str | None]) -> dict[int, AddedToken]:
    """Id → token from added_tokens.json, which has no flags."""
    path = directory / "added_tokens.json"
    found = {}
    for text, index in (read_object(path) or {}).items():
        check_id(path.name, text, index)
        found[index] = AddedToken.read(text, index, special=text in special)
    return found


def check_id(file: str, text: object, index: object) -> None:
    """Raise CheckpointError for an invalid token id."""
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < _MAX_ID:
        raise CheckpointError(
            f"`{file}` gives `{shown(text)}` the id `{shown(index, 40)}`", hint=BROKEN
        )


def of_library(backend: tokenizers.Tokenizer) -> dict[int, AddedToken]:
    """Id → added token of a tokenizer of the `tokenizers` library."""
    return {
        index: AddedToken(
            text=token.content,
            id=index,
            special=token.special,
            **{name: getattr(token, name) for name in _FLAGS},
        )
        for index, token in backend.get_added_tokens_decoder().items()
    }


def add_to_library(
    backend: tokenizers.Tokenizer,
    listed: Mapping[int, AddedToken],
    special: Iterable[Any],
    *,
    marks: bool,
    rows: int | None,
) -> None:
    """Add tokens as transformers does on loading (`TokenizersBackend.__init__`).

    First those `listed`, in order of their ids with their flags, then missing `special` ones. A new
    token gets the next id, not its listed id; from `rows` on (no embedding) it stays plain text.
    `marks`: `special` tokens are marked special even if the tokenizer has them otherwise. All in
    one call, because the library rebuilds its matcher with every call.
    """
    from tokenizers import AddedToken as LibraryToken

    registered = of_library(backend)
    known = {token.text: token for token in registered.values()}
    wanted = {token.text: token for _, token in sorted(listed.items()) if token.text}
    for given in special:
        if (text := token_text(given)) is not None and (marks or text not in known | wanted):
            like = wanted.get(text) or known.get(text) or AddedToken.read(given, -1, special=True)
            wanted[text] = replace(like, special=True)
    size = max(backend.get_vocab_size(with_added_tokens=False), 1 + max(registered, default=-1))
    new = [text for text in wanted if backend.token_to_id(text) is None]
    for text in [] if rows is None else new[max(0, rows - size) :]:
        del wanted[text]
    backend.add_tokens(
        [
            LibraryToken(
                text, special=token.special, **{name: getattr(token, name) for name in _FLAGS}
            )
            for text, token in wanted.items()
            if token != known.get(text)
        ]
    )


Cut = tuple[AddedToken | None, int, int]  # a token or a stretch of text; its start and end


@dataclass(frozen=True)
class AddedTokens:
    """Tokens matched in a text, and the rule for overlapping matches.

    `leftmost`: the leftmost match counts, then the longest, as in transformers
    (tokenization_utils_sentencepiece.py). Otherwise one token after the other is matched in the
    whole text, in this order, as in llama.cpp (src/llama-vocab.cpp, `tokenizer_st_partition`).
    """

    tokens: Sequence[AddedToken]
    leftmost: bool

    @property
    def ids(self) -> frozenset[int]:
        """All ids; these tokens decode to their own text."""
        return frozenset(token.id for token in self.tokens)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, hidden in decoded text by default."""
        return frozenset(token.id for token in self.tokens if token.special)

    def cut(self, text: str, parse_special: bool) -> Iterator[Cut]:
        """Yield tokens, and None for stretches between them, with start and end in characters.

        Absorbed whitespace belongs to none of them.
        """
        tokens = self._by_text[parse_special]
        return _leftmost(text, tokens) if self.leftmost else _one_by_one(text, tokens.values())

    @cached_property
    def _by_text(self) -> dict[bool, dict[str, AddedToken]]:
        """By `parse_special`: the tokens that are matched, by their texts, in order."""
        return {
            special: {token.text: token for token in self.tokens if special or not token.special}
            for special in (False, True)
        }


def _one_by_one(text: str, tokens: Iterable[AddedToken]) -> Iterator[Cut]:
    fragments: list[Cut] = [(None, 0, len(text))] if text else []
    for token in tokens:
        if token.text not in text:
            continue
        cut: list[Cut] = []
        for fragment in fragments:
            if fragment[0] is not None:
                cut.append(fragment)
                continue
            _, at, end = fragment
            for index, stretch in enumerate(text[at:end].split(token.text)):
                if index:
                    cut.append((token, at, at + len(token.text)))
                    at += len(token.text)
                kept = stretch.lstrip(_C_SPACES) if index and token.rstrip else stretch
                until = at + len(stretch)
                if kept:
                    cut.append((None, until - len(kept), until))
                at = until
        fragments = cut
    return iter(fragments)


def _leftmost(text: str, tokens: Mapping[str, AddedToken]) -> Iterator[Cut]:
    at = 0
    for token, begin, end in _found(text, tokens):
        if begin < at:
            continue  # inside whitespace absorbed by the previous token
        until = at + len(text[at:begin].rstrip()) if token.lstrip else begin
        if at < until:
            yield None, at, until
        yield token, begin, end
        behind = _SPACES.match(text, end) if token.rstrip else None
        at = behind.end() if behind is not None else end
    if at < len(text):
        yield None, at, len(text)


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
