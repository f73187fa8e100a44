"""What a model is made of, and what it needs of a device: types that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcli.records.document import derived
from llmcli.records.work import PartWork

# The formats of a model of which no weights are used, by the names that all documents have.
NO_FORMATS: dict[str, None] = dict.fromkeys(
    ("weight_format", "activation_format", "cache_format", "product_format")
)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """How many numbers the model has learned; a tied head is the embedding, counted once.

    `active` enter the computation of one token. `embedding` are the rows that ids and positions
    look up, `head` the output matrix of its own where it has one; with `attention`, `mixers` (of
    other kinds), `mlp` and `norms` they add up to `total`.
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
    """Layers that are alike in everything that is said here; `layers` are their numbers.

    `kind` is the mixer's: `full attention`, `sliding window`, or what another part calls itself;
    of a layer without one it is what it has.
    What only attention or only a plain feed-forward has is None without it. `window`: the most
    keys that a query sees, None for all before it. `details` are said by other parts.
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
    """Memory of one device in bytes, None where it is unknown.

    `bfloat16`: whether it multiplies bfloat16 itself. `usable` is false where the installed
    PyTorch is one without CUDA.
    """

    device: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    bfloat16: bool
    usable: bool = True


@dataclass(frozen=True, kw_only=True)
class StateNeed:
    """What recurrent mixers keep of one sequence in a size that no token makes larger.

    `bytes` of all `layers` together: states, and what convolutions remember. `against_per_token` is
    what softmax attention would take for one token in as many layers: as much as the model's own
    attention layers take each, on average (`against` is `attention`), or without any as many
    numbers as the mixers' own keys and values have (`same_size`). `smaller_from`: the least number
    of tokens whose keys and values would take more.
    """

    layers: int
    bytes: int
    against: Literal["attention", "same_size"]
    against_per_token: float
    smaller_from: int


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes that a run takes at one length of context.

    `formats`: of weights, activations, cache and products, by the names that documents have.
    `states`: what of the `cache` of each sequence does not grow, None where all of it does.
    `copies`: of the caches of the others, which a batch makes when one of its sequences ends.
    `activations` is the peak of reading a prompt of that length, an estimate of the tensors alone.
    `runtime` is an estimate of what the libraries take once they compute, beyond PyTorch as it is
    imported, and of the tokenizer's tables. The others are exact.
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
        """What is there at once, at most: no sequence ends while the prompt is read."""
        return self.weights + self.cache + max(self.copies, self.activations) + self.runtime

    @property
    def together(self) -> int:
        """The same where all sequences end at once, so that nothing is copied."""
        return self.weights + self.cache + self.activations + self.runtime


@dataclass(frozen=True, kw_only=True)
class DeviceFit:
    """Whether a run fits what is free there, and the longest context that does.

    `token`: what it takes to decode the last token of the context, of all sequences together.
    `longest` is at most the model's own context (or the requested one), 0 where not even one
    token fits; it and `fits` are None where free memory is unknown or the device not usable.
    """

    device: Device
    need: MemoryNeed
    token: PartWork
    fits: bool | None
    longest: int | None
