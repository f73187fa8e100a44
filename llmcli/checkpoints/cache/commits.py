"""Commits by their first digits, where no other in the cache begins with them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace

from llmcli.checkpoints.cache.layout import PREFIX, hub_cache
from llmcli.checkpoints.names import HubId

SHORT = 12  # digits that a list shows, which tell a commit from all others
_SOME = re.compile(r"[0-9a-f]{7,39}")


def shortened(commit: str, commits: Collection[str]) -> str:
    """As few digits of `commit` as no other of `commits` begins with, `SHORT` at least."""
    digits = SHORT
    while digits < len(commit) and sum(one.startswith(commit[:digits]) for one in commits) > 1:
        digits += 1
    return commit[:digits]


def lengthened(revision: str, commits: Collection[str]) -> str:
    """The one of `commits` that begins with `revision`, if that has seven digits; else itself."""
    if not _SOME.fullmatch(revision):
        return revision
    found = [commit for commit in commits if commit.startswith(revision)]
    return found[0] if len(found) == 1 else revision


def spelled_out(model: HubId) -> HubId:
    """`model` with its whole commit where the first digits are given and the cache has that one.

    A branch or tag of that name goes first. No network.
    """
    if model.revision is None or not _SOME.fullmatch(model.revision):
        return model
    folder = hub_cache() / (PREFIX + model.repository.replace("/", "--"))
    if (folder / "refs" / model.revision).exists():
        return model
    try:
        commits = os.listdir(folder / "snapshots")
    except OSError:
        return model
    return replace(model, revision=lengthened(model.revision, commits))
