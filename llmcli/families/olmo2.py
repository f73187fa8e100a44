"""OLMo 2 (OLMo et al. 2024, arXiv 2501.00656): Llama with other norms.

No norm precedes a part, one follows each, and queries and keys are normalized over the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import Branch, LayerConfig, ModelConfig
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.rules import Rule

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# what `Olmo2Config` sets where LlamaConfig sets something else
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_NORMS_HF = (("post_attention_layernorm", "ln1_post"), ("post_feedforward_layernorm", "ln2_post"))
_NORMS_GGUF = (("post_attention_norm", "ln1_post"), ("post_ffw_norm", "ln2_post"))
_LLAMA_ONLY = {"model_type": "llama", "mlp_bias": False}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    return _with_norms(llama.from_hf({**_DEFAULTS, **config, **_LLAMA_ONLY}))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    return _with_norms(llama.from_gguf(metadata, tensors))


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """transformers' names."""
    return llama_rules.rules_hf(config, norms=_NORMS_HF)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """llama.cpp's names; rows of queries and keys lie as we rotate them."""
    return llama_rules.rules_gguf(config, norms=_NORMS_GGUF)


def _with_norms(config: ModelConfig) -> ModelConfig:
    norm = config.final_norm

    def block(layer: LayerConfig) -> LayerConfig:
        attention, mlp = layer.attention, layer.parts[-1]
        assert attention is not None
        attention = replace(attention, qk_norm=norm, qk_norm_wide=True)
        return LayerConfig(
            sublayers=tuple((Branch(part=part, post_norm=norm),) for part in (attention, mlp))
        )

    return replace(
        config, family="olmo2", model_type="olmo2", layers=tuple(map(block, config.layers))
    )


FAMILIES = (
    Family(
        name="olmo2",
        words="as llama with norms after the parts, queries and keys normalized over the width",
        hf_types=("olmo2",),
        gguf_archs=("olmo2",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
