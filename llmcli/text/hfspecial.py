"""Which tokens of the library's tokenizer are special, as the settings beside it say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmcli.text.settings import token_text

if TYPE_CHECKING:
    import tokenizers


def mark_special(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Make the named tokens special, as transformers does when it loads.

    Only tokens that the vocabulary has: a new one would get an id that no model was trained on.
    One call for all of them, because the library builds its search anew with every call.
    """
    registered = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wanted: dict[str, tokenizers.AddedToken] = {}

    def want(token: Any, *, special: bool) -> None:
        text = token_text(token)
        if text is not None and backend.token_to_id(text) is not None:
            wanted[text] = _added(text, token, special=special)

    listed = settings.get("added_tokens_decoder")
    for token in listed.values() if isinstance(listed, dict) else ():
        if isinstance(token, dict):
            want(token, special=bool(token.get("special", False)))
    for role, text in named.items():
        want(wanted.get(text, registered.get(text, settings[role])), special=True)
    for token in _more_special(settings):
        want(token, special=True)
    changed = [token for text, token in wanted.items() if token != registered.get(text)]
    backend.add_tokens([token for token in changed if not token.special])
    backend.add_special_tokens([token for token in changed if token.special])


def _more_special(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Special tokens beside the roles: listed, or a model's own (`image_token`, …)."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        yield from more if isinstance(more, list) else ()
        yield from more.values() if isinstance(more, dict) else ()
    for key, token in settings.items():
        if key.endswith("_token") and isinstance(token, str):
            yield token


def _added(text: str, token: Any, *, special: bool) -> tokenizers.AddedToken:
    """The token as the library wants it, with the flags of `token` where that has any."""
    from tokenizers import AddedToken

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    if isinstance(token, AddedToken):
        flags = {name: getattr(token, name) for name in flags}
    elif isinstance(token, dict):
        flags = {name: bool(token.get(name, default)) for name, default in flags.items()}
    return AddedToken(text, special=special, **flags)
