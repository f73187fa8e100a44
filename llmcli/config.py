"""What a model is, as nested frozen values: the parts' own configurations, layers fully unrolled.

No torch here, and no family's name: a family translates its own configuration into these values and
nothing else asks who it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One block: `x + mixer(ln1(x))`, then `x + ffn(ln2(x))`."""

    mixer: AttentionConfig
    ffn: MlpConfig
    ln1: NormConfig
    ln2: NormConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `context` is the length it was trained for; `bos`/`eos` are token ids.

    `family` and `model_type` are for people to read; no code branches on them.
    """

    family: str
    model_type: str
    vocab: int
    width: int
    context: int
    layers: tuple[LayerConfig, ...]
    embedding: EmbeddingConfig
    final_norm: NormConfig
    head: HeadConfig
    bos: int | None = None
    eos: tuple[int, ...] = ()
