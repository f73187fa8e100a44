"""From what somebody types after `models rm` to what is removed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from llmcli.checkpoints.cache.commits import lengthened
from llmcli.checkpoints.cache.inventory import Inventory, Stored
from llmcli.checkpoints.cache.removal import Part, Piece, of_hub, of_own, of_repository
from llmcli.checkpoints.catalog import CATALOG
from llmcli.checkpoints.files import shown
from llmcli.checkpoints.names import HubId, parse
from llmcli.checkpoints.split import part_names
from llmcli.errors import ModelNotFound, UsageError


def pieces_of(
    names: Sequence[str], inventory: Inventory, revision: str | None = None
) -> list[Piece]:
    """What has to go for each of `names`, as they are typed after `-m`, each of them once.

    `revision` is that of all of them, None where each has its own or the default branch's.
    Raises UsageError for what is in no cache, ModelNotFound for what is not on this machine.
    """
    pieces: list[Piece] = []
    parts: list[Part] = []
    for name in dict.fromkeys(names):
        found = selected(name, inventory, revision)
        if isinstance(found, Part):
            parts.append(found)
        else:
            pieces.append(found)
    return pieces + of_hub(parts, inventory)


def selected(name: str, inventory: Inventory, revision: str | None = None) -> Part | Piece:
    """The part of a repository, or all of something else, that `name` stands for."""
    for stored in inventory.stored() if revision is None else ():
        if stored.model.name == name:
            if stored.model.place == "package":
                raise UsageError(
                    f"`{name}` ships with llmcli and cannot be removed by itself",
                    hint="`llmcli models list` shows what can",
                )
            if stored.model.place == "nowhere":
                raise _not_here(name, inventory)
            return chosen(stored, inventory, "")
    found = parse(name, revision=revision)
    if isinstance(found, Path):
        raise UsageError(
            f"`{shown(name)}` is a path, and `models rm` removes what is in the caches",
            hint="remove the file itself, or name a model of `llmcli models list`",
        )
    part = _of_hub(name, found, inventory) if isinstance(found, HubId) else None
    if part is None:
        raise _not_here(name, inventory)
    return part


def chosen(stored: Stored, inventory: Inventory, reason: str) -> Part | Piece:
    """What has to go for a model of the inventory that is in one of the caches."""
    name = stored.model.name
    if stored.repository is None:
        assert stored.model.path is not None
        folder = inventory.own / Path(stored.model.path).parent.name
        return of_own(folder, name, reason, [folder], inventory.own)
    if stored.revision is None:
        path = stored.repository.path
        return of_repository(stored.repository, name, reason, [path], inventory.root)
    return Part(name=name, why=reason, repository=stored.repository, revision=stored.revision,
                files=stored.files)  # fmt: skip


def _of_hub(name: str, hub: HubId, inventory: Inventory) -> Part | None:
    """What a line of the list has another name for: another branch, a commit, all GGUF files."""
    for repository in inventory.repositories:
        if repository.name != hub.repository:
            continue
        commits = [revision.commit for revision in repository.revisions]
        for revision in repository.revisions:
            wanted = hub.revision or "main"
            if wanted not in revision.refs and lengthened(wanted, commits) != revision.commit:
                continue
            files = revision.files
            if hub.file is not None:
                parts = part_names(hub.file) or (hub.file,)
                files = tuple(file for file in files if file.name in parts)
            if files:
                return Part(name=name, why="", repository=repository, revision=revision,
                            files=files)  # fmt: skip
    return None


def _not_here(name: str, inventory: Inventory) -> ModelNotFound:
    here = [s.model.name for s in inventory.stored() if s.model.place != "nowhere"]
    near = difflib.get_close_matches(name, here, n=1)
    hint = "`llmcli models list` shows what is"
    if near and name not in CATALOG:
        hint = f"did you mean `{shown(near[0], 200)}`?"
    return ModelNotFound(f"`{shown(name)}` is not on this machine", hint=hint)
