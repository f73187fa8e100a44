"""Granite (IBM 2024, arXiv 2405.04324): Llama with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import LLAMA
from llmcli.families.read import GGUF_SCALES
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# in the order of `GGUF_SCALES`; logits are divided by the last
_HF = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")


def from_hf(config: Mapping[str, Any], *, rotated: bool = True) -> ModelConfig:
    """config.json → ModelConfig; `rotated`: whether queries and keys use RoPE."""
    model = llama.from_hf({"bos_token_id": 1, "eos_token_id": 2, **config, "model_type": "llama"})
    values = Values(config)
    return _granite(model, *(values.number(key, 1.0) for key in _HF), rotated=rotated)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig.

    A multiplier that is 0 or absent has no effect, as in llama.cpp. `rope.scaling.finetuned` says
    whether queries and keys use RoPE.
    """
    arch = Values(metadata).text("general.architecture")
    own = {f"{arch}.{key}" for key in GGUF_SCALES}
    rest = {key: value for key, value in metadata.items() if key not in own}
    model, values = llama.from_gguf(rest, tensors), Values(metadata, prefix=f"{arch}.")
    rotated = values.flag("rope.scaling.finetuned", True)
    usual = (llama.first_attention(model).scale, 1.0, 1.0, 1.0)
    found = (
        values.number(key, other, above=False) or other
        for key, other in zip(GGUF_SCALES, usual, strict=True)
    )
    return _granite(model, *found, rotated=rotated)


def _granite(
    model: ModelConfig, scale: float, residual: float, embedding: float, logits: float, *,
    rotated: bool,
) -> ModelConfig:  # fmt: skip
    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        rope = attention.rope if rotated else None
        attention = replace(attention, scale=scale, rope=rope)
        return sequential(attention, mlp, norm=model.final_norm, multiplier=residual)

    return llama.rebuilt(
        model, block, family="granite", model_type="granite",
        embedding=EmbeddingConfig(scale=embedding),
        head=HeadConfig(tied=model.head.tied, scale=1 / logits),
    )  # fmt: skip


FAMILIES = (
    Family(
        name="granite",
        words="as llama with multipliers of embeddings, scores, residual parts and logits",
        hf_types=("granite",),
        gguf_archs=("granite",),
        gguf_reads=GGUF_SCALES,
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=LLAMA.hf,
        rules_gguf=LLAMA.gguf,
    ),
)
