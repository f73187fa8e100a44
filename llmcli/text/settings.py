"""What stands beside a tokenizer and says which tokens are special and how a chat is written.

tokenizer_config.json, special_tokens_map.json, chat_template.jinja and the configurations, read
as transformers reads them (tokenization_utils_base.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import read_object
from llmcli.errors import CheckpointError
from llmcli.text.chat import MAX_SOURCE, ChatTemplate

BROKEN = "the file is damaged; fetch it again"
_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


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
        raise CheckpointError(error.message, hint=error.hint or BROKEN) from error


def token_text(token: Any) -> str | None:
    """A special token's text: a string, an AddedToken, or a serialized one with its `content`."""
    from tokenizers import AddedToken

    if isinstance(token, AddedToken):
        token = token.content
    elif isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role (`bos_token`, …) → text of the special tokens that the settings name."""
    found = {role: token_text(settings.get(role)) for role in _NAMED}
    return {role: text for role, text in found.items() if text is not None}


def eos_ids(config: Mapping[str, Any] | None) -> list[int]:
    """`eos_token_id` of config.json or generation_config.json: absent, a number, or a list.

    What is no number is ignored: whether a configuration is wrong is said where it is read.
    """
    value = (config or {}).get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return [index for index in listed if isinstance(index, int) and not isinstance(index, bool)]


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
            raise CheckpointError(f"`{path.name}` is not UTF-8", hint=BROKEN) from error
    elif isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        by_name = {entry.get("name"): entry.get("template") for entry in entries}
        source = by_name.get("default", next(iter(by_name.values()), None))
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`chat_template` is neither a string nor a list", hint=BROKEN)
    return ChatTemplate(source, special_tokens=named)
