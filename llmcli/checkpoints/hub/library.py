"""The settings of huggingface_hub, checked before its import, and its cache: paths and commits."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from llmcli.checkpoints.files import shown
from llmcli.checkpoints.names import HubId
from llmcli.errors import UsageError

PREFIX = "models--"
_SOME_DIGITS = re.compile(r"[0-9a-f]{7,39}")
_SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
_MOST_SECONDS = 1_000_000  # sockets have an upper limit
_LEVELS = ("debug", "info", "warning", "error", "critical")


def check_settings() -> None:
    """Check environment variables before the first use of huggingface_hub.

    No network. Raises UsageError naming the variable for values on which the library or its client
    would fail. Empty variables count as unset.
    """
    for name in ("HF_ENDPOINT", *_SECONDS):
        if not os.environ.get(name):
            os.environ.pop(name, None)
    if os.environ.get("HF_HUB_VERBOSITY", "").lower() not in _LEVELS:
        os.environ.pop("HF_HUB_VERBOSITY", None)  # the library would print it
    # its warnings become our errors or are irrelevant
    warnings.filterwarnings("ignore", module=r"huggingface_hub\b")
    _check_endpoint(os.environ.get("HF_ENDPOINT"))
    for name in _SECONDS:
        value = os.environ.get(name, "0")
        seconds = -1
        with contextlib.suppress(ValueError):
            seconds = int(value)
        if not 0 <= seconds <= _MOST_SECONDS:
            raise UsageError(
                f"`{name}` is `{shown(value)}`, which is not a number of seconds",
                hint=f"unset {name}, or set it to a whole number such as 10",
            )
    _check_cache()


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:  # brackets, or an invalid port
        good = False
    if not good or not endpoint.isprintable() or " " in endpoint:
        raise UsageError(
            f"`HF_ENDPOINT` is `{shown(endpoint)}`, which is not a URL of a hub",
            hint="unset HF_ENDPOINT, or set a URL such as https://huggingface.co",
        )


def _check_cache() -> None:
    from huggingface_hub import constants  # 4 ms

    try:
        os.stat(Path(constants.HF_HUB_CACHE).expanduser())
    except RuntimeError:
        cause = "names the home of an unknown user"
    except OSError as error:
        if error.errno != errno.ELOOP:
            return  # it may not exist yet; writing will tell
        cause = "is a link to itself"
    except ValueError:
        cause = "is not a valid directory name"
    else:
        return
    raise UsageError(
        f"the hub cache `{shown(constants.HF_HUB_CACHE, 200)}` {cause}",
        hint="set HF_HUB_CACHE or HF_HOME to a directory",
    )


def hub_cache() -> Path:
    """The hub cache directory with links resolved; it may not exist."""
    check_settings()
    from huggingface_hub import constants  # 4 ms; knows all variables, older ones too

    return Path(os.path.realpath(Path(constants.HF_HUB_CACHE).expanduser()))


def folder_of(model: HubId) -> Path:
    """The directory of the repository in the hub cache; it may not exist."""
    return hub_cache() / (PREFIX + model.repository.replace("/", "--"))


def has_odd_reference(model: HubId) -> bool:
    """Whether the cache entry for a branch's commit is not a regular file.

    The library would open it, and hang at a pipe.
    """
    path = folder_of(model) / "refs" / (model.revision or "main")
    return os.path.exists(path) and not os.path.isfile(path)


def lengthened(revision: str, commits: Collection[str]) -> str:
    """The only commit with prefix `revision` (at least seven digits); otherwise `revision`."""
    if not _SOME_DIGITS.fullmatch(revision):
        return revision
    found = [commit for commit in commits if commit.startswith(revision)]
    return found[0] if len(found) == 1 else revision


def spelled_out(model: HubId) -> HubId:
    """`model` with a commit's prefix expanded to the full commit, if it is in the cache.

    A branch or tag of that name takes precedence. No network.
    """
    if model.revision is None or not _SOME_DIGITS.fullmatch(model.revision):
        return model
    folder = folder_of(model)
    if (folder / "refs" / model.revision).exists():
        return model
    try:
        commits = os.listdir(folder / "snapshots")
    except OSError:
        return model
    return replace(model, revision=lengthened(model.revision, commits))
