"""The location of a checkpoint's tensor, and the element formats of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmcli.config.formats import FORMATS


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor in a weight file.

    `shape` is in PyTorch's order (GGUF's own order reversed: rows first). `format` is the
    safetensors dtype name ("F32", "BF16", "I8"…) or GGML's type name ("Q4_1", "Q6_K"…).
    `offset` and `nbytes` are in bytes, from the start of `file`. With `scales`, both tensors
    together form one in blocks (`checkpoints.mxfp4`): `offset` is that of the codes, `nbytes` of
    both.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    file: Path
    offset: int
    nbytes: int
    scales: TensorInfo | None = None


# Bits of one element. Names and sizes: safetensors 0.8, `Dtype`.
SAFETENSORS_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

# GGML's type number -> (name, elements of a block, bytes of a block).
GGML_TYPES = {one.type: (name, one.block, one.bytes) for name, one in FORMATS.items()}
