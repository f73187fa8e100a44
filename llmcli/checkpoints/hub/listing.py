"""Lists a hub repository (its answer is untrusted) and chooses the files that a model needs."""

from __future__ import annotations

import difflib
import hashlib
import os
import posixpath
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from llmcli.checkpoints.files import listed, shown
from llmcli.checkpoints.folder import INDEX, SINGLE, weight_map
from llmcli.checkpoints.hub.client import ANSWER_S, reachable
from llmcli.checkpoints.names import HubId
from llmcli.checkpoints.sniff import PICKLE_SUFFIXES
from llmcli.checkpoints.split import models_of, part_names
from llmcli.errors import WITHOUT_NETWORK, CheckpointError, LlmcliError, ModelNotFound, NetworkError
from llmcli.records.numbers import did_you_mean

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# files read in addition to safetensors, if present
SMALL = (
    "config.json", "generation_config.json", INDEX, *TOKENIZERS, "merges.txt",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
WEIGHTS = (".gguf", ".safetensors")
COMPLETE, BROKEN = "complete", "incomplete"
NO_CONFIGURATION, NO_TOKENIZER = "no configuration", "no tokenizer"
SEVERAL, PICKLES, NO_WEIGHTS = "several models", "pickled weights only", "no weights"
_LIKED = ("Q4_K_M", "Q8_0")  # small and nearly as good; larger and as good
# git's id of the empty file, the name of its blob in the cache
_EMPTY = hashlib.sha1(b"blob 0\0", usedforsecurity=False).hexdigest()
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_MOST_FILES = 100_000  # of a repository; the largest public ones have thousands
SHA256, COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A repository at one commit: bytes of each file (None: unknown), and digests if stated.

    `digests`: sha256 of large files, git object ids of the others.
    """

    commit: str
    sizes: Mapping[str, int | None]
    digests: Mapping[str, str]


def listing_of(model: HubId) -> Listing:
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
        stated_as = {f.rfilename: f.lfs.sha256 if f.lfs else f.blob_id for f in files}
    except UnicodeEncodeError:  # of the token
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise NetworkError(
            f"invalid answer from the hub ({shown(constants.ENDPOINT)})",
            hint="check HF_ENDPOINT, and whether the network wants a login in a browser first",
        ) from None
    digests = {name: digest for name, digest in stated_as.items() if _is_digest(digest)}
    return Listing(commit=sha, sizes=sizes, digests=digests)


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


def _is_digest(stated: Any) -> TypeGuard[str]:
    return isinstance(stated, str) and bool(SHA256.fullmatch(stated) or COMMIT.fullmatch(stated))


def _size(stated: Any) -> int | None:
    return stated if type(stated) is int and stated >= 0 else None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The needed files: `small` ones, and the `weights` in order.

    Empty `weights`: their names are in the index, one of the small files. `lone`: the model is
    opened as the first weight file, not as the directory.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    lone: bool


def choose(model: HubId, sizes: Mapping[str, int | None]) -> Choice:
    """Choose the needed files of a repository with files of these `sizes` (None: unknown).

    The file in `model`, else safetensors, else the only (possibly split) GGUF file. Raises
    ModelNotFound for a missing file, CheckpointError for an ambiguous choice or for pickles only.
    """
    names = sizes.keys()
    if model.file is not None:
        return _named(model, model.file, names)
    small = tuple(name for name in SMALL if name in names)
    small += tuple(sorted(name for name in names if _MORE_TEMPLATES.fullmatch(name)))
    if SINGLE in names:
        return Choice(small=small, weights=(SINGLE,), lone=False)
    if INDEX in names:
        return Choice(small=small, weights=(), lone=False)
    tensors = _safetensors(names)
    if len(tensors) == 1 and set(names).issuperset(tensors[0]):
        return Choice(small=small, weights=tensors[0], lone=False)
    ggufs = gguf_groups(names)
    if tensors and not ggufs:
        raise _several(model, tensors, sizes)
    if len(ggufs) > 1:
        raise _several(model, ggufs, sizes)
    if ggufs:
        return Choice(small=(), weights=ggufs[0], lone=True)
    repository = shown(model.repository)
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        raise CheckpointError(
            f"`{repository}` has pickled weights only, which are never read because "
            "reading them can run code",
            hint="https://huggingface.co/spaces/safetensors/convert makes a pull request with "
            f"safetensors: then `{repository}@refs/pr/N`",
        )
    raise CheckpointError(
        f"`{repository}` has neither safetensors nor GGUF files",
        hint="look for another repository with the same model",
    )


def gguf_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """The GGUF models in `names`, sorted: one file each, or all parts of a split one.

    Vision projectors and importance matrices are not models.
    """
    known, whole = set(names), models_of(names, ".gguf")
    return [group for group in whole if known.issuperset(group) and not _aside(group[0])]


def _safetensors(names: Collection[str]) -> list[tuple[str, ...]]:
    """The safetensors models in `names`, also with missing shards.

    Adapters and `consolidated` weights do not count beside others.
    """
    found = [group for group in models_of(names, ".safetensors") if "/" not in group[0]]
    return [g for g in found if not g[0].startswith(("adapter_model", "consolidated"))] or found


def shards_of(index: Path, names: Collection[str]) -> tuple[str, ...]:
    """The weight files of an index; CheckpointError unless all are in `names`."""
    found = sorted(set(weight_map(index).values()))
    for name in found:
        if name not in names:
            raise CheckpointError(f"`{INDEX}` names `{shown(name)}`, which is not beside it")
    return tuple(found)


def emptied(path: Path) -> bool:
    """Whether a file is empty that has bytes on the hub, as after a power loss."""
    try:
        return path.stat().st_size == 0 and path.resolve().name != _EMPTY
    except OSError:
        return False


def absent(snapshot: Path) -> frozenset[str]:
    """Files recorded by the library as missing at this commit."""
    try:
        return frozenset(os.listdir(snapshot.parents[1] / ".no_exist" / snapshot.name))
    except OSError:
        return frozenset()


def state_of(names: Collection[str], index: Path, absent: Collection[str] = ()) -> str:
    """The state of a directory with files `names`, as shown by `models list`.

    `index`: path of its index; `absent`: files known to be missing in the repository. COMPLETE
    needs no download; NO_CONFIGURATION and NO_TOKENIZER have all weights. The weights are not
    inspected. Never raises.
    """
    tensors = _safetensors(names)
    if SINGLE in names:
        whole = True
    elif INDEX in names:
        try:
            whole = bool(shards_of(index, names))
        except LlmcliError:
            whole = False
    elif tensors:
        if len(tensors) > 1:
            return SEVERAL
        whole = set(names).issuperset(tensors[0])
    elif groups := gguf_groups(names):
        return COMPLETE if len(groups) == 1 else SEVERAL
    elif any(len(group) > 1 for group in models_of(names, ".gguf")):
        return BROKEN
    else:
        return PICKLES if any(name.endswith(PICKLE_SUFFIXES) for name in names) else NO_WEIGHTS
    known = {*names, *absent}
    if not whole:
        return BROKEN
    if "config.json" not in known:
        return NO_CONFIGURATION
    return NO_TOKENIZER if known.isdisjoint(TOKENIZERS) else COMPLETE


def _named(model: HubId, file: str, names: Collection[str]) -> Choice:
    parts = part_names(file) or (file,)
    for part in parts:
        if part not in names:
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.5)
            known = [group[0] for group in gguf_groups(names)]
            otherwise = f"it has {listed(known)}" if known else "check its page on the hub"
            close = [shown(f"hf:{model.repository}/{name}", 200) for name in near]
            raise ModelNotFound(
                f"`{shown(model.repository)}` has no file `{shown(part)}`",
                hint=did_you_mean(close, otherwise),
            )
    if models_of(parts, ".gguf"):
        return Choice(small=(), weights=parts, lone=True)
    if not models_of(parts, ".safetensors"):
        raise CheckpointError(
            f"`{shown(file)}` is neither a gguf nor a safetensors file",
            hint=f"`{shown(model.repository)}` without a file takes what is needed of it",
        )
    beside = posixpath.dirname(file)
    small = [posixpath.join(beside, name) for name in SMALL if name != INDEX]
    return Choice(small=tuple(name for name in small if name in names), weights=parts, lone=True)


def _several(
    model: HubId, found: list[tuple[str, ...]], sizes: Mapping[str, int | None]
) -> CheckpointError:
    """The error that lists the first file of each model and suggests a common choice."""
    liked = next((g for kind in _LIKED for g in found if kind in g[0].upper()), found[0])
    named = []
    for group in (liked, *(group for group in found if group is not liked))[:4]:
        size = sum(sizes[name] or 0 for name in group)
        named.append(f"`{shown(group[0])}`" + (f" ({size / 1e6:,.0f} MB)" if size >= 1e6 else ""))
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return CheckpointError(
        f"`{shown(model.repository)}` has several models: {', '.join(named)}{more}",
        hint=f"name one, as in `{shown(f'hf:{model.repository}/{liked[0]}', 200)}`",
    )


def _aside(name: str) -> bool:
    file = posixpath.basename(name).lower()
    return file.startswith("mmproj") or "imatrix" in file
