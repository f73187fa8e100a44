"""What several of the five commands take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmcli.cli.options import MODEL
from llmcli.cli.params import opt


@dataclass(frozen=True, kw_only=True)
class RevisionOptions:
    """Which version of what is on the hub."""

    panel: ClassVar[str] = MODEL
    revision: str | None = opt(
        None, "--revision", "REV",
        "Branch, tag or commit on the hub, for all that are named.",
    )  # fmt: skip
