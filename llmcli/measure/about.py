"""Who a model is: what its file, its configuration or our catalog says of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.checkpoints import Checkpoint
from llmcli.checkpoints.catalog import CATALOG
from llmcli.reports.info import About


def about(checkpoint: Checkpoint) -> About:
    """A GGUF file's `general.…`; of a directory, the name and kind that its config.json has."""
    entry = CATALOG.get(checkpoint.name)
    summary = "" if entry is None else entry.summary
    settings = checkpoint.config or {}
    if checkpoint.kind != "gguf":
        kinds = _texts(settings, "architectures")
        return About(summary=summary, name=_text(settings, "_name_or_path"), kind=", ".join(kinds))
    return About(
        summary=summary,
        name=_text(settings, "general.name"),
        organization=_text(settings, "general.organization"),
        license=_text(settings, "general.license"),
        languages=_texts(settings, "general.languages"),
    )


def _text(settings: Mapping[str, Any], key: str) -> str:
    found = settings.get(key)
    return found if isinstance(found, str) else ""


def _texts(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = settings.get(key)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else ()
