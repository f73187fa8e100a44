"""Lists a hub repository; the hub's answer is untrusted and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.checkpoints.hub.calls import ANSWER_S, reachable
from llmcli.checkpoints.names import HubId
from llmcli.errors import WITHOUT_NETWORK, CheckpointError, NetworkError

_MOST_FILES = 100_000  # of a repository; the largest public ones have thousands
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A repository at one commit: bytes of each file (None: unknown), and digests.

    `sha256`: of large files; `git`: git object ids of the others, if stated.
    """

    commit: str
    sizes: Mapping[str, int | None]
    sha256: Mapping[str, str]
    git: Mapping[str, str]


def listed(model: HubId) -> Listing:
    """List `model`'s repository at its revision; for use inside `explained`.

    Raises NetworkError within three seconds if the hub does not answer, and library errors.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    validate_repo_id(model.repository)
    if not reachable():
        raise NetworkError(
            f"`{shown(model.repository)}` is not in the hub cache, and the hub "
            f"({shown(constants.ENDPOINT)}) cannot be reached",
            hint=f"check the network and HF_ENDPOINT; {WITHOUT_NETWORK}",
        )
    try:
        stated = HfApi().model_info(
            model.repository, revision=model.revision, files_metadata=True, timeout=ANSWER_S
        )
        sha, files = stated.sha, stated.siblings
        if sha is None or files is None or not COMMIT.fullmatch(sha):
            raise ValueError("invalid commit")
        if len(files) > _MOST_FILES:
            raise CheckpointError(
                f"`{shown(model.repository)}` lists more than {_MOST_FILES:,} files",
                hint="look for another repository with the same model",
            )
        sizes = {_name(file.rfilename): _size(file.size) for file in files}
        large = {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
        small = {file.rfilename: file.blob_id for file in files if not file.lfs}
    except UnicodeEncodeError:  # of the token
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise NetworkError(
            f"invalid answer from the hub ({shown(constants.ENDPOINT)})",
            hint="check HF_ENDPOINT, and whether the network wants a login in a browser first",
        ) from None
    return Listing(
        commit=sha, sizes=sizes, sha256=_digests(large, SHA256), git=_digests(small, COMMIT)
    )


def _name(stated: Any) -> str:
    """A valid file name, used below the cache; raises CheckpointError for any other value."""
    if not isinstance(stated, str):
        raise ValueError("invalid name")
    try:
        odd = any(len(part) > 255 for part in stated.encode().split(b"/"))
    except UnicodeEncodeError:
        odd = True
    if odd or set(stated) & set("\\\0") or {"", ".", ".."} & set(stated.split("/")):
        raise CheckpointError(
            f"the hub lists an invalid file name `{shown(stated)}`",
            hint="look for another repository with the same model",
        )
    return stated


def _digests(digests: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[str, str]:
    return {
        name: digest
        for name, digest in digests.items()
        if isinstance(digest, str) and pattern.fullmatch(digest)
    }


def _size(stated: Any) -> int | None:
    return stated if type(stated) is int and stated >= 0 else None
