"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import LLAMA
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig
from llmcli.parts.mlp.config import MlpConfig

# defaults of `MixtralConfig` that differ from MistralConfig's
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
             "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config, "model_type": "mistral"}
    values = Values(settings)
    count = values.integer("num_local_experts", most=MOST["heads"])
    routing = RoutingConfig(
        chosen=values.integer("num_experts_per_tok", most=count), renormalized=True
    )

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        experts = ExpertsConfig(
            experts=count, hidden=mlp.hidden, activation=mlp.activation, routing=routing
        )
        return sequential(attention, experts, norm=model.final_norm)

    model = llama.from_hf(settings)
    return llama.rebuilt(model, block, family="mixtral", model_type="mixtral")


FAMILIES = (
    Family(
        name="mixtral",
        words="as mistral, with a mixture of experts in every layer (in GGUF a llama)",
        hf_types=("mixtral",),
        gguf_archs=(),
        from_hf=from_hf,
        from_gguf=llama.from_gguf,
        rules_hf=LLAMA.but(experts=("block_sparse_moe", ("w1", "w3", "w2"))).hf,
        rules_gguf=LLAMA.gguf,
        feed_forwards=("mixture of experts",),
    ),
)
