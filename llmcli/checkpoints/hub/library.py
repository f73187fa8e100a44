"""Checks the environment of huggingface_hub before its import, when it reads it."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from llmcli.checkpoints.files import shown
from llmcli.checkpoints.names import HubId
from llmcli.errors import UsageError

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


def has_odd_reference(model: HubId) -> bool:
    """Whether the cache entry for a branch's commit is not a regular file.

    The library would open it, and hang at a pipe.
    """
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE).expanduser() / (
        "models--" + model.repository.replace("/", "--")
    )
    path = repository / "refs" / (model.revision or "main")
    return os.path.exists(path) and not os.path.isfile(path)
