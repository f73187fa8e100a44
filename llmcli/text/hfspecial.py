"""Adds tokens that only the tokenizer's settings define."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llmcli.text.settings import token_text

if TYPE_CHECKING:
    import tokenizers


def add_tokens(
    backend: tokenizers.Tokenizer,
    listed: Mapping[int, Any],
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
    registered = backend.get_added_tokens_decoder()
    wanted: dict[str, tokenizers.AddedToken] = {}
    named = {token_text(token) for token in special}
    for _, token in sorted(listed.items()):
        if (text := token_text(token)) is not None:
            wanted[text] = _added(text, token, special=text in named or _is_special(token))
    known = {token.content: token for token in registered.values()}
    for token in special:
        if (text := token_text(token)) is not None and (marks or text not in known | wanted):
            like = wanted.get(text) or known.get(text) or token
            wanted[text] = _added(text, like, special=True)
    size = max(backend.get_vocab_size(with_added_tokens=False), 1 + max(registered, default=-1))
    new = [text for text in wanted if backend.token_to_id(text) is None]
    for text in [] if rows is None else new[max(0, rows - size) :]:
        del wanted[text]
    backend.add_tokens([token for text, token in wanted.items() if token != known.get(text)])


def _is_special(token: Any) -> bool:
    return bool(token.get("special") if isinstance(token, dict) else getattr(token, "special", 0))


def _added(text: str, token: Any, *, special: bool) -> tokenizers.AddedToken:
    """The library's AddedToken, with the flags of `token` if it has any."""
    from tokenizers import AddedToken

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    if isinstance(token, AddedToken):
        flags = {name: getattr(token, name) for name in flags}
    elif isinstance(token, dict):
        flags = {name: bool(token.get(name, default)) for name, default in flags.items()}
    return AddedToken(text, special=special, **flags)
