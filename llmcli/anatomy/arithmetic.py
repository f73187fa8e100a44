"""In which arithmetic a model runs where none is requested, and how far it rounds. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from functools import lru_cache

from llmcli.anatomy.graph import graph
from llmcli.anatomy.plan import plan
from llmcli.config import ModelConfig
from llmcli.graph.ops import Project
from llmcli.graph.spec import Call, TensorSpec

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

    An estimate (root mean square), too large rather than too small. What is rounded:

    - every activation that a step writes, to the dtype in which `anatomy` says that it is written;
    - rows of the stream that enter a product as they are, without a norm before;
    - every matrix that the checkpoint stores (`matrices`: their formats) in a format that 16 bits
      do not hold;
    - the sums in products, taken in at least float32: K terms of any sign are as K/2 roundings of
      the whole sum, if they are added up one after the other.

    Roundings know nothing of each other, so their squares add up. Each counts as if it moved the
    whole stream: a branch is taken to be as large as the stream that it is added to, and most are
    smaller. Measured (SmolLM2 and tiny, in float32 and 16 bits), the noise is 0.2 to 0.7 of the
    estimate in the root mean square of all positions, and up to 3 times the estimate at single
    ones.
    """
    specs = _written(config, dtype)
    names = {spec.name for spec in specs}
    # what is a view of another one is not rounded a second time
    squares = [rounding(spec.dtype or dtype) ** 2 for spec in specs if spec.shares not in names]
    nodes = graph(config).nodes  # rows of the stream that enter a product without a norm
    entering = {n.op.fused or n.name for n in nodes.values()
                if isinstance(n.op, Project) and nodes[n.op.source].wide}  # fmt: skip
    squares += [rounding(dtype) ** 2] * len(entering)
    if dtype in HELD:
        squares += [rounding(dtype) ** 2 for stored in matrices if stored != HELD[dtype]]
    wide = "float64" if dtype == "float64" else "float32"
    squares += [spec.flops / (2 * spec.count) / 2 * rounding(wide) ** 2 for spec in specs]
    return math.sqrt(sum(squares))


def logits_dtype(config: ModelConfig, dtype: str) -> str:
    """The dtype to which the head's product is rounded."""
    specs = _written(config, dtype)
    return next(spec.dtype or dtype for spec in specs if spec.name == "logits_raw")


@lru_cache(maxsize=1)
def _written(config: ModelConfig, dtype: str) -> tuple[TensorSpec, ...]:
    """The activations of a step of one token."""
    call = Call(batch=1, tokens=1, past=1, phase="decode", dtype=dtype)
    return plan(config, call, logits="last").written
