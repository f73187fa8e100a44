"""GLM-4.5 and its successors (Zhipu 2025, arXiv 2508.06471): sigmoid routing, dense first layers.

RoPE on half of each head, as in other GLMs, but pairing its two halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, mixture
from llmcli.families.family import Family
from llmcli.families.names import POST_NORM_2
from llmcli.families.rules import Rule
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Glm4MoeConfig` that differ from LlamaConfig's, and additional ones
_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408, "n_shared_experts": 1,
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config, "model_type": "llama", "mlp_bias": False}
    values = Values(settings)
    dense = values.integer("first_k_dense_replace", 1, least=0, most=MOST["layers"])
    normed = values.flag("use_qk_norm", False)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        norm = model.final_norm
        attention = replace(attention, out_bias=False, qk_norm=norm if normed else None)
        ffn = mlp if number < dense else mixture.from_hf(values, mlp.activation)
        return sequential(attention, ffn, norm=norm)

    model = llama.from_hf(settings, rotated=0.5)
    return llama.rebuilt(model, block, family="glm4_moe", model_type="glm4_moe")


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    return replace(llama.from_gguf(metadata, tensors), family="glm4_moe")


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names; layers after the last one are for multi-token prediction."""
    return (
        *POST_NORM_2.hf(config),
        mixture.later_layers("model.layers.{later}.*", config),
    )


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    return (
        *POST_NORM_2.gguf(config),
        mixture.later_layers("blk.{later}.*", config),
    )


FAMILIES = (
    Family(
        name="glm4_moe",
        words="half of each head rotated, sigmoid routing by groups with a correction, a shared "
        "expert, dense first layers",
        hf_types=("glm4_moe",),
        gguf_archs=("glm4moe",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
        feed_forwards=("mixture of experts", "gated MLP"),
    ),
)
