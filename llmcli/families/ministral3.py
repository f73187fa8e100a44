"""Ministral 3 (Mistral AI 2025): Mistral with queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.errors import UnsupportedModel
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.llama_rules import rules_gguf, rules_hf
from llmcli.families.read import hf_window
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig, QueryGrowth
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# what `Ministral3Config` sets where LlamaConfig sets something else
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
    model, values = llama.from_hf(settings | _LLAMA_ONLY), Values(settings)
    window, growth = hf_window(values), None
    rope = values.section("rope_parameters") or Values({})
    if rope.has("llama_4_scaling_beta"):
        growth = QueryGrowth(
            beta=rope.number("llama_4_scaling_beta", above=False),
            original=rope.integer("original_max_position_embeddings", most=MOST["positions"]),
        )

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        attention = replace(attention, window=window, growth=growth)
        return sequential(attention, mlp, norm=model.final_norm)

    return llama.rebuilt(model, block, family="ministral3", model_type="ministral3")


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """No file of it is read yet."""
    raise UnsupportedModel("`ministral3` is not supported in GGUF files")


FAMILIES = (
    Family(
        name="ministral3",
        words="as mistral with queries that grow with their position",
        hf_types=("ministral3",),
        hf_multimodal=("mistral3",),
        gguf_archs=(),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
