"""Qwen 1.5, 2 and 3 with experts (Alibaba 2024, arXiv 2407.10671; 2025, arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import QWEN
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig, SharedConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults that differ from those of Qwen 2 and 3
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig. transformers 5 writes `num_local_experts` for Qwen 3."""
    kind = config["model_type"]
    renamed = {} if "num_local_experts" not in config else {
        "num_experts": config["num_local_experts"]
    }  # fmt: skip
    values = Values({**_DEFAULTS[kind], **config, **renamed})
    experts = mixture_of(values, shared=kind == "qwen2_moe")
    layers = values.integer("num_hidden_layers", most=MOST["layers"])
    mixes = sparse(values, layers)
    biased = values.flag("qkv_bias", True) if kind == "qwen2_moe" else None

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        if biased is not None:
            attention = replace(attention, qkv_bias=biased)
        ffn = replace(experts, activation=mlp.activation) if mixes[number] else mlp
        return sequential(attention, ffn, norm=model.final_norm)

    own: dict[str, Any] = {
        "model_type": kind.removesuffix("_moe"),
        "layer_types": _windows(values, kind, layers),
    }
    if not values.flag("use_sliding_window", False):
        own["sliding_window"] = None  # written as 0
    if kind == "qwen3_moe" and not values.has("head_dim"):
        heads = values.integer("num_attention_heads", most=MOST["heads"])
        own["head_dim"] = values.integer("hidden_size", most=MOST["width"]) // heads
    model = llama.from_hf({**_DEFAULTS[kind], **config, **own})
    return llama.rebuilt(model, block, family="qwen_moe", model_type=kind)


def mixture_of(values: Values, *, shared: bool) -> ExpertsConfig:
    """Read the experts of a layer, optionally with a `shared` one; the activation is SiLU."""
    count = values.integer("num_experts", most=MOST["heads"])
    beside = None
    if shared:
        key = "shared_expert_intermediate_size"
        beside = SharedConfig(hidden=values.integer(key, most=MOST["hidden"]), weighed=True)
    return ExpertsConfig(
        experts=count, hidden=values.integer("moe_intermediate_size", most=MOST["hidden"]),
        activation="silu", shared=beside,
        routing=RoutingConfig(
            chosen=values.integer("num_experts_per_tok", most=count),
            renormalized=values.flag("norm_topk_prob", False),
        ),
    )  # fmt: skip


def sparse(values: Values, layers: int) -> list[bool]:
    """Whether each layer has experts."""
    step = values.integer("decoder_sparse_step", 1, most=MOST["layers"])
    dense = values.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise values.wrong("mlp_only_layers", "a list of layers")
    return [number not in dense and (number + 1) % step == 0 for number in range(layers)]


def _windows(values: Values, kind: str, layers: int) -> list[str]:
    """The layer types; windows, if used: all layers of Qwen 3, every other of Qwen 2's first."""
    if kind == "qwen2_moe" and values.has("layer_types"):
        return values.layer_types(layers, ("full_attention", "sliding_attention"))
    slides = values.flag("use_sliding_window", False)
    if kind == "qwen3_moe":
        slides = slides and (values.has("sliding_window") or not values.says("sliding_window"))
        return ["sliding_attention" if slides else "full_attention"] * layers
    first = values.integer("max_window_layers", 28, least=0, most=MOST["layers"])
    return [
        "sliding_attention" if slides and number % 2 == 0 and number < first else "full_attention"
        for number in range(layers)
    ]


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    return replace(llama.from_gguf(metadata, tensors), family="qwen_moe")


FAMILIES = (
    Family(
        name="qwen_moe",
        words="as qwen2 with experts and a shared one (qwen2_moe), or as qwen3 with experts, "
        "in all or some layers",
        hf_types=("qwen2_moe", "qwen3_moe"),
        gguf_archs=("qwen2moe", "qwen3moe"),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=QWEN.hf,
        rules_gguf=QWEN.gguf,
        feed_forwards=("mixture of experts", "gated MLP"),
    ),
)
