"""A model's composition and its memory needs: types shared by several commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.records.document import derived
from llmcli.records.work import PartWork

# The format fields of documents for a model whose weights are not used.
NO_FORMATS: dict[str, None] = dict.fromkeys(
    ("weight_format", "activation_format", "cache_format", "product_format")
)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Numbers of learned parameters; a tied head is counted once, as embedding.

    `active`: used to compute one token. `embedding`: tables of tokens and positions; `head`: a
    separate output matrix. With `attention`, `mixers` (of other kinds), `mlp` and `norms` they add
    up to `total`.
    """

    total: int
    active: int
    embedding: int
    attention: int
    mixers: int
    mlp: int
    norms: int
    head: int


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """Layers that are equal in all fields; `layers` are their numbers.

    `kind`: of the mixer: `full attention`, `sliding window`, or another part's name; for a layer
    without mixer its parts. Fields of attention or a plain feed-forward are None without these.
    `window`: the most keys that a query sees, None: all earlier ones. `details`: from other parts.
    """

    kind: str
    layers: tuple[int, ...]
    norm: str
    window: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    rotary: bool | None = None
    qk_norm: bool | None = None
    hidden: int | None = None
    activation: str | None = None
    gated: bool | None = None
    details: tuple[str, ...] = ()

    @derived
    def count(self) -> int:
        """How many layers."""
        return len(self.layers)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Memory of one device in bytes, None if unknown.

    `bfloat16`: whether it has bfloat16 multiplication. `usable` is False if PyTorch is installed
    without CUDA.
    """

    device: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    bfloat16: bool
    usable: bool = True


@dataclass(frozen=True, kw_only=True)
class StateNeed:
    """Fixed-size states of recurrent mixers for one sequence.

    `bytes`: of all `layers`: states and convolutions' last inputs. `against_per_token`: bytes per
    token of softmax attention in as many layers: the average of the model's attention layers
    (`against` is `attention`), or without any of the mixers' own keys and values (`same_size`).
    `smaller_from`: the least number of tokens whose keys and values would need more.
    """

    layers: int
    bytes: int
    against: Literal["attention", "same_size"]
    against_per_token: float
    smaller_from: int


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes of a run at one context length.

    `formats`: of weights, activations, cache and products, by their names in documents. `states`:
    the fixed-size part of each sequence's `cache`, or None. `copies`: of the other sequences'
    caches when one of a batch ends. `activations`: estimated peak of tensors during prefill at this
    length. `runtime`: estimate of the libraries when computing, beyond imported PyTorch, and of the
    tokenizer's tables. The others are exact.
    """

    formats: dict[str, str]
    batch: int
    context: int
    weights: int
    cache: int
    cache_per_token: int
    copies: int
    activations: int
    runtime: int = 0
    states: StateNeed | None = None

    @property
    def total(self) -> int:
        """Peak bytes: no sequence ends during prefill."""
        return self.weights + self.cache + max(self.copies, self.activations) + self.runtime

    @property
    def together(self) -> int:
        """Peak bytes if all sequences end together, without copies."""
        return self.weights + self.cache + self.activations + self.runtime


@dataclass(frozen=True, kw_only=True)
class DeviceFit:
    """Whether a run fits into free memory, and the longest context that does.

    `token`: work to decode the last token of the context, for all sequences. `longest`: at most the
    model's (or the requested) context, 0 if not even one token fits; it and `fits` are None if free
    memory is unknown or the device not usable.
    """

    device: Device
    need: MemoryNeed
    token: PartWork
    fits: bool | None
    longest: int | None
