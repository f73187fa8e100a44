"""Command R7B and A (Cohere 2025, arXiv 2504.00698): parallel attention and feed-forward.

Both read one LayerNorm without bias. Three of four layers use a sliding window; only these have
RoPE, with adjacent dimensions paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import Branch, LayerConfig, ModelConfig
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.read import GGUF_WINDOWS, gguf_windows, hf_windows
from llmcli.families.rules import Rule
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Cohere2Config` that differ from LlamaConfig's
_DEFAULTS = {
    "max_position_embeddings": 8192, "bos_token_id": 5, "eos_token_id": 255_001,
    "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_ONLY = {"model_type": "llama", "mlp_bias": False}
_PERIOD = 4  # layers; the last of each period has no window


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config}
    values = Values(settings)
    eps = values.number("layer_norm_eps", 1e-5, above=False)
    model = llama.from_hf({**settings, **_LLAMA_ONLY, "rms_norm_eps": eps})
    windows = hf_windows(values, len(model.layers), period=_PERIOD, window=4096)
    return _cohere2(model, windows, values.number("logit_scale", 0.0625))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    values = Values(metadata, prefix="cohere2.")
    rest = {key: value for key, value in metadata.items() if key != "cohere2.logit_scale"}
    model = llama.from_gguf(rest, tensors)
    windows = gguf_windows(values, len(model.layers), period=_PERIOD, window=None)
    return _cohere2(model, windows, values.number("logit_scale", 1.0, above=False) or 1.0)


def _cohere2(
    model: ModelConfig, windows: Sequence[int | None], scale: float
) -> ModelConfig:
    norm = NormConfig(kind="layer", eps=model.final_norm.eps)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        window = windows[number]
        rope = None if window is None else attention.rope
        both = (
            Branch(part=replace(attention, window=window, rope=rope), pre_norm=norm),
            Branch(part=mlp, shares_norm=True),
        )
        return LayerConfig(sublayers=(both,))

    return llama.rebuilt(
        model, block, family="cohere2", model_type="cohere2", final_norm=norm,
        head=HeadConfig(tied=model.head.tied, scale=scale),
    )  # fmt: skip


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names."""
    return llama_rules.rules_hf(config, norms=[("input_layernorm", "ln1")], paired=True)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names."""
    return llama_rules.rules_gguf(
        config, norms=[("attn_norm", "ln1")], paired=True, everywhere=False
    )


FAMILIES = (
    Family(
        name="cohere2",
        words="attention and feed-forward side by side, scaled logits; windows in three of four "
        "layers, which alone have rotary positions",
        hf_types=("cohere2",),
        gguf_archs=("cohere2",),
        gguf_reads=(*GGUF_WINDOWS, "logit_scale"),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
