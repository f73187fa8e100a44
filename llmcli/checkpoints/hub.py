"""Looks a hub repository up in the Hugging Face cache that all tools share. No network."""

from __future__ import annotations

import os
from pathlib import Path

from llmcli.checkpoints.files import shown
from llmcli.errors import ModelNotFound, NetworkError

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def find_in_cache(
    repository: str, revision: str | None, file: str | None, *, offline: bool
) -> Path:
    """The cached snapshot directory of `repository` at `revision`, or one `file` of it.

    A snapshot counts once it holds a weight file (other tools fetch configurations alone).
    Raises NetworkError where it is not cached, ModelNotFound where the id cannot be one.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # 0.16 s
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    found: Path | None = None
    try:
        if file is not None:
            hit = try_to_load_from_cache(repository, file, revision=revision)
            found = Path(hit) if isinstance(hit, str) else None
        else:
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
            if any(name.endswith(_WEIGHTS) for name in os.listdir(folder)):
                found = folder
    except HFValidationError:
        raise ModelNotFound(f"`{shown(repository)}` cannot be a hub id") from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        found = None
    if found is not None:
        return found
    raise _missing(repository, revision, file, offline)


def _missing(
    repository: str, revision: str | None, file: str | None, offline: bool
) -> NetworkError:
    command = " ".join(["hf download", repository, *([file] if file else [])])
    if revision:
        command += f" --revision {revision}"
    name = shown(f"{repository}/{file}" if file else repository)
    if offline:
        cause = f"`{name}` is not in the hub cache, and offline mode allows no download"
    else:
        cause = f"`{name}` is not in the hub cache, and this version does not download from the hub"
    return NetworkError(cause, hint=f"run `{shown(command, 200)}`, then this command again")
