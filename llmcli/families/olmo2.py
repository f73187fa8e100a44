"""OLMo 2 and 3 (OLMo et al. 2024, arXiv 2501.00656; 2025, arXiv 2512.13961): post-norms, windows.

Each part has a post-norm and no pre-norm; queries and keys are normalized over their full width. In
OLMo 3 three of four layers have a sliding window and unscaled RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.read import GGUF_WINDOWS, gguf_windows, hf_windows
from llmcli.families.rope import of_layer_type, rope_from_hf
from llmcli.families.rules import Rule
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of their configurations that differ from LlamaConfig's
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
_NORMS_HF = (("post_attention_layernorm", "ln1_post"), ("post_feedforward_layernorm", "ln2_post"))
_LLAMA_ONLY = {"model_type": "llama", "mlp_bias": False}
_PERIOD = 4  # layers of OLMo 3; the last of each period has no window


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config, **_LLAMA_ONLY}
    if config["model_type"] == "olmo2":
        return _with_norms(llama.from_hf(settings), "olmo2")
    model = llama.from_hf(of_layer_type(settings, "full_attention", theta=500_000.0))
    local = rope_from_hf(
        Values(of_layer_type(settings, "sliding_attention", theta=500_000.0)),
        head_dim=llama.first_attention(model).head_dim, context=model.context,
    )  # fmt: skip
    windows = hf_windows(Values(settings), len(model.layers), period=_PERIOD, window=4096)
    return _with_norms(model, "olmo3", windows, local)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig: OLMo 3 is an OLMo 2 with windows."""
    model = llama.from_gguf(metadata, tensors)
    values = Values(metadata, prefix="olmo2.")
    windows = gguf_windows(values, len(model.layers), period=_PERIOD, window=None)
    rope = llama.first_attention(model).rope
    assert rope is not None
    return _with_norms(model, "olmo2", windows, replace(rope, scaling=None))


def _with_norms(
    model: ModelConfig, kind: str, windows: Sequence[int | None] = (),
    local: RopeConfig | None = None,
) -> ModelConfig:  # fmt: skip
    norm = model.final_norm

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        attention = replace(attention, qk_norm=norm, qk_norm_wide=True)
        if windows and windows[number] is not None:
            attention = replace(attention, window=windows[number], rope=local)
        return sequential(attention, mlp, norm=None, after=norm)

    return llama.rebuilt(model, block, family="olmo", model_type=kind)


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names."""
    return llama_rules.rules_hf(config, norms=_NORMS_HF)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    return llama_rules.rules_gguf(config, norms=llama_rules.NORMS_AFTER_GGUF)


FAMILIES = (
    Family(
        name="olmo",
        words="norms after the parts, queries and keys normalized over the width (olmo2); windows "
        "in three of four layers (olmo3)",
        hf_types=("olmo2", "olmo3"),
        gguf_archs=("olmo2",),
        gguf_reads=GGUF_WINDOWS,
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
