"""Models from the hub, in the cache that all tools share: looked up without network, or fetched.

huggingface_hub downloads: it continues after a cut connection, gives a file its name when it is
whole, and lets two processes fetch it once. Its cache is documented at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmcli.checkpoints.cache.hub import spelled_out
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
    choose,
    gguf_groups,
    shards_of,
    state_of,
)
from llmcli.checkpoints.hub.library import check_settings, has_odd_reference
from llmcli.checkpoints.hub.listing import listed
from llmcli.checkpoints.hub.marks import absent, emptied, unverified
from llmcli.checkpoints.names import CLASSICS, HubId
from llmcli.checkpoints.split import part_names
from llmcli.errors import ModelNotFound
from llmcli.records.progress import Progress


def cached(model: HubId, *, weights: bool = True, whole: bool = True) -> Path | None:
    """The snapshot directory or the file of `model` where the cache has all of it. No network.

    Without `weights` a tokenizer is enough. Not `whole`: what can be run, where a download
    would perhaps bring more: other tools fetch weights without the tokenizer.
    What other tools keep under a classic's old name (`gpt2`) counts, too.
    Raises ModelNotFound where the id cannot be one.
    """
    if found := _cached(model, weights, whole):
        return found
    old = next((name for name, new in CLASSICS.items() if new == model.repository), None)
    return None if old is None else _cached(replace(model, repository=old), weights, whole)


def broken_link(model: HubId) -> str:
    """The name of a file of `model` in the cache that leads nowhere, empty where none does."""
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
            path = Path(str(found[0]))
            marks = unverified(path.parents[names[0].count("/")])
            sound = marks.isdisjoint(names) and not any(emptied(Path(str(one))) for one in found)
            return path if sound else None
        folder = snapshot_download(
            model.repository,
            revision=model.revision,
            local_files_only=True,
            # without a listing in the cache this compares nothing; with one, what must be there
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
    """The directory, or the GGUF file in it, where what is needed is there."""
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
    """Names of the files of a snapshot that are there and may be used."""
    found = {
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*")
        if path.is_file() and not emptied(path)
    }
    return found - unverified(snapshot)


def download(model: HubId, *, weights: bool = True, progress: Progress | None = None) -> Path:
    """Fetches what is missing of `model`: the snapshot directory, or the (first) file.

    Without `weights` only what is beside them, unless they are a GGUF file. The branch or tag
    is pinned to its commit when everything is there. `progress` hears of bytes over all files.
    Raises what `explained` and `choose` raise, CheckpointError for a file whose sha256 is not
    the one that the hub told, WriteFailed before anything is fetched where it has no room.
    """
    _check_revision(model)
    model = spelled_out(model)
    with explained(model):
        listing = listed(model)
        choice = choose(model, listing.sizes)
        large = choice.weights if weights or choice.lone else ()
        if weights and not choice.weights:  # first the index, which says what else
            index = fetch_files(model, listing, (INDEX,))[INDEX]
            large = shards_of(index, listing.sizes)
        mark_missing(model, listing, choice.small)
        # the weights last: where they are, the rest is
        paths = fetch_files(model, listing, (*choice.small, *large), progress)
        name, path = next(iter(paths.items()))
        folder = path.parents[name.count("/")]
        pin(model, listing.commit, folder)
        return paths[large[0]] if choice.lone else folder


def _check_revision(model: HubId) -> None:
    """A revision becomes the name of a file in the cache."""
    if model.revision is not None and ".." in model.revision:
        raise ModelNotFound(
            f"`{shown(model.revision)}` cannot be a revision",
            hint="a revision is a branch, a tag or a commit",
        )
