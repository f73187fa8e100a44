"""In which arithmetic a model runs where nothing is asked for. No torch."""

from __future__ import annotations

from collections.abc import Set

# Formats of quantized weights and of what lies beside them: they say nothing of the arithmetic.
_QUANTIZED = {"F8_E4M3", "F8_E5M2", "I8", "U8"}


def auto_dtype(device: str, stored: Set[str], *, bfloat16: bool) -> str:
    """What `--dtype auto` is on a `cpu`, `cuda` or `mps` for weights stored in those formats.

    `bfloat16`: whether the device multiplies it in hardware. A CPU takes it only then (16-bit
    arithmetic without such instructions is many times slower). A GPU takes what the checkpoint
    holds, of weights in 8 bits what is not: float16 for blocks of a GGUF file, and where all of it
    is in 8 bits, where the card has no bfloat16.
    """
    if device == "cpu":
        return "bfloat16" if bfloat16 else "float32"
    matrices = stored - {"F32"} - _QUANTIZED or stored - {"F32"} or stored
    if matrices == {"F32"} or "F64" in matrices:
        return "float32"
    return "bfloat16" if bfloat16 and matrices != {"F16"} else "float16"
