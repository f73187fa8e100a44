"""The models on a machine: their places and sizes, and what was fetched or removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.records.document import derived
from llmcli.records.numbers import counted

Place = Literal["package", "llmcli cache", "hub cache", "nowhere"]
_AGES = ((365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"),
         (60, "minute"))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model that `-m` takes by this `name`, and what of it is on this machine.

    `bytes` and `files` are what is here; of a catalog entry that is `nowhere`, `bytes` is what it
    would take. `revision` is a commit of the hub, `refs` the branches and tags that point to it.
    `last_used` is in seconds since 1970, None where it is unknown. `state` is `complete`, or what
    is wrong with it. `license` and `purpose`, what it is good for, are known of catalog entries.
    """

    name: str
    place: Place
    path: str | None
    bytes: int
    files: int
    revision: str | None
    refs: tuple[str, ...]
    last_used: float | None
    state: str
    license: str = ""
    purpose: str = ""

    @derived
    def complete(self) -> bool:
        """Whether nothing of it has to be fetched before it runs."""
        return self.state == "complete"


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """One of the two caches: the `bytes` of models in it, each shared file counted once.

    `others` are repositories that are no models: data sets and spaces, which are left alone.
    """

    place: Place
    path: str
    bytes: int
    others: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelsReport:
    """What `llmcli models list` shows; `left_over` are bytes that `models prune` would free."""

    models: tuple[StoredModel, ...]
    caches: tuple[CacheUse, ...]
    left_over: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PulledModel:
    """A model that is on this machine now; `fetched`: it was not before."""

    name: str
    path: str
    bytes: int
    fetched: bool


@dataclass(frozen=True, kw_only=True)
class PullFailure:
    """A model that could not be fetched: the exit code, kind and words of its error."""

    name: str
    code: int
    kind: str
    message: str
    hint: str | None


@dataclass(frozen=True, kw_only=True)
class PullReport:
    """The models that are here now, and those that could not be fetched.

    Where it was interrupted, names in neither list were not tried.
    """

    models: tuple[PulledModel, ...]
    failed: tuple[PullFailure, ...]
    finish_reason: Literal["complete", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is removed together: `bytes` are freed, `paths` are files and whole directories.

    `why` is empty for a model that was named.
    """

    name: str
    place: Place
    why: str
    bytes: int
    paths: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RemovalReport:
    """What was removed, or with `dry_run` would be; `kept` says what could not go, and why."""

    removed: tuple[Removal, ...]
    kept: tuple[str, ...]
    dry_run: bool

    @derived
    def bytes(self) -> int:
        """What is freed in all."""
        return sum(removal.bytes for removal in self.removed)


@dataclass(frozen=True, kw_only=True)
class PruneReport(RemovalReport):
    """What `models prune` removed; `older_than` as it was typed."""

    older_than: str | None


def ago(seconds: float) -> str:
    """`3 days ago`; `just now` within a minute and for times in the future.

    Days up to two months, and months up to two years: half of a month is not rounded away.
    """
    for unit, noun in _AGES:
        if seconds >= unit * (2 if unit > 86400 else 1):
            return f"{counted(int(seconds // unit), noun)} ago"
    return "just now"
