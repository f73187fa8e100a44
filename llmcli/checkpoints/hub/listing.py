"""What a repository on the hub holds, as the hub states it: checked, for it is untrusted."""

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

_MOST_FILES = 100_000  # of a repository; the largest public ones have some thousand
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A repository at one commit: bytes of each file (None: not stated), and digests.

    `sha256` of the large ones, `git`: the names that git gives the others, where they are stated.
    """

    commit: str
    sizes: Mapping[str, int | None]
    sha256: Mapping[str, str]
    git: Mapping[str, str]


def listed(model: HubId) -> Listing:
    """What `model`'s repository holds at its revision. Raises NetworkError within three seconds
    where the hub does not answer, and library errors for use inside `explained`.
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
            raise ValueError("its commit is none")
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
            f"what answers for the hub ({shown(constants.ENDPOINT)}) does not speak its language",
            hint="check HF_ENDPOINT, and whether the network wants a login in a browser first",
        ) from None
    return Listing(
        commit=sha, sizes=sizes, sha256=_digests(large, SHA256), git=_digests(small, COMMIT)
    )


def _name(stated: Any) -> str:
    """The name of a file, which becomes one below the cache; CheckpointError for any other text."""
    if not isinstance(stated, str):
        raise ValueError("a name that is none")
    try:
        odd = any(len(part) > 255 for part in stated.encode().split(b"/"))
    except UnicodeEncodeError:
        odd = True
    if odd or set(stated) & set("\\\0") or {"", ".", ".."} & set(stated.split("/")):
        raise CheckpointError(
            f"the hub names a file `{shown(stated)}`, which is no name",
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
    """The whole answer to a question of ours, as long as it has a reasonable length."""
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
