"""What a tensor of a model is: its name, axes, shape, formula and cost. No torch.

Letters of the axes: `B` batch, `T` query positions, `S` key positions, `P` learned positions,
`D` width, `H` heads, `Hk` key/value heads, `dh` size of a head's query and key, `dv` of its
value, `F` hidden size of the feed-forward, or of an expert, `Fs` of the shared one, `E` experts,
`K` those that a token chooses, `V` vocabulary; of embeddings for each layer `Lp` layers, `Dp` the
size of one, `Vp` rows of their table; where keys and values are made of latents, `dc` a latent's
size, `dq` that of queries, `dn` and `dr` numbers of a query and key that hold content and that are
rotated. A product of two axes that lie in one is written with a dot: `H·dh`.

Formulas have the letters of the documents, the same as `explain` derives with (a test compares
them): in a block X (its input), T¹ = Norm(X), T² = MultiHeadAttention(T¹), T³ = T² + X,
T⁴ = Norm(T³), T⁵ = FFN(T⁴) and H = T⁵ + T³; in the attention Q, K, V, the mask M, the scores S, the
weights A and the heads' results C = A V; in the feed-forward the neurons U before and the layer L
after the activation, with G what gates them. H′ is the last block's H, normalized.

They are oriented as in the papers: activations are rows, so `Q = T¹ W_q` and `W_q` is `[D, H·dh]`.
A linear layer of torch stores the transpose, which is `stored_shape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from llmcli.graph.blocks import PACKED, packed_bytes, stored_bytes

Kind = Literal["parameter", "activation", "state"]
Phase = Literal["prefill", "decode"]
Logits = Literal["all", "last", "none"]  # of which tokens final norm and head are computed

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
    """At least float32, beside numbers of that dtype."""
    return dtype if dtype in (None, "float64") else "float32"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor: a parameter, an activation of one forward call, or a state kept between calls.

    `shape` has the formula's orientation and one number per entry of `axes`; `stored_shape`
    (parameters only) is what torch keeps. `flops` counts matrix products, 2 per multiply-add,
    and nothing else: norms, activations, biases and softmax are not counted. Scores count as
    the full `T × S` rectangle; `masked_flops` is the part of `flops` spent on cells that the
    causal mask or the window hides, so `flops - masked_flops` is what must be computed.

    `shares` names the memory that the tensor is a view of: that of another tensor, or of one
    that has no name of its own here (`blocks.0.attn.qkv`, what one product gives for all three);
    tensors that share one name lie in one storage. None where the memory is its own, and for
    `logits` where the dtype is not known. `written` is False for what the fused kernel never
    writes: `scores`, `pattern` and `result` are derived from what it does. `as_stored`: blocks lie
    in memory as in a file.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    formula: str
    stored_shape: tuple[int, ...] | None = None
    dtype: str | None = None
    flops: int = 0
    masked_flops: int = 0
    layer: int | None = None
    phase: Phase | None = None
    shares: str | None = None
    written: bool = True
    as_stored: bool = False

    @property
    def count(self) -> int:
        """How many numbers the tensor holds."""
        return prod(self.shape)

    @property
    def bytes(self) -> int | None:
        """Size in bytes, None where the dtype is not known (a parameter before it is loaded)."""
        if self.dtype in PACKED:
            *rows, columns = self.stored_shape or self.shape
            size = stored_bytes if self.as_stored else packed_bytes
            return size(self.dtype, prod(rows), columns)
        return None if self.dtype is None else self.count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One forward call that activations are described for.

    `batch` sequences, `tokens` new positions each after `past` cached ones. `dtype` is what the
    model computes in; statistics of norms and logits are at least float32. `cache` is the dtype of
    keys and values, where it is another one.
    """

    batch: int
    tokens: int
    past: int
    phase: Phase
    dtype: str | None = None
    cache: str | None = None

    @property
    def keys(self) -> int:
        """`S`, the key positions that the new tokens may see: the cached ones and themselves."""
        return self.past + self.tokens

    @property
    def cache_dtype(self) -> str | None:
        """The dtype of keys and values."""
        return self.cache or self.dtype

    @property
    def wide_dtype(self) -> str | None:
        """The dtype of what is kept in at least float32."""
        return wide_dtype(self.dtype)
