"""Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import LLAMA
from llmcli.families.read import hf_window
from llmcli.families.rope import GGUF_YARN, yarn_as_written
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig, QueryGrowth
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Ministral3Config` that differ from LlamaConfig's
_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {
        "type": "yarn", "rope_theta": 1e6, "factor": 16.0,
        "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_LLAMA_ONLY = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config}
    if settings["rope_parameters"] is None:
        settings["rope_parameters"] = _DEFAULTS["rope_parameters"]
    model, values = llama.from_hf(settings | _LLAMA_ONLY), Values(settings)
    rope = values.section("rope_parameters") or Values({})
    growth = QueryGrowth(
        beta=rope.number("llama_4_scaling_beta", above=False),
        original=rope.integer("original_max_position_embeddings", most=MOST["positions"]),
    )
    return _ministral3(model, window=hf_window(values), growth=growth)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig; llama.cpp has no window here."""
    model, values = llama.from_gguf(metadata, tensors), Values(metadata, prefix="mistral3.")
    rope, growth = llama.first_attention(model).rope, None
    assert rope is not None
    beta = values.number("attention.temperature_scale", 0.0, above=False)
    if beta:
        key = "rope.scaling.original_context_length"
        original = values.integer(key, model.context, most=MOST["positions"])
        growth = QueryGrowth(beta=beta, original=original)
    return _ministral3(model, rope=yarn_as_written(rope, values), growth=growth)


def _ministral3(model: ModelConfig, **changes: Any) -> ModelConfig:
    """Apply `changes` to the attention of every layer."""

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        return sequential(replace(attention, **changes), mlp, norm=model.final_norm)

    return llama.rebuilt(model, block, family="ministral3", model_type="ministral3")


FAMILIES = (
    Family(
        name="ministral3",
        words="as mistral with queries that grow with their position",
        hf_types=("ministral3",),
        hf_multimodal=("mistral3",),
        gguf_archs=("mistral3",),
        gguf_reads=GGUF_YARN,
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=LLAMA.hf,
        rules_gguf=LLAMA.gguf,
    ),
)
