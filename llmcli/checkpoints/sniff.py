"""Detects weight formats by name and first bytes, and refuses pickles with a hint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from llmcli.checkpoints.files import open_regular, read_object, shown
from llmcli.errors import CheckpointError, UnsupportedModel

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # ggml, ggmf, ggjt, ggla: what GGUF replaced


def kind_of(path: Path) -> Literal["gguf", "safetensors", "pickle"]:
    """The format of a weight file, by its suffix, else by its first bytes.

    Raises CheckpointError for other formats, ModelNotFound for a missing file.
    """
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return "gguf"
    if suffix == ".safetensors":
        return "safetensors"
    descriptor, _ = open_regular(path)  # a missing file is not "a pickle"
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        start = file.read(16)
    if start[:4] == b"GGUF":
        return "gguf"
    if start[:4] in _GGML:
        raise CheckpointError(
            f"`{shown(path)}` is a GGML file, from before GGUF (August 2023)",
            hint="fetch the model as .gguf or .safetensors",
        )
    if start[8:9] == b"{":  # after the length of the header
        return "safetensors"
    if suffix in PICKLE_SUFFIXES or start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        return "pickle"
    raise CheckpointError(
        f"`{shown(path)}` is neither a gguf nor a safetensors file",
        hint="give a .gguf file, a .safetensors file, or a directory with safetensors in it",
    )


def pickled(path: Path) -> CheckpointError:
    """The error for a checkpoint in PyTorch's pickle format, which can run code when read."""
    return CheckpointError(
        f"`{shown(path)}` is a pickle, which is never read because reading it can run code",
        hint='convert it where you trust it: `python -c "import sys, torch; from safetensors.torch'
        " import save_file; w = torch.load(sys.argv[1], weights_only=True);"
        " save_file({k: v.clone() for k, v in w.items()}, 'model.safetensors')\" FILE`",
    )


# Auxiliary files by GGUF's `general.type` or `general.architecture`: (description, hint).
_ASIDE = {
    "adapter": ("a LoRA adapter", "give the base model instead, or the two merged into one file"),
    "mmproj": ("the vision or audio part of a multimodal model", "give the model's own .gguf file"),
    "imatrix": ("an importance matrix, made for quantizing", "give the model's own .gguf file"),
    "vocab": ("a vocabulary without weights", "give the model's own .gguf file"),
    "controlvector": ("a control vector", "give the model's own .gguf file"),
    "clip": ("the vision or audio part of a multimodal model", "give the model's own .gguf file"),
}


def aside(metadata: Mapping[str, Any]) -> str | None:
    """The kind of an auxiliary GGUF file; None for a model."""
    for key in ("general.type", "general.architecture"):
        found = metadata.get(key)
        if isinstance(found, str) and found in _ASIDE:
            return found
    return "imatrix" if "imatrix.chunk_count" in metadata else None


def no_model_gguf(name: str, metadata: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for an auxiliary GGUF file."""
    kind = aside(metadata)
    if kind is None:
        return
    what, hint = _ASIDE[kind]
    base = metadata.get("general.base_model.0.name") if kind == "adapter" else None
    of = f" for `{shown(base)}`" if isinstance(base, str) else ""
    raise UnsupportedModel(f"`{shown(name)}` is {what}{of}, not a model", hint=hint)


def no_model(name: str, folder: Path, tensors: Collection[str]) -> None:
    """Raise UnsupportedModel for known safetensors without config.json that are not usable.

    These are LoRA adapters, by configuration or tensor names, and models in their authors' own
    format (Meta's and Mistral's `params.json`, `consolidated.safetensors`).
    """
    adapter = os.path.exists(folder / "adapter_config.json")
    if adapter or any(".lora_A." in tensor or ".lora_B." in tensor for tensor in tensors):
        settings = read_object(folder / "adapter_config.json") or {}
        base = settings.get("base_model_name_or_path")
        of, give = "", "its base model"
        if isinstance(base, str) and base:
            of, give = f" for `{shown(base)}`", f"`-m {shown(base)}`"
        raise UnsupportedModel(
            f"`{shown(name)}` is a LoRA adapter{of}, not a model",
            hint=f"give {give}, or merge the two with PEFT's `merge_and_unload`",
        )
    if "tok_embeddings.weight" in tensors or os.path.exists(folder / "params.json"):
        raise UnsupportedModel(
            f"`{shown(name)}` has the names and the `params.json` of Meta's or Mistral's own code",
            hint="fetch the version for transformers, which has a config.json and "
            "model.safetensors, or a .gguf file",
        )
