"""The headers of a model on the hub: what it is, without the gigabytes that it weighs."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.checkpoints.catalog import CATALOG, Progress
from llmcli.checkpoints.files import MAX_JSON_BYTES, shown
from llmcli.checkpoints.folder import INDEX, SINGLE
from llmcli.checkpoints.names import HubId, parse
from llmcli.errors import CheckpointError, ModelNotFound, NetworkError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# beside the weights: read whole, and kept in the hub's cache, where every tool finds them again
_SMALL = (
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_FIRST = 100_000  # bytes of a weight file to begin with: most headers are shorter
_SECONDS = 10.0


def on_the_hub(spec: str, revision: str | None) -> HubId | None:
    """The repository that `spec` names, None where it names something else or one of its files."""
    found = parse(spec, revision=revision)
    if isinstance(found, str) and found in CATALOG:
        entry = CATALOG[found]
        if entry.repository is not None:
            return HubId(repository=entry.repository, revision=entry.revision)
    return found if isinstance(found, HubId) and found.file is None else None


@contextlib.contextmanager
def fetched_headers(
    model: HubId, *, progress: Progress | None = None
) -> Iterator[tuple[Path, str]]:
    """A directory with the model's small files and the headers of its weights, and its commit.

    The weight files there have their size and their header; behind it they are holes, which take
    no room and read as zeros. The directory is gone afterwards. Raises ModelNotFound,
    NetworkError (no network, or a repository that needs a token) and CheckpointError.
    """
    with tempfile.TemporaryDirectory(prefix="llmcli-headers-") as folder, _explained(model):
        info = _repository(model)
        commit = info.sha or model.revision or "main"
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        weights = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
        if SINGLE in weights:
            weights = [SINGLE]
        if not weights:
            raise CheckpointError(
                f"`{shown(model.repository)}` has no safetensors files",
                hint="for a GGUF file, fetch it with `hf download` and give its path",
            )
        small = [name for name in _SMALL if name in sizes and (sizes[name] or 0) <= MAX_JSON_BYTES]
        names = small + weights
        parts = [_FIRST if name in weights else sizes[name] or 0 for name in names]
        for number, name in enumerate(names):
            if progress is not None:
                what = f"reading the headers of {model.repository}"
                progress(what, sum(parts[:number]), sum(parts))
            target = Path(folder) / name
            if name in weights:
                _write_header(model.repository, name, commit, sizes[name], target)
            else:
                _link_small(model.repository, name, commit, target)
        yield Path(folder), commit


def _repository(model: HubId) -> ModelInfo:
    from huggingface_hub import HfApi  # 0.16 s

    return HfApi().model_info(
        model.repository, revision=model.revision, files_metadata=True, timeout=_SECONDS
    )


def _link_small(repository: str, name: str, commit: str, target: Path) -> None:
    from huggingface_hub import hf_hub_download

    target.symlink_to(hf_hub_download(repository, name, revision=commit))


def _write_header(repository: str, name: str, commit: str, size: int | None, target: Path) -> None:
    """The first bytes of a weight file, as many as its header has; holes up to its size."""
    data = _begin_of(repository, name, commit, _FIRST)
    length = 8 + int(struct.unpack("<Q", data[:8])[0]) if len(data) >= 8 else 0
    if len(data) < length <= MAX_JSON_BYTES:
        data = _begin_of(repository, name, commit, length)
    target.write_bytes(data[: max(8, length)])
    if size is not None:
        os.truncate(target, size)  # what the header does not add up to is refused when it is read


def _begin_of(repository: str, name: str, commit: str, count: int) -> bytes:
    """At most `count` bytes, also from a server that does not know ranges and sends everything."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not marked
        build_hf_headers,
        hf_raise_for_status,
    )

    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}"}
    url = hf_hub_url(repository, name, revision=commit)
    data = b""
    with get_session().stream(
        "GET", url, headers=headers, timeout=_SECONDS, follow_redirects=True
    ) as answer:
        hf_raise_for_status(answer)
        for chunk in answer.iter_bytes():
            data += chunk
            if len(data) >= count:
                break
    return data[:count]


@contextlib.contextmanager
def _explained(model: HubId) -> Iterator[None]:
    """The hub's errors as ours."""
    from huggingface_hub import errors

    name = shown(model.repository)
    try:
        yield
    except errors.GatedRepoError:
        raise NetworkError(
            f"`{name}` is gated: the hub gives it to those who accepted its terms",
            hint="accept them on its page, then log in with `hf auth login`",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(
            f"`{name}` has no revision `{shown(model.revision)}` on the hub"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ModelNotFound(
            f"there is no model `{name}` on the hub",
            hint="check its name; for a private one log in with `hf auth login`",
        ) from None
    except (
        errors.HTTPError,  # type: ignore[attr-defined]  # of whatever client the library uses
        errors.LocalEntryNotFoundError,
    ) as error:
        raise NetworkError(
            f"the hub does not answer for `{name}`: {shown(error, 120)}",
            hint=f"check the network, or run `hf download {name}` where there is one",
        ) from None
