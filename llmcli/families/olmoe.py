"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): experts, full-width q/k norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.errors import UnsupportedModel
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import QWEN
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `OlmoeConfig` that differ from LlamaConfig's
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": None,
             "eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config, "model_type": "llama", "mlp_bias": False}
    values = Values(settings)
    if values.has("clip_qkv"):
        raise UnsupportedModel("`clip_qkv` is not supported: it needs `clipped queries and keys`")
    count = values.integer("num_experts", most=MOST["heads"])
    routing = RoutingConfig(
        chosen=values.integer("num_experts_per_tok", most=count),
        renormalized=values.flag("norm_topk_prob", False),
    )

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        experts = ExpertsConfig(
            experts=count, hidden=mlp.hidden, activation=mlp.activation, routing=routing
        )
        return sequential(attention, experts, norm=model.final_norm)

    model = llama.from_hf(settings)
    return _normed(llama.rebuilt(model, block))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    return _normed(llama.from_gguf(metadata, tensors))


def _normed(model: ModelConfig) -> ModelConfig:
    def block(number: int, attention: AttentionConfig, ffn: ExpertsConfig) -> LayerConfig:
        attention = replace(attention, qk_norm=model.final_norm, qk_norm_wide=True)
        return sequential(attention, ffn, norm=model.final_norm)

    return llama.rebuilt(model, block, family="olmoe", model_type="olmoe")


FAMILIES = (
    Family(
        name="olmoe",
        words="experts in every layer, queries and keys normalized over the width",
        hf_types=("olmoe",),
        gguf_archs=("olmoe",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=QWEN.hf,
        rules_gguf=QWEN.gguf,
        feed_forwards=("mixture of experts",),
    ),
)
