"""Lists a hub repository; the hub's answer is untrusted and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from llmcli.checkpoints.files import MAX_JSON_BYTES, shown
from llmcli.checkpoints.hub.calls import ANSWER_S, deadline, reachable
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
    from huggingface_hub import constants
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    validate_repo_id(model.repository)
    if not reachable():
        raise NetworkError(
            f"`{shown(model.repository)}` is not in the hub cache, and the hub "
            f"({shown(constants.ENDPOINT)}) cannot be reached",
            hint=f"check the network and HF_ENDPOINT; {WITHOUT_NETWORK}",
        )
    url = f"{constants.ENDPOINT}/api/models/{model.repository}"
    if model.revision is not None:
        url += f"/revision/{quote(model.revision, safe='')}"
    body = _body(url + "?blobs=true")
    try:
        stated = json.loads(body)
        sha, siblings = stated["sha"], stated["siblings"]
        if not COMMIT.fullmatch(sha):
            raise ValueError("invalid commit")
        if len(siblings) > _MOST_FILES:
            raise CheckpointError(
                f"`{shown(model.repository)}` lists more than {_MOST_FILES:,} files",
                hint="look for another repository with the same model",
            )
        sizes = {_name(file["rfilename"]): _size(file.get("size")) for file in siblings}
        large = {
            file["rfilename"]: file["lfs"].get("sha256") for file in siblings if file.get("lfs")
        }
        small = {file["rfilename"]: file.get("blobId") for file in siblings if not file.get("lfs")}
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


def _body(url: str) -> bytes:
    """The body of the answer to a request, with a limited length."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    data, late = bytearray(), deadline(0)
    with get_session().stream("GET", url, headers=build_hf_headers(), timeout=ANSWER_S) as answer:
        hf_raise_for_status(answer)
        for chunk in answer.iter_bytes():
            late()
            data += chunk
            if len(data) > MAX_JSON_BYTES:
                raise NetworkError(f"the hub's answer is larger than {MAX_JSON_BYTES} bytes")
    return bytes(data)
