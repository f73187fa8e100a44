"""MXFP4 in safetensors files: two byte tensors, converted to one in GGML's blocks.

`X_blocks` `[…, G, 16]` has two 4-bit codes per byte, low for number 2i and high for 2i + 1;
`X_scales` `[…, G]` has the exponent of every 32 numbers, with bias 127. A GGML block is the
exponent, with bias 128 for codes that count halves (the same byte), and 16 bytes whose low codes
are the first 16 numbers (`ops.quant.codes`). The conversion is exact. Source:
`convert_moe_packed_tensors` of transformers, gpt-oss' `weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.checkpoints.files import shown
from llmcli.checkpoints.tensors import TensorInfo
from llmcli.errors import CheckpointError

BLOCK = 17  # bytes of 32 numbers
_CODES = 16  # … without their exponent
_BLOCKS, _SCALES = "_blocks", "_scales"


def paired(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any] | None
) -> dict[str, TensorInfo]:
    """The tensors of a file, with each pair merged into `X_blocks` of format MXFP4.

    Only if config.json has this quantization. Raises CheckpointError for a pair with inconsistent
    shapes.
    """
    section = (config or {}).get("quantization_config")
    found = dict(tensors)
    if not isinstance(section, Mapping) or section.get("quant_method") != "mxfp4":
        return found
    for name, blocks in tensors.items():
        scales = tensors.get(name.removesuffix(_BLOCKS) + _SCALES)
        if not name.endswith(_BLOCKS) or scales is None:
            continue
        if (blocks.format, scales.format) != ("U8", "U8") or blocks.shape != (
            *scales.shape,
            _CODES,
        ):
            stored = f"{blocks.format} {list(blocks.shape)}"
            raise CheckpointError(
                f"`{shown(name)}` is {stored} and its scales are {scales.format} "
                f"{list(scales.shape)}: 16 bytes of MXFP4 have one scale, all of U8"
            )
        del found[scales.name]
        *rows, groups, _ = blocks.shape
        found[name] = replace(
            blocks, format="MXFP4", shape=(*rows, 32 * groups), scales=scales,
            nbytes=blocks.nbytes + scales.nbytes,
        )  # fmt: skip
    return found


def in_blocks(codes: bytes | bytearray, scales: bytes | bytearray) -> bytearray:
    """Convert stored codes, 16 bytes per scale, to GGML's blocks."""
    import numpy as np

    stored = np.frombuffer(codes, np.uint8).reshape(-1, _CODES)
    first, second = stored[:, :8], stored[:, 8:]  # the first 16 numbers, and the others
    blocks = np.empty((len(stored), BLOCK), np.uint8)
    blocks[:, 0] = np.frombuffer(scales, np.uint8)
    blocks[:, 1::2] = first & 15 | second << 4
    blocks[:, 2::2] = first >> 4 | second & 0xF0
    return bytearray(blocks.tobytes())
