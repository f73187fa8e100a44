"""What a model is, from its headers: sizes, layers, tokenizer, formats, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcli.errors import UnsupportedModel
from llmcli.records.document import APART, ViewCheck, derived
from llmcli.records.info import DeviceFit, LayerType, ParameterCounts
from llmcli.records.text import Token

_WHOLE_LIST = 16  # entries of metadata that a document has in full


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
    """What is on the disk. `metadata`: of a GGUF file, or `__metadata__` of safetensors."""

    kind: Literal["safetensors", "gguf"]
    path: str
    files: int
    bytes: int
    tensors: int
    formats: tuple[StoredFormat, ...]
    entries: Mapping[str, Any] = field(metadata=APART)

    @derived
    def metadata(self) -> dict[str, Any]:
        """The entries, a long list as its length and its first items."""
        return {key: _short(value) for key, value in self.entries.items()}


def _short(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    listed = [_short(item) for item in value[:_WHOLE_LIST]]
    return listed if len(value) <= _WHOLE_LIST else {"length": len(value), "first": listed}


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """`adds_bos`: in front of every text, by the tokenizer's own rule."""

    kind: str
    vocabulary: int
    bos: Token | None
    adds_bos: bool
    eos: tuple[Token, ...]
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
class DeclaredDtype:
    """The dtype that config.json names, and the bytes that all parameters take in it."""

    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the configuration says.

    `positions`: rows of learned positions, a hard limit of the context. `declared` is None where
    config.json names no dtype that we know. Embeddings are multiplied by `embedding_scale`, logits
    by `logit_scale`, and those have a soft cap of `logit_cap`.
    """

    family: str
    model_type: str
    width: int
    vocabulary: int
    context: int
    positions: int | None
    tied: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    declared: DeclaredDtype | None = None
    parameters: ParameterCounts
    layers: tuple[LayerType, ...]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Options with which a model fits that does not, at which context, and the bytes it needs."""

    options: str
    context: int
    needed_bytes: int


@dataclass(frozen=True, kw_only=True)
class InfoReport:
    """What `llmcli info` prints; `architecture` is None without a configuration that we know.

    `flops` and `memory` follow from it; `memory` begins with the device that would be used, and
    where the model does not fit there, `would_fit` are options with which it does. `unknown` says
    why `architecture`, or the tokenizer, is missing. `ignored`: GGUF metadata that has no effect
    for this architecture, here and in llama.cpp.
    """

    name: str = field(metadata=APART)
    about: About = About()
    file: FileFacts
    architecture: Architecture | None = None
    tokenizer: TokenizerFacts | None = None
    flops: FlopsNeed | None = None
    memory: tuple[DeviceFit, ...] = ()
    would_fit: tuple[Offer, ...] = ()
    unknown: tuple[str, ...] = ()
    unsupported: UnsupportedModel | None = field(default=None, metadata=APART)  # ends every run
    ignored: Mapping[str, str] = field(default_factory=dict)
    surplus: tuple[str, ...] = field(default=(), metadata=APART)  # tensors without a parameter
    checks: tuple[ViewCheck, ...] = field(default=(), metadata=APART)

    @derived
    def ok(self) -> bool:
        """Whether the model is supported."""
        return self.unsupported is None


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


@dataclass(frozen=True, kw_only=True)
class FamiliesReport:
    """What `--families` prints."""

    families: tuple[FamilyFacts, ...]
