"""Qwen 1.5, 2 and 3 with experts (Alibaba 2024, arXiv 2407.10671; 2025, arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import QWEN
from llmcli.families.values import MOST, Values
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig, SharedConfig

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


def _qwen_moe(m: Draft) -> None:
    if not m.hf:
        return
    two = m.kind == "qwen2_moe"
    # written by transformers 5 for Qwen 3
    count = "num_local_experts" if m.values.says("num_local_experts") else "num_experts"
    experts = mixture_of(m.values, shared=two, count=count)
    m.ffn = [
        replace(experts, activation=mlp.activation) if mixes else mlp
        for mlp, mixes in zip(m.ffn, sparse(m.values, len(m.ffn)), strict=True)
    ]
    if two:
        m.set_attention(qkv_bias=m.values.flag("qkv_bias", True))


def _as_dense(settings: dict[str, Any]) -> Mapping[str, Any]:
    """The settings of a Qwen 2 or 3 with the same attention."""
    values, kind = Values(settings), settings["model_type"]
    layers = values.integer("num_hidden_layers", most=MOST["layers"])
    own: dict[str, Any] = {
        "model_type": kind.removesuffix("_moe"),
        "layer_types": _windows(values, kind, layers),
    }
    if not values.flag("use_sliding_window", False):
        own["sliding_window"] = None  # written as 0
    if kind == "qwen3_moe" and not values.has("head_dim"):
        heads = values.integer("num_attention_heads", most=MOST["heads"])
        own["head_dim"] = values.integer("hidden_size", most=MOST["width"]) // heads
    return {**settings, **own}


def mixture_of(values: Values, *, shared: bool, count: str = "num_experts") -> ExpertsConfig:
    """Read the experts of a layer, optionally with a `shared` one; the activation is SiLU.

    `count`: the key of their number.
    """
    experts = values.integer(count, most=MOST["heads"])
    beside = None
    if shared:
        key = "shared_expert_intermediate_size"
        beside = SharedConfig(hidden=values.integer(key, most=MOST["hidden"]), weighed=True)
    return ExpertsConfig(
        experts=experts, hidden=values.integer("moe_intermediate_size", most=MOST["hidden"]),
        activation="silu", shared=beside,
        routing=RoutingConfig(
            chosen=values.integer("num_experts_per_tok", most=experts),
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


FAMILIES = (
    llama_like(
        _qwen_moe,
        name="qwen_moe",
        words="as qwen2 with experts and a shared one (qwen2_moe), or as qwen3 with experts, "
        "in all or some layers",
        hf=("qwen2_moe", "qwen3_moe"), gguf=("qwen2moe", "qwen3moe"),
        feed_forwards=("mixture of experts", "gated MLP"),
        like=None, by_type=_DEFAULTS, prepare=_as_dense, names=QWEN,
    ),
)  # fmt: skip
