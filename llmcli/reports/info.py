"""What a model is, from its headers: sizes, layers, tokenizer, formats, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcli.reports.checks import ViewCheck
from llmcli.reports.work import PartWork

# The formats of a model of which no weights are used, by the names that all documents have.
NO_FORMATS: dict[str, None] = dict.fromkeys(
    ("weight_format", "activation_format", "cache_format", "product_format")
)


@dataclass(frozen=True, kw_only=True)
class About:
    """Who the model is, empty where nobody says: `summary` is our catalog's, `kind` a class."""

    summary: str = ""
    name: str = ""
    organization: str = ""
    license: str = ""
    languages: tuple[str, ...] = ()
    kind: str = ""


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


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """The tensors of a file that are stored alike: `numbers` in so many bytes."""

    format: str
    tensors: int
    numbers: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What lies on the disk. `metadata`: of a GGUF file, or `__metadata__` of safetensors."""

    kind: Literal["safetensors", "gguf"]
    path: str
    files: int
    bytes: int
    tensors: int
    formats: tuple[StoredFormat, ...]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """Ids with their texts; `adds_bos`: in front of every text, by the tokenizer's own rule."""

    kind: str
    vocabulary: int
    bos: tuple[int, str] | None
    adds_bos: bool
    eos: tuple[tuple[int, str], ...]
    chat_template: bool


@dataclass(frozen=True, kw_only=True)
class Device:
    """Memory of one device in bytes, None where it cannot be asked.

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
class FlopsNeed:
    """FLOPs for one sequence of up to `context` tokens: matrix products, 2 a multiply-add.

    `first` and `last`: to decode the token at the first and at the last position, which see one
    key and all of them. `prompt`: to read `context` tokens at once, with logits of the last
    alone, of the pairs that the causal mask and the window leave; `prompt_full` of the full square.
    """

    context: int
    first: int
    last: int
    prompt: int
    prompt_full: int


@dataclass(frozen=True, kw_only=True)
class DeviceFit:
    """Whether a run fits what is free there, and the longest context that does.

    `token`: what it takes to decode the last token of the context, of all sequences together.
    `longest` is at most the model's own context (or the one asked for), 0 where not even one
    token fits; it and `fits` are None where free memory is unknown or the device not usable.
    """

    device: Device
    need: MemoryNeed
    token: PartWork
    fits: bool | None
    longest: int | None


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the configuration says, and what follows for memory on each device.

    `fits` begins with the device that would be used. `positions`: rows of learned positions, a
    hard limit of the context. `declared`: the dtype that config.json names, and the bytes that all
    parameters take in it; None where it names none that we know. Embeddings are multiplied by
    `embedding_scale`, logits by `logit_scale`, and those have a soft cap of `logit_cap`.
    """

    family: str
    model_type: str
    width: int
    vocabulary: int
    context: int
    positions: int | None
    tied: bool
    counts: ParameterCounts
    layers: tuple[LayerType, ...]
    flops: FlopsNeed
    fits: tuple[DeviceFit, ...]
    declared: tuple[str, int] | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class InfoReport:
    """What `llmcli info` prints; `model` is None where there is no configuration that we know.

    `unknown` says why `model`, or the tokenizer, is missing. `ignored`: GGUF metadata that has no
    effect for this architecture, here and in llama.cpp.
    """

    name: str
    file: FileFacts
    model: ModelFacts | None
    tokenizer: TokenizerFacts | None
    about: About = About()
    unknown: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[ViewCheck, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """A supported family: what checkpoints call it, and what it is made of."""

    name: str
    words: str
    hf_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    mixers: tuple[str, ...]
    feed_forwards: tuple[str, ...]
    checked: str
