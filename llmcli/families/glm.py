"""GLM-4 (Zhipu 2024, arXiv 2406.12793): RoPE on half of each head, adjacent dimensions paired.

`glm4` (GLM-4-0414) adds post-norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.fused import fused_gate_up
from llmcli.families.rules import Rule
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `GlmConfig` that differ from LlamaConfig's
_DEFAULTS = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 0.00000015625, "attention_bias": True, "bos_token_id": None,
    "eos_token_id": [151_329, 151_336, 151_338],
}  # fmt: skip
_NORMS_HF = (
    ("input_layernorm", "ln1"), ("post_self_attn_layernorm", "ln1_post"),
    ("post_attention_layernorm", "ln2"), ("post_mlp_layernorm", "ln2_post"),
)  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config, "model_type": "llama", "mlp_bias": False}
    return _glm(llama.from_hf(settings, rotated=0.5), config["model_type"])


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    return _glm(llama.from_gguf(metadata, tensors), metadata["general.architecture"])


def _glm(model: ModelConfig, kind: str) -> ModelConfig:
    norm = model.final_norm
    after = norm if kind == "glm4" else None

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        return sequential(replace(attention, out_bias=False), mlp, norm=norm, after=after)

    return llama.rebuilt(model, block, family="glm", model_type=kind)


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names."""
    norms = _NORMS_HF if config.model_type == "glm4" else llama_rules.NORMS_HF
    return (
        *llama_rules.rules_hf(config, norms=norms, paired=True),
        *fused_gate_up(config, "model.layers.{layer}.mlp.gate_up_proj"),
    )


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names."""
    norms = llama_rules.NORMS_GGUF
    if config.model_type == "glm4":
        norms = (*norms, *llama_rules.NORMS_AFTER_GGUF)
    return llama_rules.rules_gguf(config, norms=norms, paired=True, fused_up=True)


FAMILIES = (
    Family(
        name="glm",
        words="half of each head rotated, biases of q, k, v; norms after the parts, too (glm4)",
        hf_types=("glm", "glm4"),
        gguf_archs=("chatglm", "glm4"),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
