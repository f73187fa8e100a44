"""Looks up hub models in the shared hub cache, or downloads them.

The huggingface_hub library resumes after a broken connection, renames complete files, and lets
concurrent processes fetch a file once. Its cache is documented at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmcli.checkpoints.files import shown
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.checkpoints.hub.calls import explained
from llmcli.checkpoints.hub.fetching import fetch_files, mark_missing, pin
from llmcli.checkpoints.hub.files import (
    BROKEN,
    COMPLETE,
    NO_WEIGHTS,
    SMALL,
    TOKENIZERS,
    absent,
    choose,
    emptied,
    gguf_groups,
    shards_of,
    state_of,
)
from llmcli.checkpoints.hub.library import check_settings, has_odd_reference, spelled_out
from llmcli.checkpoints.hub.listing import listed
from llmcli.checkpoints.names import CLASSICS, HubId
from llmcli.checkpoints.split import part_names
from llmcli.errors import ModelNotFound
from llmcli.records.work import Progress


def cached(model: HubId, *, weights: bool = True, whole: bool = True) -> Path | None:
    """The snapshot directory or file of `model` if completely cached.

    No network. Without `weights` a tokenizer is enough. Without `whole` a runnable model is enough,
    even if a download could add files: other tools fetch weights without the tokenizer. Copies
    under a classic's old name (`gpt2`) count too. Raises ModelNotFound for an invalid id.
    """
    if found := _cached(model, weights, whole):
        return found
    old = next((name for name, new in CLASSICS.items() if new == model.repository), None)
    return None if old is None else _cached(replace(model, repository=old), weights, whole)


def broken_link(model: HubId) -> str:
    """The name of a broken link of `model` in the cache; empty if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with suppress(HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        folder = Path(
            snapshot_download(model.repository, revision=model.revision, local_files_only=True)
        )
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() and not path.exists():
                return str(path.relative_to(folder))
    return ""


def _cached(model: HubId, weights: bool, whole: bool) -> Path | None:
    check_settings()
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # 0.16 s
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    _check_revision(model)
    model = spelled_out(model)
    if has_odd_reference(model):
        return None
    try:
        if model.file is not None:
            names = part_names(model.file) or (model.file,)
            found = [
                try_to_load_from_cache(model.repository, name, revision=model.revision)
                for name in names
            ]
            if not all(isinstance(one, str) for one in found):
                return None
            paths = [Path(str(one)) for one in found]
            return None if any(map(emptied, paths)) else paths[0]
        folder = snapshot_download(
            model.repository,
            revision=model.revision,
            local_files_only=True,
            # required files, compared only if the cache has a listing
            allow_patterns=list(SMALL) if whole else [SINGLE],
        )
        return _usable(Path(folder), weights, whole)
    except HFValidationError:
        raise ModelNotFound(
            f"`{shown(model.repository)}` cannot be a hub id",
            hint="a hub id is `org/name`, as on the model's page",
        ) from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _usable(folder: Path, weights: bool, whole: bool) -> Path | None:
    """The directory, or the GGUF file in it, if all needed files are present."""
    names = held(folder)
    tensors = any(name.endswith(".safetensors") for name in names)
    if whole and (tensors or not weights) and any(emptied(folder / name) for name in SMALL):
        return None
    if not weights and not names.isdisjoint(TOKENIZERS):
        return folder
    state = state_of(names, folder / INDEX, absent(folder))
    if state == COMPLETE:
        return folder if tensors else folder / gguf_groups(names)[0][0]
    return None if whole or state in (BROKEN, NO_WEIGHTS) else folder


def held(snapshot: Path) -> set[str]:
    """Names of the usable files of a snapshot."""
    return {
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*")
        if path.is_file() and not emptied(path)
    }


def download(model: HubId, *, weights: bool = True, progress: Progress | None = None) -> Path:
    """Fetch missing files of `model`; returns the snapshot directory or the (first) file.

    Without `weights` only the other files, unless the weights are a GGUF file. The branch or tag is
    pinned to its commit when all files are complete. `progress` counts bytes over all files. Raises
    errors of `explained` and `choose`, CheckpointError for a wrong sha256, and WriteFailed before
    any download if there is not enough space.
    """
    _check_revision(model)
    model = spelled_out(model)
    with explained(model):
        listing = listed(model)
        choice = choose(model, listing.sizes)
        large = choice.weights if weights or choice.lone else ()
        if weights and not choice.weights:  # the index lists the other files
            index = fetch_files(model, listing, (INDEX,))[INDEX]
            large = shards_of(index, listing.sizes)
        mark_missing(model, listing, choice.small)
        # weights last: if they are there, so is the rest
        paths = fetch_files(model, listing, (*choice.small, *large), progress)
        name, path = next(iter(paths.items()))
        folder = path.parents[name.count("/")]
        pin(model, listing.commit, folder)
        return paths[large[0]] if choice.lone else folder


def _check_revision(model: HubId) -> None:
    """Raise ModelNotFound for `..` in a revision, which becomes a file name in the cache."""
    if model.revision is not None and ".." in model.revision:
        raise ModelNotFound(
            f"`{shown(model.revision)}` cannot be a revision",
            hint="a revision is a branch, a tag or a commit",
        )
