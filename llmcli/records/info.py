"""A model's composition and its memory needs: types shared by several commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypedDict

from llmcli.records.document import APART, FLAT, derived
from llmcli.records.work import Cost


class Formats(TypedDict):
    """The formats of weights, activations, cache and products, by their names in documents."""

    weight_format: str
    activation_format: str
    cache_format: str
    product_format: str


# The format fields of documents for a model whose weights are not used.
NO_FORMATS: dict[str, None] = dict.fromkeys(Formats.__annotations__)


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

    `states`: the fixed-size part of each sequence's cache, or None. `cache_copies_bytes`: of the
    other sequences' caches when one of a batch ends. `prompt_bytes_estimate`: peak of tensors
    during prefill at this length. `runtime_bytes_estimate`: of the libraries when computing, beyond
    imported PyTorch, and of the tokenizer's tables. The others are exact.
    """

    formats: Formats = field(metadata=FLAT)
    batch: int
    context: int
    weights_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    states: StateNeed | None = None
    cache_copies_bytes: int
    prompt_bytes_estimate: int
    runtime_bytes_estimate: int = 0

    @derived
    def dtype(self) -> str:
        """The format of the activations."""
        return self.formats["activation_format"]

    @derived
    def needed_bytes(self) -> int:
        """Peak bytes: no sequence ends during prefill."""
        return self.together + max(0, self.cache_copies_bytes - self.prompt_bytes_estimate)

    @property
    def together(self) -> int:
        """Peak bytes if all sequences end together, without copies."""
        known = self.weights_bytes + self.cache_bytes + self.runtime_bytes_estimate
        return known + self.prompt_bytes_estimate


@dataclass(frozen=True, kw_only=True)
class DeviceFit:
    """Whether a run fits into free memory, and the longest context that does.

    `token`: work to decode the last token of the context, for all sequences. `longest_context`: at
    most the model's (or the requested) context, 0 if not even one token fits; it and `fits` are
    None if free memory is unknown or the device not usable.
    """

    device: Device = field(metadata=FLAT)
    need: MemoryNeed = field(metadata=FLAT)
    fits: bool | None
    longest_context: int | None
    token: Cost = field(metadata=APART)

    @derived
    def token_bytes(self) -> int:
        """Bytes read and written to decode the last token of the context."""
        return self.token.bytes

    @derived
    def token_weights_bytes(self) -> int:
        """Bytes of weights among them."""
        return self.token.weights

    @derived
    def token_cache_bytes(self) -> int:
        """Bytes of keys, values and states among them."""
        return self.token.cache

    @derived
    def token_activations_bytes(self) -> int:
        """All other bytes among them."""
        return self.token.activations
