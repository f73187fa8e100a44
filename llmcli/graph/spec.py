"""Describes a model's tensor: name, axes, shape, formula and cost. No torch.

Letters of the axes: `B` batch, `T` query positions, `S` key positions, `P` learned positions,
`D` width, `H` heads, `Hk` key/value heads, `dh` size of a head's query and key, `dv` of its value,
`F` hidden size of the feed-forward or of an expert, `Fs` of the shared expert, `E` experts, `K`
chosen experts per token, `V` vocabulary; for per-layer embeddings `Lp` layers, `Dp` their size,
`Vp` rows of their table; for latent attention `dc` size of a latent, `dq` of a query latent, `dn`
and `dr` sizes of the content and RoPE parts of a query and key. Merged axes are written with a dot:
`H·dh`.

Formulas use the letters of the documents and of `explain` (a test compares them): in a block X (its
input), T¹ = Norm(X), T² = MultiHeadAttention(T¹), T³ = T² + X, T⁴ = Norm(T³), T⁵ = FFN(T⁴) and H =
T⁵ + T³; in the attention Q, K, V, the mask M, the scores S, the weights A and the heads' results C
= A V; in the feed-forward the neurons U before and the layer L after the activation, with the gate
G. H′ is the last block's H, normalized.

Orientation as in the papers: activations are rows, so `Q = T¹ W_q` and `W_q` is `[D, H·dh]`. A
linear layer of torch stores the transpose (`stored_shape`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from llmcli.config.formats import PACKED, packed_bytes, stored_bytes
from llmcli.records.document import APART, derived

Kind = Literal["parameter", "activation", "state"]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Logits = Literal["all", "last", "none"]  # tokens with final norm and head

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "bool": 1,
}


def wide_dtype(dtype: str | None) -> str | None:
    """The dtype of values kept in at least float32 in a model of `dtype`."""
    return dtype if dtype in (None, "float64") else "float32"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor: a parameter, an activation of one forward call, or a state kept between calls.

    `shape` has the formula's orientation and one number per entry of `axes`; `stored_shape`
    (parameters only) is torch's shape. `flops` counts matrix products, 2 per multiply-add, and
    nothing else: norms, activations, biases and softmax are not counted. Of scores it counts the
    cells that the causal mask and the window leave, `flops_full` the full `T × S` rectangle.

    `shares` names the memory that the tensor is a view of: another tensor's, or an unnamed one's
    (`blocks.0.attn.qkv`, the result of one fused product); tensors with the same name share one
    storage. None if it has its own memory, and for `logits` if the dtype is unknown. `written` is
    False for tensors that the fused kernel does not store: `scores`, `pattern` and `result` are
    derived. `file_layout`: blocks in the file's layout.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str | None = None
    flops: int = 0
    flops_full: int = 0
    phase: Phase | None = None
    layer: int | None = None
    formula: str
    shares: str | None = None
    written: bool = True
    stored_shape: tuple[int, ...] | None = field(default=None, metadata=APART)
    file_layout: bool = field(default=False, metadata=APART)

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @derived
    def bytes(self) -> int:
        """Size in bytes; 0 if the dtype is unknown (a parameter before it is loaded)."""
        if self.dtype in PACKED:
            *rows, columns = self.stored_shape or self.shape
            size = stored_bytes if self.file_layout else packed_bytes
            return size(self.dtype, prod(rows), columns)
        return 0 if self.dtype is None else self.count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One forward call, for which activations are described.

    `batch` sequences with `tokens` new positions each after `past` cached ones. `dtype`: the
    model's arithmetic; statistics of norms and logits are at least float32. `cache`: the dtype of
    keys and values if different.
    """

    batch: int
    tokens: int
    past: int
    phase: Phase
    dtype: str | None = None
    cache: str | None = None

    @property
    def keys(self) -> int:
        """`S`: number of visible key positions, cached ones plus new tokens."""
        return self.past + self.tokens

    @property
    def cache_dtype(self) -> str | None:
        """The dtype of keys and values."""
        return self.cache or self.dtype

    @property
    def wide_dtype(self) -> str | None:
        """The dtype of values kept in at least float32."""
        return wide_dtype(self.dtype)
