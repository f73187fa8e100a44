"""The tokenizer of a directory: tokenizer.json and the files that transformers reads beside it.

tokenizer_config.json, special_tokens_map.json and chat_template.jinja say which tokens are
special and how a chat is written (transformers, tokenization_utils_base.py and
tokenization_utils_tokenizers.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.checkpoints.files import read_object, shown
from llmcli.errors import CheckpointError, LlmcliError, UnsupportedModel
from llmcli.text.chat import MAX_SOURCE, ChatTemplate
from llmcli.text.spelling import spelling_of
from llmcli.text.tokenizer import Tokenizer, Vocabulary

if TYPE_CHECKING:
    import tokenizers

MAX_FILE = 1 << 28  # bytes; the largest known tokenizer.json has 34 million
_BROKEN = "the file is damaged; fetch it again"
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model")
_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def from_directory(
    directory: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Tokenizer | None:
    """The tokenizer of a checkpoint's directory; None where there is no trace of one.

    `config` and `generation` are config.json and generation_config.json, which name further
    ids that end a text. Raises `UnsupportedModel` where there is only another kind of
    tokenizer, `CheckpointError` for broken files.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in _OTHERS if (directory / name).is_file()), None)
        if other is None:
            return None
        raise UnsupportedModel(
            f"the tokenizer is only there as `{other}`, which llmcli does not read",
            hint="load it with transformers' AutoTokenizer and save it: that writes tokenizer.json",
        )
    try:
        return _build(directory, _read(path), config, generation)
    except (KeyboardInterrupt, SystemExit, LlmcliError):
        raise
    except BaseException as error:  # the library's panics are no `Exception`
        raise CheckpointError(
            f"`{path.name}` cannot be read: {shown(error, 120)}", hint=_BROKEN
        ) from error


def _build(
    directory: Path,
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any] | None,
    generation: Mapping[str, Any] | None,
) -> Tokenizer:
    settings = read_settings(directory)
    named = named_tokens(settings)
    _mark_special(backend, named, settings)
    ids = {role: backend.token_to_id(text) for role, text in named.items()}
    added = backend.get_added_tokens_decoder()
    strings = _strings(backend)
    named_eos = ids.get("eos_token")
    eos = {*eos_ids(config), *eos_ids(generation), *([] if named_eos is None else [named_eos])}
    return Tokenizer(
        backend,
        Vocabulary(
            strings=strings,
            spelling=spelling_of(_decoder(backend)),
            literal=frozenset(),
            silent=frozenset(),
            special_ids=frozenset(index for index, token in added.items() if token.special),
            bos_id=ids.get("bos_token"),
            eos_ids=frozenset(index for index in eos if 0 <= index < len(strings)),
            prefix=_prefix(backend),
        ),
        name=f"tokenizer.json, {type(backend.model).__name__}",
        chat_template=chat_template_of(directory, settings, named),
    )


def _read(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if path.stat().st_size > MAX_FILE:
        raise CheckpointError(f"`{path.name}` has more than {MAX_FILE} bytes", hint=_BROKEN)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; before it listed the added tokens, special_tokens_map.json wins."""
    settings = _json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings.update(_json(directory / "special_tokens_map.json"))
    return settings


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path) or {}
    except CheckpointError as error:
        raise CheckpointError(error.message, hint=error.hint or _BROKEN) from error


def _text(token: Any) -> str | None:
    """A special token's text: a string, an AddedToken, or a serialized one with its `content`."""
    from tokenizers import AddedToken

    if isinstance(token, AddedToken):
        token = token.content
    elif isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role (`bos_token`, …) → text of the special tokens that the settings name."""
    found = {role: _text(settings.get(role)) for role in _NAMED}
    return {role: text for role, text in found.items() if text is not None}


def _mark_special(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Make the named tokens special, as transformers does when it loads.

    Only tokens that the vocabulary has: a new one would get an id that no model was trained on.
    One call for all of them, because the library builds its search anew with every call.
    """
    registered = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wanted: dict[str, tokenizers.AddedToken] = {}

    def want(token: Any, *, special: bool) -> None:
        text = _text(token)
        if text is not None and backend.token_to_id(text) is not None:
            wanted[text] = _added(text, token, special=special)

    listed = settings.get("added_tokens_decoder")
    for token in listed.values() if isinstance(listed, dict) else ():
        if isinstance(token, dict):
            want(token, special=bool(token.get("special", False)))
    for role, text in named.items():
        want(wanted.get(text, registered.get(text, settings[role])), special=True)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        for token in more if isinstance(more, list) else ():
            want(token, special=True)
    changed = [token for text, token in wanted.items() if token != registered.get(text)]
    backend.add_tokens([token for token in changed if not token.special])
    backend.add_special_tokens([token for token in changed if token.special])


def _added(text: str, token: Any, *, special: bool) -> tokenizers.AddedToken:
    """The token as the library wants it, with the flags of `token` where that has any."""
    from tokenizers import AddedToken

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    if isinstance(token, AddedToken):
        flags = {name: getattr(token, name) for name in flags}
    elif isinstance(token, dict):
        flags = {name: bool(token.get(name, default)) for name, default in flags.items()}
    return AddedToken(text, special=special, **flags)


def _strings(backend: tokenizers.Tokenizer) -> list[str | None]:
    vocab = backend.get_vocab(with_added_tokens=True)
    size = 1 + max(vocab.values(), default=-1)
    if size > 2 * len(vocab) + (1 << 20):  # some have holes; this one would fill the memory
        raise CheckpointError(f"one of {len(vocab)} tokens has the id {size - 1}", hint=_BROKEN)
    strings: list[str | None] = [None] * size
    for string, index in vocab.items():
        strings[index] = string
    return strings


def _decoder(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder's serialized form, without the vocabulary around it."""
    if backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def eos_ids(config: Mapping[str, Any] | None) -> list[int]:
    """`eos_token_id` of config.json or generation_config.json: absent, a number, or a list.

    What is no number is ignored: whether a configuration is wrong is said where it is read.
    """
    value = (config or {}).get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return [index for index in listed if isinstance(index, int) and not isinstance(index, bool)]


def _prefix(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts in front of text: BOS, nothing, or several tokens.

    The file decides; transformers drops `add_bos_token` of tokenizer_config.json where there is
    a tokenizer.json. What comes behind the text (EOS) is not wanted in a prompt.
    """
    probe = "a"
    plain = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def chat_template_of(
    directory: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplate | None:
    """The chat template: chat_template.jinja, else the settings' (a string, or named ones)."""
    path = directory / "chat_template.jinja"
    source: Any = settings.get("chat_template")
    if path.is_file():
        try:
            with path.open(encoding="utf-8") as file:
                source = file.read(MAX_SOURCE + 1)
        except ValueError as error:
            raise CheckpointError(f"`{path.name}` is not UTF-8", hint=_BROKEN) from error
    elif isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        by_name = {entry.get("name"): entry.get("template") for entry in entries}
        source = by_name.get("default", next(iter(by_name.values()), None))
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`chat_template` is neither a string nor a list", hint=_BROKEN)
    return ChatTemplate(source, special_tokens=named)
