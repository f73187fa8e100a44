"""In which arithmetic a model runs where none is requested, and how far it rounds. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from llmcli.anatomy.model import activations
from llmcli.config import ModelConfig

# The distance between neighbouring numbers, relative to the power of two below them.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# Which stored numbers 16 bits hold exactly. Wider dtypes hold all that is rounded less than they
# are; blocks of integers are defined by their dequantized float32.
HELD = {"bfloat16": "BF16", "float16": "F16"}

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


def rounding(dtype: str) -> float:
    """The root mean square of one rounding to `dtype`, relative to the number, at most.

    It moves a number by up to eps/2 of the power of two below it, one distance as likely as the
    other: by eps/√12 of that.
    """
    return EPS[dtype] / math.sqrt(12)


def stream_noise(config: ModelConfig, dtype: str, matrices: Iterable[str]) -> float:
    """How far one step's roundings move the end of the residual stream, relative to its length.

    An estimate (root mean square), too large rather than too small. What is rounded is every
    activation that a step writes, to the dtype in which `anatomy` says that it is written, and
    every matrix that the checkpoint stores (`matrices`: their formats) in a format that 16 bits do
    not hold. Roundings know nothing of each other, so their squares add up. Each counts as if it
    moved the whole stream: a branch is taken to be as large as the stream that it is added to,
    and most are smaller. On SmolLM2's 30 layers the estimate is about four times what is measured,
    which leaves room for the positions that amplify more than others.
    """
    specs = activations(
        config, batch=1, tokens=1, past=1, phase="decode", logits="last", dtype=dtype
    )
    names = {spec.name for spec in specs}
    # what is a view of another one, or looked up, is rounded no second time
    rounded = [spec.dtype or dtype for spec in specs if spec.shares not in names]
    if dtype in HELD:
        rounded += [dtype for stored in matrices if stored != HELD[dtype]]
    return math.sqrt(sum(rounding(one) ** 2 for one in rounded))


def logits_dtype(config: ModelConfig, dtype: str) -> str:
    """The dtype to which the head's product is rounded."""
    specs = activations(
        config, batch=1, tokens=1, past=1, phase="decode", logits="last", dtype=dtype
    )
    return next(spec.dtype or dtype for spec in specs if spec.name == "logits_raw")
