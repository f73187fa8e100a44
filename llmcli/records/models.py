"""The models on a machine: places, sizes, and reports of downloads and removals."""

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
    """A model with its `name` for `-m`, and its files on this machine.

    `bytes` and `files` are local; for a catalog entry that is `nowhere`, `bytes` is the download
    size. `revision`: a commit of the hub; `refs`: branches and tags that point to it. `last_used`:
    seconds since 1970, None if unknown. `state`: `complete`, or the problem. `license` and
    `purpose` are only known for catalog entries.
    """

    name: str
    place: Place
    path: str | None = None
    bytes: int = 0
    files: int = 0
    revision: str | None = None
    refs: tuple[str, ...] = ()
    last_used: float | None = None
    state: str
    license: str = ""
    purpose: str = ""

    @derived
    def complete(self) -> bool:
        """Whether it runs without a download."""
        return self.state == "complete"


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """One of the two caches: `bytes` of models, with shared files counted once.

    `others`: number of repositories other than models (data sets, spaces), which are not touched.
    """

    place: Place
    path: str
    bytes: int
    others: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelsReport:
    """The report of `llmcli models list`; `left_over`: bytes that `models prune` would free."""

    models: tuple[StoredModel, ...]
    caches: tuple[CacheUse, ...]
    left_over: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PulledModel:
    """The report of `models pull`; `fetched`: the model was not cached before."""

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
    """The models on this machine now, and those that could not be fetched.

    Where it was interrupted, names in neither list were not tried.
    """

    models: tuple[PulledModel, ...]
    failed: tuple[PullFailure, ...]
    finish_reason: Literal["complete", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Files removed together: `bytes` freed, `paths` of files and whole directories.

    `why` is empty for models named by the user.
    """

    name: str
    place: Place
    why: str
    bytes: int
    paths: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RemovalReport:
    """Removed pieces, or with `dry_run` those to remove; `kept`: failures with reasons."""

    removed: tuple[Removal, ...]
    kept: tuple[str, ...]
    dry_run: bool

    @derived
    def bytes(self) -> int:
        """Total bytes freed."""
        return sum(removal.bytes for removal in self.removed)


@dataclass(frozen=True, kw_only=True)
class PruneReport(RemovalReport):
    """What `models prune` removed; `older_than` as it was typed."""

    older_than: str | None


def ago(seconds: float) -> str:
    """`3 days ago`; `just now` within a minute and for times in the future.

    Days are used up to two months, months up to two years, to limit rounding.
    """
    for unit, noun in _AGES:
        if seconds >= unit * (2 if unit > 86400 else 1):
            return f"{counted(int(seconds // unit), noun)} ago"
    return "just now"
