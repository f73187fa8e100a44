"""Models in several files: `x-00002-of-00003.gguf` and its siblings, read as one.

Source: llama.cpp, whose `gguf-split` writes the parts and whose loader finds the others by name
(`llama_split_path`). The first part has all metadata, every part `split.no` (from 0),
`split.count`, and in `split.tensors.count` the tensors of all parts together.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmcli.checkpoints.files import listed, shown
from llmcli.checkpoints.gguf import read_gguf
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.errors import CheckpointError

# The largest known models have about fifty parts. Limits the lookups that an untrusted name (five
# digits) can cause.
MAX_PARTS = 1024

_PART = re.compile(
    r"(.+-)([0-9]{5})(-of-)([0-9]{5})(\.gguf|\.safetensors)", re.DOTALL | re.IGNORECASE
)


def part_names(name: str) -> tuple[str, ...] | None:
    """Names of all parts of the split model that `name` belongs to, in order; else None.

    `name` may include directories. Also None for invalid numbers: part 0, part 4 of 3, no parts,
    more than `MAX_PARTS`.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return None
    stem, part, of, count, suffix = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if not 1 <= part <= count <= MAX_PARTS:
        return None
    return tuple(f"{stem}{number:05d}{of}{count:05d}{suffix}" for number in range(1, count + 1))


def models_of(names: Collection[str], suffix: str) -> list[tuple[str, ...]]:
    """The models in `names` with this suffix, sorted: one file each, or all parts of a split one.

    Hidden files do not count.
    """
    visible = sorted(name for name in names if not posixpath.basename(name).startswith("."))
    found = (name for name in visible if name.lower().endswith(suffix))
    return list(dict.fromkeys(part_names(name) or (name,) for name in found))


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[Path, int]]:
    """Read a GGUF file or a split model: (metadata, tensors by name, files and sizes).

    The files are in order; metadata is that of the first. Other parts must be in the same
    directory. Raises CheckpointError for a part that is missing, differs from its name, or belongs
    to another model; and errors of `read_gguf`.
    """
    names = part_names(path.name)
    if names is None or len(names) == 1:
        metadata, tensors, size = read_gguf(path)
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"`{shown(path)}` is one of {shown(metadata['split.count'], 20)} parts, "
                "and its name does not say which",
                hint="name the parts `NAME-00001-of-00002.gguf` and so on, in one directory",
            )
        return metadata, tensors, {path: size}
    paths = [path.with_name(name) for name in names]
    here = [part for part in paths if os.path.lexists(part)]
    missing = [part.name for part in paths if part not in here]
    if here and missing:
        raise CheckpointError(
            f"`{shown(here[0])}` is one of {len(paths)} parts, and beside it there is no "
            f"{listed(missing)}",
            hint="fetch the missing parts into the same directory",
        )
    parts = [read_gguf(part) for part in paths]
    tensors = {}
    for number, (metadata, found, _) in enumerate(parts):
        _check_part(paths, number, metadata, parts[0][0])
        twice = next((name for name in found if name in tensors), None)
        if twice is not None:
            raise _foreign(
                f"the tensor `{shown(twice)}` is in `{shown(tensors[twice].file.name)}` and again "
                f"in `{shown(paths[number].name)}`"
            )
        tensors |= found
    declared = parts[0][0].get("split.tensors.count")
    if declared != len(tensors):
        raise _foreign(
            f"the {len(paths)} parts have {len(tensors)} tensors, where `{shown(paths[0])}` "
            f"declares {shown(declared, 20)}"
        )
    sizes = {part: size for part, (_, _, size) in zip(paths, parts, strict=True)}
    return parts[0][0], tensors, sizes


def _check_part(
    paths: list[Path], number: int, found: dict[str, Any], first: dict[str, Any]
) -> None:
    """Raise CheckpointError if the metadata of part `number` (from 0) contradict its name."""
    path, count = shown(paths[number]), found.get("split.count")
    if count is None:
        raise CheckpointError(
            f"`{path}` is named as one of {len(paths)} parts and is a file of its own",
            hint="give it a name without `-00001-of-…`, or fetch the parts again",
        )
    if count != len(paths) or found.get("split.no") != number:
        part = found.get("split.no")
        said = part + 1 if type(part) is int else part
        raise _foreign(
            f"`{path}` says that it is part {shown(said, 20)} of {shown(count, 20)}, and its name "
            f"that it is part {number + 1} of {len(paths)}"
        )
    for key, value in found.items():
        if key.startswith(("general.", "split.tensors.")) and value != first.get(key, value):
            raise _foreign(
                f"`{path}` has `{shown(key)}` {shown(value)}, "
                f"and `{shown(paths[0].name)}` has {shown(first[key])}"
            )


def _foreign(cause: str) -> CheckpointError:
    return CheckpointError(cause, hint="fetch the parts again: they do not belong to one model")
