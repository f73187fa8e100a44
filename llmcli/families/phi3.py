"""Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219, 2412.08905): Llama with fused tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.fused import fused_gate_up, fused_qkv
from llmcli.families.read import GGUF_WINDOWS, hf_window
from llmcli.families.rules import Rule
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Phi3Config` that differ from LlamaConfig's
_DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1,
    "original_max_position_embeddings": 4096, "eos_token_id": 32000,
}  # fmt: skip
_LLAMA_ONLY = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig. Early files call longrope `su` or `yarn`."""
    settings = {**_DEFAULTS, **config}
    for key in ("rope_parameters", "rope_scaling"):
        rope = settings.get(key)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type"))
            kind = "longrope" if kind in ("su", "yarn") else kind
            settings[key] = {**rope, **({} if kind is None else {"rope_type": kind})}
    values = Values(settings)
    model = llama.from_hf(settings | _LLAMA_ONLY, rotated=1.0)
    return _phi3(model, hf_window(values))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    model, values = llama.from_gguf(metadata, tensors), Values(metadata, prefix="phi3.")
    key = "attention.sliding_window"
    return _phi3(model, values.integer(key, 0, least=0, most=MOST["positions"]) or None)


def _phi3(model: ModelConfig, window: int | None) -> ModelConfig:
    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        return sequential(replace(attention, window=window), mlp, norm=model.final_norm)

    return llama.rebuilt(model, block, family="phi3", model_type="phi3")


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names."""
    layers = "model.layers.{layer}"
    return (
        *llama_rules.rules_hf(config),
        *fused_qkv(config, f"{layers}.self_attn.qkv_proj"),
        *fused_gate_up(config, f"{layers}.mlp.gate_up_proj"),
    )


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    return (
        *llama_rules.rules_gguf(config, fused_up=True),
        *fused_qkv(config, "blk.{layer}.attn_qkv"),
    )


FAMILIES = (
    Family(
        name="phi3",
        words="as llama with fused projections, partial rotary positions, a window",
        hf_types=("phi3",),
        gguf_archs=("phi3",),
        gguf_reads=GGUF_WINDOWS,
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
