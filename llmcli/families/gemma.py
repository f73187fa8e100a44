"""Gemma 1 to 3 (Google 2024 and 2025, arXiv 2403.08295, 2408.00118, 2503.19786).

Norms multiply by 1 + w, embeddings by √D; GELU uses tanh. Gemma 2 adds post-norms, soft caps and a
sliding window in every other layer; Gemma 3 adds q/k norms and separate RoPE settings for windowed
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import QWEN
from llmcli.families.read import GGUF_CAPS, GGUF_WINDOWS, gguf_windows, hf_windows
from llmcli.families.rope import of_layer_type, rope_from_hf
from llmcli.families.rules import Rule
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of transformers' configurations that differ from LlamaConfig's
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 2,
    "eos_token_id": 1, "max_position_embeddings": 8192,
}  # fmt: skip
_TYPES: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"num_key_value_heads": 16},
    "gemma2": {"num_key_value_heads": 4, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0},
    # files of multimodal models leave these out
    "gemma3_text": {"num_key_value_heads": 4, "max_position_embeddings": 131_072,
                    "vocab_size": 262_208, "num_attention_heads": 8},
}  # fmt: skip
_PERIOD = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}  # layers; the last has no window
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the models with query scale (D / H)^-½
NAMES = QWEN.but("""
    ln1       input_layernorm             attn_norm
    ln1_post  post_attention_layernorm    post_attention_norm
    ln2       pre_feedforward_layernorm   ffn_norm
    ln2_post  post_feedforward_layernorm  post_ffw_norm
""")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    kind = config["model_type"]
    settings = {**_DEFAULTS, **_TYPES[kind], **config}
    values, local = Values(settings), None
    if kind != "gemma":
        settings["hidden_act"] = values.text("hidden_activation", "gelu_pytorch_tanh")
    elif values.text("hidden_act", "gelu") == "gelu":  # early files mean the tanh form
        settings["hidden_act"] = "gelu_pytorch_tanh"
    settings |= {"model_type": "llama", "mlp_bias": False}
    if kind == "gemma3_text":
        theta = values.number("rope_local_base_freq", 10_000.0)
        of_local = Values(of_layer_type(settings, "sliding_attention", theta=theta))
        settings = of_layer_type(settings, "full_attention", theta=1e6)
    model = llama.from_hf(settings)
    size, count = llama.first_attention(model).head_dim, len(model.layers)
    if kind == "gemma":
        return _gemma(model, kind, size**-0.5, [None] * count, rounded=True)
    if kind == "gemma3_text":
        local = rope_from_hf(of_local, head_dim=size, context=model.context)
    return _gemma(
        model, kind, values.number("query_pre_attn_scalar", 256.0) ** -0.5,
        hf_windows(values, count, period=_PERIOD[kind], window=4096), local,
        # transformers ignores a score cap for Gemma 3
        values.optional_number(GGUF_CAPS[0]) if kind == "gemma2" else None,
        values.optional_number(GGUF_CAPS[1]), rounded=True,
    )  # fmt: skip


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig.

    Files lack the query scale and often the windows. Missing values default as in llama.cpp.
    """
    arch = metadata["general.architecture"]
    values = Values(metadata, prefix=f"{arch}.")
    rest = {key: value for key, value in metadata.items() if not key.endswith(GGUF_CAPS)}
    model = llama.from_gguf(rest, tensors, function="gelu_tanh")
    attention, count = llama.first_attention(model), len(model.layers)
    if arch == "gemma":
        return _gemma(model, arch, attention.scale, [None] * count)
    scale, local, two = attention.scale, None, arch == "gemma2"
    if count == _LARGEST[arch]:
        scale = max(1, model.width // attention.heads) ** -0.5
    windows = gguf_windows(values, count, period=_PERIOD[arch], window=4096 if two else None)
    if not two and attention.rope is not None:
        theta = values.number("rope.freq_base_swa", 10_000.0)
        local = replace(attention.rope, theta=theta, scaling=None)
    caps = [values.number(key, usual * two, above=False) or None
            for key, usual in zip(GGUF_CAPS, (50.0, 30.0), strict=True)]  # fmt: skip
    return _gemma(model, arch, scale, windows, local, caps[0] if two else None, caps[1])


def _gemma(
    model: ModelConfig, kind: str, scale: float, windows: Sequence[int | None],
    local: RopeConfig | None = None, score_cap: float | None = None,
    logit_cap: float | None = None, *, rounded: bool = False,
) -> ModelConfig:  # fmt: skip
    norm = NormConfig(kind="rms", eps=model.final_norm.eps, offset=1.0)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        window = windows[number]
        attention = replace(
            attention, scale=scale, window=window, cap=score_cap,
            qk_norm=norm if kind.startswith("gemma3") else None,
            rope=attention.rope if window is None or local is None else local,
        )  # fmt: skip
        return sequential(attention, mlp, norm=norm, after=None if kind == "gemma" else norm)

    return llama.rebuilt(
        model, block, family="gemma", model_type=kind, final_norm=norm,
        embedding=EmbeddingConfig(scale=model.width**0.5, rounded_scale=rounded),
        head=HeadConfig(tied=model.head.tied, cap=logit_cap),
    )  # fmt: skip


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names."""
    return (QWEN if config.model_type == "gemma" else NAMES).hf(config)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    return (QWEN if config.model_type == "gemma" else NAMES).gguf(config)


FAMILIES = (Family(
    name="gemma",
    words="norms of 1 + w, scaled embeddings; norms before and after (gemma2, gemma3), soft caps, "
    "windows by layer with rotary positions of their own",
    hf_types=("gemma", "gemma2", "gemma3_text"), gguf_archs=("gemma", "gemma2", "gemma3"),
    hf_multimodal=("gemma3",), gguf_reads=(*GGUF_WINDOWS, *GGUF_CAPS),
    from_hf=from_hf, from_gguf=from_gguf, rules_hf=rules_hf, rules_gguf=rules_gguf,
),)  # fmt: skip
