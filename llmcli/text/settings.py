"""Reads a tokenizer's settings: special tokens and chat template.

The files tokenizer_config.json, special_tokens_map.json, chat templates and configurations are read
as in transformers (tokenization_utils_base.py, processing_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import read_object
from llmcli.errors import CheckpointError
from llmcli.text.chat import MAX_SOURCE, ChatTemplate

BROKEN = "the file is damaged; fetch it again"
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MORE_TEMPLATES = "additional_chat_templates"


def read_settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, overridden by special_tokens_map.json in old formats."""
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
    """A special token's text: a string, or an object with its `content`; None for anything else."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name (`bos_token`, …, or a model's own) → text of the special tokens for templates."""
    found = {name: token_text(token) for name, token in _named(settings).items()}
    return {name: text for name, text in found.items() if text is not None}


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    own = settings.get("extra_special_tokens")
    named = {key: settings.get(key) for key in _ROLES}
    named |= {key: token for key, token in settings.items() if key.endswith("_token")}
    return named | (own if isinstance(own, dict) else {})


def special_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """All special tokens as given, in transformers' order: named ones, then listed ones."""
    listed = (settings.get(f"{kind}_special_tokens") for kind in ("extra", "additional"))
    more = next((tokens for tokens in listed if tokens and isinstance(tokens, list)), [])
    return [*_named(settings).values(), *more]


def eos_ids(config: Mapping[str, Any] | None) -> list[int]:
    """Read `eos_token_id` of config.json or generation_config.json: absent, a number, or a list.

    Other values are ignored here and reported by the configuration's reader.
    """
    value = (config or {}).get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return [index for index in listed if isinstance(index, int) and not isinstance(index, bool)]


def rows_of(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding; None if the configuration lacks them."""
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def chat_template_of(
    directory: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplate | None:
    """The `default` chat template; without a default, the first.

    Templates in chat_template.jinja and additional_chat_templates/ take precedence over the
    settings (a string, an object, or a list of named ones); chat_template.json, read by processors,
    comes last.
    """
    more = directory / _MORE_TEMPLATES
    files = {path.name.removesuffix(".jinja"): path for path in sorted(more.glob("*.jinja"))}
    if (path := directory / "chat_template.jinja").is_file():
        files["default"] = path
    source: Any = settings.get("chat_template")
    if source is None or "default" in files:
        source = {name: _template_file(path) for name, path in files.items()} or None
    if source is None:
        source = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = {entry.get("name"): entry.get("template") for entry in entries}
    if isinstance(source, dict):
        source = source.get("default", next(iter(source.values()), None))
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError("`chat_template` is neither a text nor named texts", hint=BROKEN)
    return ChatTemplate(source, special_tokens=named)


def _template_file(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_SOURCE + 1)
    except ValueError as error:
        raise CheckpointError(f"`{path.name}` is not UTF-8", hint=BROKEN) from error
