"""StarCoder 2 (BigCode 2024, arXiv 2402.19173): LayerNorm, biases, no gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.read import hf_window
from llmcli.families.rules import Rename, Rule
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Starcoder2Config` that differ from LlamaConfig's
_DEFAULTS = {
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 50_256,
    "eos_token_id": 50_256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config}
    values = Values(settings)
    eps = values.number("norm_epsilon", 1e-5, above=False)
    biased = values.flag("use_bias", True)
    settings |= {"model_type": "llama", "rms_norm_eps": eps, "attention_bias": biased,
                 "mlp_bias": biased}  # fmt: skip
    return _starcoder2(llama.from_hf(settings), hf_window(values))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig; llama.cpp has no window here."""
    return _starcoder2(llama.from_gguf(metadata, tensors, function="gelu_tanh"), None)


def _starcoder2(model: ModelConfig, window: int | None) -> ModelConfig:
    norm = NormConfig(kind="layer", eps=model.final_norm.eps, bias=True)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        attention = replace(attention, window=window)
        return sequential(attention, replace(mlp, gated=False), norm=norm)

    return llama.rebuilt(model, block, family="starcoder2", model_type="starcoder2",
                         final_norm=norm)  # fmt: skip


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names."""
    h, b = "model.layers.{layer}.mlp", "blocks.{layer}.mlp"
    return (
        *llama_rules.rules_hf(config),
        *(
            Rename(f"{h}.{theirs}.{kind}", f"{b}.{letter}_{ours}")
            for theirs, ours in (("c_fc", "up"), ("c_proj", "down"))
            for kind, letter in (("weight", "W"), ("bias", "b"))
        ),
    )


FAMILIES = (
    Family(
        name="starcoder2",
        words="LayerNorm and biases, rotary positions, grouped queries, a feed-forward without "
        "a gate",
        hf_types=("starcoder2",),
        gguf_archs=("starcoder2",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=llama_rules.rules_gguf,
        feed_forwards=("MLP",),
    ),
)
