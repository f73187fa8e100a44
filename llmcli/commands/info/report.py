"""What a model is, from its headers: sizes, layers, tokenizer, formats, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcli.errors import UnsupportedModel
from llmcli.records.checks import ViewCheck
from llmcli.records.info import DeviceFit, LayerType, ParameterCounts


@dataclass(frozen=True, kw_only=True)
class About:
    """Who the model is, empty where unknown: `summary` is our catalog's, `kind` a class."""

    summary: str = ""
    name: str = ""
    organization: str = ""
    license: str = ""
    languages: tuple[str, ...] = ()
    kind: str = ""


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
class ModelFacts:
    """What the configuration says, and what follows for memory on each device.

    `fits` begins with the device that would be used; where it does not fit there, `would_fit` are
    options with which it does. `positions`: rows of learned positions, a
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
    would_fit: tuple[tuple[str, DeviceFit], ...] = ()
    declared: tuple[str, int] | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class InfoReport:
    """What `llmcli info` prints; `model` is None where there is no configuration that we know.

    `unknown` says why `model`, or the tokenizer, is missing; `unsupported` is the error that every
    run of the model ends with. `ignored`: GGUF metadata that has no
    effect for this architecture, here and in llama.cpp. `surplus`: tensors for which the model has
    no parameter.
    """

    name: str
    file: FileFacts
    model: ModelFacts | None
    tokenizer: TokenizerFacts | None
    about: About = About()
    unknown: tuple[str, ...] = ()
    unsupported: UnsupportedModel | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    surplus: tuple[str, ...] = ()
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
