"""Resolves the value of `-m` to a path on this machine."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmcli.checkpoints.catalog import CATALOG, named, offline_from_environment
from llmcli.checkpoints.checkpoint import Checkpoint, open_checkpoint
from llmcli.checkpoints.files import shown
from llmcli.checkpoints.hub.download import broken_link, cached, download
from llmcli.checkpoints.hub.listing import WEIGHTS
from llmcli.checkpoints.names import CLASSICS, HubId, hub_name
from llmcli.errors import WITHOUT_NETWORK, ModelNotFound, NetworkError, WriteFailed
from llmcli.records.numbers import did_you_mean
from llmcli.records.work import Progress

DEFAULT_MODEL, BUNDLED_MODEL = "smollm2", "tiny"


def find(
    spec: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[str, Path]:
    """The name of the model `spec`, and its file or directory.

    None: $LLMCLI_MODEL, else `smollm2`, or `tiny` if that cannot be fetched and `note` is given;
    without `note` the error is raised. A named model (also by the variable) is never replaced.
    `progress(what, done, total)` receives bytes of downloads, `note(text)` lines for stderr. Makes
    no network call if the file is cached or with `offline` ($LLMCLI_OFFLINE, $HF_HUB_OFFLINE). A
    model that is named, not given by its path, is marked as used.
    Raises ModelNotFound, UsageError, NetworkError, CheckpointError or WriteFailed.
    """
    name = default_model() if spec is None else spec
    try:
        path = _found(name, revision, offline, progress, note)
    except (NetworkError, WriteFailed) as error:
        if note is None or spec is not None or os.environ.get("LLMCLI_MODEL"):
            raise
        note(
            f"using `{BUNDLED_MODEL}`, the small model that ships with llmcli: no model was named, "
            f"and {error.message}"
        )
        return BUNDLED_MODEL, _found(BUNDLED_MODEL, None, offline, progress, None)
    return name, path


def _found(
    spec: str,
    revision: str | None,
    offline: bool,
    progress: Progress | None,
    note: Callable[[str], None] | None,
) -> Path:
    found = named(spec, revision)
    if isinstance(found, Path):
        return _existing(found, spec)
    if isinstance(found, str):
        raise _unknown(found)
    if note is not None:
        note_directory(spec, note)
    offline = offline or offline_from_environment()
    if isinstance(found, HubId):
        return _used(_from_hub(found, offline, progress))
    if found.file is not None and found.is_cached():
        return found.file if found.folder is not None else _used(found.file)
    from llmcli.checkpoints.fetch import fetch  # subprocess, zipfile: only where it is needed

    return _used(fetch(found, offline=offline, progress=progress, note=note))


def note_directory(spec: str, note: Callable[[str], None]) -> None:
    """Send a note if `spec` is not a path but a directory of that name exists."""
    if os.path.isdir(spec):
        note(f"a directory `{shown(spec)}` exists too; write `./{shown(spec)}` for that one")


def open_model(
    spec: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open the checkpoint of the model `spec`: `find`, then `open_checkpoint`."""
    name, path = find(spec, revision=revision, offline=offline, progress=progress, note=note)
    return open_checkpoint(path, name=name)


def default_model() -> str:
    """The default model: $LLMCLI_MODEL, else `smollm2`."""
    return os.environ.get("LLMCLI_MODEL") or DEFAULT_MODEL


def _existing(path: Path, spec: str) -> Path:
    if os.path.lexists(path) and "\0" not in spec:
        return path
    near = difflib.get_close_matches(path.name, _listing(path.parent), n=1)
    name = hub_name(spec)
    otherwise = f"for the file on the hub write `{shown(name, 200)}`" if name else "check the path"
    raise ModelNotFound(
        f"there is no file or directory `{shown(spec)}`",
        hint=did_you_mean([shown(path.parent / one) for one in near], otherwise),
    )


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


def _unknown(name: str) -> ModelNotFound:
    near = difflib.get_close_matches(name.partition("@")[0], [*CATALOG, *CLASSICS], n=1)
    hint = did_you_mean(near, f"known names: {', '.join(CATALOG)}")
    if os.path.exists(name) and "\0" not in name:
        hint = f"for the file or directory of that name write `./{shown(name)}`"
    return ModelNotFound(f"there is no model `{shown(name)}`", hint=hint)


def _from_hub(model: HubId, offline: bool, progress: Progress | None) -> Path:
    """From the hub cache, else the hub; a partial copy if the hub fails."""
    if path := cached(model):
        return path
    name = shown(f"{model.repository}/{model.file}" if model.file else model.repository)
    error = NetworkError(
        f"`{name}` is not in the hub cache, and offline mode allows no download",
        hint=f"run once without offline mode; {WITHOUT_NETWORK}",
    )
    try:
        if not offline:
            return download(model, progress=progress)
    except NetworkError as found:
        error = found
    if path := cached(model, whole=False):
        return path
    if link := broken_link(model):
        raise NetworkError(
            f"`{name}` is incomplete in the hub cache: `{shown(link)}` is a broken link",
            hint=error.hint,
        )
    raise error


def _used(path: Path) -> Path:
    """`path`, whose weights' access time, the last use, is set to now. Never raises.

    Set explicitly since mounts with noatime do not update it.
    """
    with suppress(OSError):
        for file in path.iterdir() if path.is_dir() else (path,):
            if file.suffix.lower() in WEIGHTS:
                os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    return path
