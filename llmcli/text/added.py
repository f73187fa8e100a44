"""Added tokens: read from a tokenizer's settings, and cut out of a text before it is encoded."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import read_object, shown
from llmcli.errors import CheckpointError
from llmcli.text.spelling import is_unicode

if TYPE_CHECKING:
    import tokenizers

_MAX_ID = 1 << 24
_C_SPACES = re.compile(r"[ \t\n\v\f\r]+")  # characters of C's `isspace`
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
    if not is_unicode(token):
        raise CheckpointError(f"the token `{shown(token, 40)}` is not Unicode text")
    return token


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token matched in a text before the rest is encoded; fields as in the `tokenizers` library.

    `special` tokens are matched only if special tokens are parsed, others always. Those with
    `lstrip` or `rstrip` absorb the whitespace before or after them. `single_word` and `normalized`
    are flags for the library.
    """

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @classmethod
    def read(cls, token: Any, *, special: bool) -> AddedToken:
        """Read a token with a `token_text`; by default, tokens that are not special are normalized.

        `token`: a string, or an object with flags.
        """
        given = {"normalized": not special} | (token if isinstance(token, dict) else {})
        flags = {name: bool(given.get(name, False)) for name in _FLAGS}
        return cls(content=token_text(token) or "", special=special, **flags)


def listed_tokens(
    directory: Path,
    settings: Mapping[str, Any],
    special: Container[str | None],
    *,
    both: bool = False,
) -> dict[int, AddedToken]:
    """Id → token from `added_tokens_decoder` of tokenizer_config.json, else added_tokens.json.

    The latter has no flags. `both`: read both, the former takes precedence. Tokens whose text is in
    `special` are special even if their flag is not set.
    """
    listed, path = settings.get("added_tokens_decoder"), directory / "added_tokens.json"
    found = {}
    if both or not isinstance(listed, dict):
        for text, index in (read_object(path) or {}).items():
            check_id(path.name, text, index)
            found[index] = AddedToken.read(text, special=text in special)
    for key, token in listed.items() if isinstance(listed, dict) else ():
        own = token_text(token) if isinstance(token, dict) else None
        if own is None or not (key.isdecimal() and key.isascii() and len(key) < 10):
            raise CheckpointError(f"the added token `{shown(key, 40)}` has no id or no text")
        check_id("tokenizer_config.json", own, int(key))
        marked = own in special or bool(token.get("special"))
        found[int(key)] = AddedToken.read(token, special=marked)
    return found


def check_id(file: str, text: object, index: object) -> None:
    """Raise CheckpointError for an invalid token id."""
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < _MAX_ID:
        raise CheckpointError(f"`{file}` gives `{shown(text)}` the id `{shown(index, 40)}`")


def of_library(backend: tokenizers.Tokenizer) -> dict[int, AddedToken]:
    """Id → added token of a tokenizer of the `tokenizers` library."""
    names = ("content", "special", *_FLAGS)
    return {
        index: AddedToken(**{name: getattr(token, name) for name in names})
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
    known = {token.content: token for token in registered.values()}
    wanted = {listed[id].content: listed[id] for id in sorted(listed) if listed[id].content}
    for given in special:
        if (text := token_text(given)) is not None and (marks or text not in known | wanted):
            like = wanted.get(text) or known.get(text) or AddedToken.read(given, special=True)
            wanted[text] = replace(like, special=True)
    size = max(backend.get_vocab_size(with_added_tokens=False), 1 + max(registered, default=-1))
    new = [text for text in wanted if backend.token_to_id(text) is None]
    for text in [] if rows is None else new[max(0, rows - size) :]:
        del wanted[text]
    changed = (token for text, token in wanted.items() if token != known.get(text))
    backend.add_tokens([LibraryToken(**vars(token)) for token in changed])


Cut = tuple[int | None, int, int]  # a token's id, or None for a stretch of text; start and end


@dataclass(frozen=True)
class AddedTokens:
    """Id → token matched in a text, and the rule for overlapping matches.

    `leftmost`: the leftmost match counts, then the longest, as in transformers
    (tokenization_utils_sentencepiece.py). Otherwise one token after the other is matched in the
    whole text, in this order, as in llama.cpp (src/llama-vocab.cpp, `tokenizer_st_partition`).
    """

    tokens: Mapping[int, AddedToken]
    leftmost: bool

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, hidden in decoded text by default."""
        return frozenset(id for id, token in self.tokens.items() if token.special)

    def cut(self, text: str, parse_special: bool) -> Iterator[Cut]:
        """Yield tokens, and None for stretches between them, with start and end in characters.

        Absorbed whitespace belongs to none of them.
        """
        tokens = self._by_text[parse_special]
        return _leftmost(text, tokens) if self.leftmost else _one_by_one(text, tokens)

    @cached_property
    def _by_text(self) -> dict[bool, dict[str, tuple[int, AddedToken]]]:
        """By `parse_special`: the tokens that are matched with their ids, by text, in order."""
        return {
            special: {
                token.content: (id, token)
                for id, token in self.tokens.items()
                if special or not token.special
            }
            for special in (False, True)
        }


def _one_by_one(text: str, tokens: Mapping[str, tuple[int, AddedToken]]) -> Iterator[Cut]:
    found: list[Cut] = []
    stretches = [(0, len(text))] if text else []
    for content, known in tokens.items():
        if content not in text:
            continue
        id, token = known
        rest: list[tuple[int, int]] = []
        for at, end in stretches:
            left = at  # start of the stretch before the next match
            while (begin := text.find(content, at, end)) >= 0:
                rest.append((left, begin))
                at = begin + len(content)
                found.append((id, begin, at))
                left = _behind(_C_SPACES, text, at, end) if token.rstrip else at
            rest.append((left, end))
        stretches = [(begin, end) for begin, end in rest if begin < end]
    found += ((None, *place) for place in stretches)
    return iter(sorted(found, key=itemgetter(1)))


def _leftmost(text: str, tokens: Mapping[str, tuple[int, AddedToken]]) -> Iterator[Cut]:
    """Tokens are looked up by length at every possible first character.

    One regular expression takes seconds for a long text and hundreds of tokens.
    """
    lengths: dict[str, list[int]] = {}  # by first character, longest first
    for length, first in sorted({(len(name), name[0]) for name in tokens}, reverse=True):
        lengths.setdefault(first, []).append(length)
    begins = re.compile("[" + "".join(map(re.escape, lengths)) + "]" if tokens else "(?!)")
    done = at = 0  # characters covered, and searched
    while (match := begins.search(text, at)) is not None:
        begin = match.start()
        at = begin + 1
        for length in lengths[match[0]]:
            if (found := tokens.get(text[begin : begin + length])) is not None:
                break
        else:
            continue
        id, token = found
        at = begin + len(token.content)
        if begin < done:
            continue  # inside whitespace absorbed by the previous token
        until = done + len(text[done:begin].rstrip()) if token.lstrip else begin
        if done < until:
            yield None, done, until
        yield id, begin, at
        done = _behind(_SPACES, text, at, len(text)) if token.rstrip else at
    if done < len(text):
        yield None, done, len(text)


def _behind(spaces: re.Pattern[str], text: str, at: int, end: int) -> int:
    """Where the `spaces` at `at` end."""
    found = spaces.match(text, at, end)
    return at if found is None else found.end()
