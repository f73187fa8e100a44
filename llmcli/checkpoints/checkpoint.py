"""A checkpoint of either file format: a configuration and an index of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmcli.checkpoints import mxfp4
from llmcli.checkpoints.files import WeightFile, shown
from llmcli.checkpoints.folder import Folder, read_folder
from llmcli.checkpoints.safetensors import read_safetensors
from llmcli.checkpoints.sniff import kind_of, no_model, no_model_gguf, pickled
from llmcli.checkpoints.split import read_parts
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.errors import CheckpointError

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: headers and configuration are read, the weights are not.

    `path`: the directory or (first) file. `name`: as given by the user. `config`: the parsed
    `config.json` (None without one), or a GGUF file's metadata. `files`: the weight files, possibly
    none. `metadata`: GGUF metadata, or `__metadata__` of the safetensors (the first shard's value
    for each key). `wrapper`: prefix added by a wrapper to every tensor name, removed in `tensors`.
    """

    path: Path
    kind: Literal["safetensors", "gguf"]
    name: str
    config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    generation_config: Mapping[str, Any] | None
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    wrapper: str = ""
    _open: Mapping[Path, WeightFile] = field(repr=False, compare=False)

    @property
    def folder(self) -> Path:
        """The directory for tokenizer files."""
        return self.path if os.path.isdir(self.path) else self.path.parent

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files, headers included."""
        return sum(file.size for file in self._open.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def formats(self) -> list[str]:
        """The formats in which tensors are stored, sorted."""
        return sorted({info.format for info in self.tensors.values()})

    @property
    def model_type(self) -> str:
        """`model_type` of config.json, `general.architecture` of GGUF; else CheckpointError."""
        if self.kind == "gguf":
            no_model_gguf(self.name, self.metadata)
        if self.config is None:
            no_model(self.name, self.folder, self.tensors)
            raise CheckpointError(
                f"`{shown(self.name)}` has no `config.json` beside its weights",
                hint="put the model's config.json into the same directory",
            )
        key = "general.architecture" if self.kind == "gguf" else "model_type"
        found = self.config.get(key)
        if not isinstance(found, str) or not found:
            where = "metadata" if self.kind == "gguf" else "config.json"
            raise CheckpointError(f"the {where} of `{shown(self.name)}` has no `{key}`")
        return found

    def raw(self, name: str) -> memoryview:
        """The stored bytes of tensor `name`: a zero-copy view of a shared read-only mapping.

        Raises KeyError for an unknown name, ValueError for a tensor stored in two pieces,
        CheckpointError if the file has changed.
        """
        tensor = self.tensors[name]
        if tensor.scales is not None:
            raise ValueError(f"{name} is stored in two pieces")
        return self._open[tensor.file].view(tensor.offset, tensor.nbytes)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """A copy of bytes [start, stop) of tensor `name`, read without mapping the file.

        For a tensor stored in two pieces, the range must cover whole blocks. Raises KeyError for an
        unknown name, ValueError for an invalid range, CheckpointError if the file has changed or
        cannot be read.
        """
        tensor = self.tensors[name]
        if not 0 <= start <= stop <= tensor.nbytes:
            raise ValueError(f"bytes {start}…{stop} of {name}, which has {tensor.nbytes}")
        if tensor.scales is not None:
            return self._in_blocks(tensor, tensor.scales, start, stop)
        return self._open[tensor.file].read(tensor.offset + start, stop - start)

    def _in_blocks(self, codes: TensorInfo, scales: TensorInfo, start: int, stop: int) -> bytearray:
        if start % mxfp4.BLOCK or stop % mxfp4.BLOCK:
            raise ValueError(f"bytes {start}…{stop} of {codes.name} are no whole blocks")
        first, last = start // mxfp4.BLOCK, stop // mxfp4.BLOCK
        each = mxfp4.BLOCK - 1
        return mxfp4.in_blocks(
            self._open[codes.file].read(codes.offset + each * first, each * (last - first)),
            self._open[scales.file].read(scales.offset + first, last - first),
        )

    def descriptor(self, name: str) -> int:
        """File descriptor of the file with tensor `name`, valid until `release`.

        Raises KeyError for an unknown name, CheckpointError if the file has changed.
        """
        return self._open[self.tensors[name].file].descriptor

    def release(self) -> None:
        """Drop the mapped pages and close the files; they are reopened when needed."""
        for file in self._open.values():
            file.release()


def open_checkpoint(path: Path, *, name: str | None = None, weights: bool = True) -> Checkpoint:
    """Open a directory, a `.safetensors` or a `.gguf` file; `name` is for messages.

    Any part of a split model selects the whole model. Without `weights`, only the configuration of
    a directory is read, which is enough for its tokenizer.

    Reads headers and JSON only. Raises ModelNotFound if `path` does not exist and CheckpointError
    for unusable files: a pickle, a broken header, a missing shard.
    """
    name = str(path) if name is None else name
    if os.path.isdir(path):  # unlike Path.is_dir, False without permission
        folder = read_folder(path, weights=weights)
        if folder.gguf is None:
            return _from_folder(path, name, folder)
        path = folder.gguf
    kind = kind_of(path)
    if kind == "pickle":
        raise pickled(path)
    if kind == "gguf":
        metadata, tensors, sizes = read_parts(path)
        return Checkpoint(
            path=next(iter(sizes)), kind="gguf", name=name, config=metadata, tensors=tensors,
            generation_config=None, files=tuple(sizes), metadata=metadata,
            _open={file: WeightFile(file, size) for file, size in sizes.items()},
        )  # fmt: skip
    return _from_folder(path, name, read_folder(path.parent, only=path))


def _from_folder(path: Path, name: str, folder: Folder) -> Checkpoint:
    """Merge the safetensors files of a directory into one index.

    For a tensor in several files, the directory's index decides. It may list missing tensors, as in
    transformers: these are reported when the model is loaded.
    """
    tensors: dict[str, TensorInfo] = {}
    files: dict[Path, WeightFile] = {}
    metadata: dict[str, str] = {}
    for shard in folder.shards:
        written, found, size = read_safetensors(shard)
        metadata = written | metadata
        files[shard] = WeightFile(shard, size)
        for tensor, info in found.items():
            if tensor not in tensors or folder.index.get(tensor) == shard:
                tensors[tensor] = info
            elif folder.index.get(tensor) != tensors[tensor].file:
                raise CheckpointError(
                    f"the tensor `{shown(tensor)}` is in `{shown(tensors[tensor].file.name)}` and "
                    f"again in `{shown(shard.name)}`"
                )
    wrapper, tensors = _unwrapped(tensors)
    return Checkpoint(
        path=path, kind="safetensors", name=name, config=folder.config,
        tensors=mxfp4.paired(tensors, folder.config),
        generation_config=folder.generation_config, files=tuple(files), metadata=metadata,
        wrapper=wrapper, _open=files,
    )  # fmt: skip


# Prefixes of saved wrapped models: DataParallel, torch.compile, FSDP, PEFT.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")


def _unwrapped(tensors: dict[str, TensorInfo]) -> tuple[str, dict[str, TensorInfo]]:
    """The prefix that a wrapper added to all names, and the tensors by their names without it.

    `model.` counts as such a prefix if `model.model.` occurs, as in transformers.
    """
    wrapper = ""
    while tensors:
        names = [name.removeprefix(wrapper) for name in tensors]
        extra = "model." if any(name.startswith("model.model.") for name in names) else ""
        for prefix in (*_WRAPPERS, extra):
            if prefix and all(name.startswith(prefix) and name != prefix for name in names):
                wrapper += prefix
                break
        else:
            break
    bare = {name.removeprefix(wrapper): info for name, info in tensors.items()}
    return wrapper, {name: replace(info, name=name) for name, info in bare.items()}
