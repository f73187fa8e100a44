"""Reads a model's directory: configuration and names of weight files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import listed, read_json, read_object, shown, why
from llmcli.checkpoints.gguf import read_gguf
from llmcli.checkpoints.sniff import PICKLE_SUFFIXES, aside, pickled
from llmcli.checkpoints.split import models_of, part_names
from llmcli.errors import CheckpointError, LlmcliError, ModelNotFound

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Contents of a directory: safetensors `shards`, one `gguf` file, or only a configuration.

    `shards` are in order, with the `index` (tensor -> shard) if there is one; `gguf` is the first
    part of a split model.
    """

    config: Mapping[str, Any] | None
    generation_config: Mapping[str, Any] | None
    shards: tuple[Path, ...] = ()
    index: Mapping[str, Path] = field(default_factory=dict)
    gguf: Path | None = None


def read_folder(path: Path, *, only: Path | None = None, weights: bool = True) -> Folder:
    """Read a directory; with `only`, the configuration beside this file.

    That file selects all shards of its model. Without `weights`, only the configuration is read.

    Weights, in this order: `model.safetensors`, the shards of the index, one other
    `.safetensors` or the shards of one, one `.gguf` or the parts of one. Raises ModelNotFound
    if there is no model, and CheckpointError for an ambiguous choice, a pickle, or broken JSON.
    """
    config = read_object(path / "config.json")
    generation = read_object(path / "generation_config.json")
    if only is not None:
        parts = part_names(only.name) or (only.name,)
        found = tuple(map(only.with_name, parts))
        if not all(os.path.exists(part) for part in found):
            found = (only,)
        return Folder(config=config, generation_config=generation, shards=found)
    if not weights:
        return Folder(config=config, generation_config=generation)
    names = _names(path)
    index: dict[str, Path] = {}
    shards: tuple[Path, ...] = ()
    if SINGLE in names:
        shards = (path / SINGLE,)
    elif INDEX in names:
        index = read_index(path)
        shards = tuple(dict.fromkeys(index.values()))
    else:
        shards = _one(path, names, ".safetensors")
    others = [group[0] for group in models_of(names, ".gguf")]
    if shards and config is None and others:
        raise CheckpointError(
            f"the directory `{shown(path)}` has safetensors without a config.json, "
            f"and {listed(others)}",
            hint=f"name a .gguf file, as in `{shown(path / others[0], 200)}`",
        )
    gguf = () if shards else _one(path, names, ".gguf")
    if not shards and not gguf:
        pickles = sorted(name for name in names if name.lower().endswith(PICKLE_SUFFIXES))
        if pickles:
            raise pickled(path / pickles[0])
        if config is None:
            raise ModelNotFound(
                f"there is no model in the directory `{shown(path)}`",
                hint="it should hold a config.json and .safetensors files, or one .gguf file",
            )
    return Folder(
        config=config, generation_config=generation, shards=shards, index=index,
        gguf=gguf[0] if gguf else None,
    )  # fmt: skip


def read_index(path: Path) -> dict[str, Path]:
    """`weight_map` of a sharded checkpoint in directory `path`: tensor name -> shard.

    A shard must be a file in or below this directory, since the index is untrusted.
    """
    found = weight_map(path / INDEX)
    shards = {name: path / name for name in found.values()}
    for name in sorted(shards):
        if not os.path.exists(shards[name]):
            raise CheckpointError(
                f"`{shown(path)}` lacks the file `{shown(name)}` that its index names",
                hint="fetch that file into the same directory",
            )
    return {tensor: shards[name] for tensor, name in found.items()}


def weight_map(index: Path) -> dict[str, str]:
    """The index of a sharded checkpoint: tensor name -> file name, in or below its directory."""
    document = read_json(index)
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"`{shown(index)}` has no `weight_map`")
    for name in found.values():
        if not isinstance(name, str) or not _is_shard(name):
            raise CheckpointError(
                f"`{shown(index)}` names `{shown(name)}`, not a .safetensors file beside it"
            )
    return found


def _is_shard(name: str) -> bool:
    inside = all(part not in ("", ".", "..") for part in name.split("/"))
    return inside and name.endswith(".safetensors") and not set(name) & set("\\\0")


def _names(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"`{shown(path)}` cannot be read: {why(error)}") from None


def _one(path: Path, names: set[str], suffix: str) -> tuple[Path, ...]:
    """The only file with this suffix, or none; CheckpointError if there are several.

    For a split GGUF model the first part, even if missing (the reader reports it). For shards
    without an index all shards. Auxiliary files, such as a projector, do not count beside others.
    """
    found = models_of(names, suffix)
    if len(found) > 1:
        found = [group for group in found if not _aside(path / group[0])] or found
    if len(found) > 1:
        first = [group[0] for group in found]
        raise CheckpointError(
            f"the directory `{shown(path)}` has several {suffix} files: {listed(first)}",
            hint=f"name one, as in `{shown(path / first[0], 200)}`",
        )
    if not found or suffix == ".gguf":
        return tuple(path / group[0] for group in found)
    missing = [name for name in found[0] if name not in names]
    if missing:
        raise CheckpointError(
            f"`{shown(path)}` lacks {listed(missing)}, of the {len(found[0])} shards of a model",
            hint="fetch the missing shards into the same directory",
        )
    return tuple(path / name for name in found[0])


def _aside(file: Path) -> bool:
    """Whether a file is auxiliary, not a model: by its name or its GGUF metadata."""
    if file.suffix.lower() == ".safetensors":
        return file.name.startswith(("adapter_model", "consolidated"))
    try:
        return aside(read_gguf(file)[0]) is not None
    except LlmcliError:  # reported when it is read
        return False
