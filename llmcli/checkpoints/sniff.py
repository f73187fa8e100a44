"""Tells weight formats apart by name and first bytes, and refuses pickles with a way out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from llmcli.checkpoints.files import open_regular, shown
from llmcli.errors import CheckpointError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def kind_of(path: Path) -> Literal["gguf", "safetensors", "pickle"]:
    """The format of a weight file; its name decides, and its first bytes where that says nothing.

    Raises CheckpointError for anything else, ModelNotFound where there is no file.
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
