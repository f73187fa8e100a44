"""Gemma 1 to 3 (Google 2024 and 2025, arXiv 2403.08295, 2408.00118, 2503.19786).

Norms multiply by 1 + w, embeddings by √D; GELU uses tanh. Gemma 2 adds post-norms, soft caps and a
sliding window in every other layer; Gemma 3 adds q/k norms and separate RoPE settings for windowed
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.model import ModelConfig
from llmcli.families.draft import Draft
from llmcli.families.names import QWEN, Names
from llmcli.families.read import GGUF_READS
from llmcli.families.record import family
from llmcli.families.rope import of_layer_type
from llmcli.families.values import ConfigReader

_CAPS = GGUF_READS["caps"]
_PERIOD = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}  # layers; the last has no window
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the models with query scale (D / H)^-½
NAMES = QWEN.but("""
    ln1       input_layernorm             attn_norm
    ln1_post  post_attention_layernorm    post_attention_norm
    ln2       pre_feedforward_layernorm   ffn_norm
    ln2_post  post_feedforward_layernorm  post_ffw_norm
""")


def _as_llama(settings: dict[str, Any]) -> Mapping[str, Any]:
    kind, values = settings["model_type"], ConfigReader(settings)
    if kind != "gemma":
        function = values.text("hidden_activation", "gelu_pytorch_tanh")
    elif (function := values.text("hidden_act", "gelu")) == "gelu":  # early files mean tanh
        function = "gelu_pytorch_tanh"
    settings = {**settings, "hidden_act": function}
    if kind != "gemma3_text":
        return settings
    return of_layer_type(settings, "full_attention", theta=1e6)


def _cap(m: Draft, key: str, gguf_default: float) -> float | None:
    if m.hf:
        return m.values.optional_number(key)
    return m.values.number(key, gguf_default, above=False) or None


def _names(config: ModelConfig) -> Names:
    return QWEN if config.model_type == "gemma" else NAMES


@family(
    """
    gemma: norms of 1 + w, scaled embeddings; norms before and after (gemma2, gemma3), soft caps,
        windows by layer with rotary positions of their own
    types: gemma gemma2 gemma3_text | gemma gemma2 gemma3
    hf_multimodal: gemma3
    gguf_reads: windows caps
    options: function=gelu_tanh
    fixed: mlp_bias=false
    defaults: head_dim=256 rms_norm_eps=1e-6 tie_word_embeddings=true bos_token_id=2 eos_token_id=1
        max_position_embeddings=8192
    defaults gemma: num_key_value_heads=16
    defaults gemma2: num_key_value_heads=4 attn_logit_softcapping=50.0 final_logit_softcapping=30.0
    defaults gemma3_text: num_key_value_heads=4 max_position_embeddings=131072 vocab_size=262208
        num_attention_heads=8
    """,
    names=_names,
    prepare=_as_llama,
)
def gemma(m: Draft) -> None:
    """GGUF files lack the query scale and often the windows, which are then llama.cpp's.

    The `text_config` of a multimodal Gemma 3 leaves out sizes, for which there are defaults.
    """
    three, two = m.kind.startswith("gemma3"), m.kind == "gemma2"
    m.norm = replace(m.norm, offset=1.0)
    m.set_attention(qk_norm=m.norm if three else None)
    scale, rope = m.model.width**0.5, m.attention[0].rope
    m.others["embedding"] = EmbeddingConfig(scale=scale, rounded_scale=m.hf)
    if m.kind == "gemma":
        return
    m.post = True
    if m.hf:
        m.set_attention(scale=m.values.number("query_pre_attn_scalar", 256.0) ** -0.5)
    elif len(m.attention) == _LARGEST[m.kind]:
        m.set_attention(scale=max(1, m.model.width // m.attention[0].heads) ** -0.5)
    windows = m.windows(_PERIOD[m.kind], hf_default=4096, gguf_default=4096 if two else None)
    m.by_layer(window=windows)
    if three and rope is not None:
        theta = m.values.number("rope_local_base_freq" if m.hf else "rope.freq_base_swa", 10_000.0)
        local = replace(rope, theta=theta, scaling=None)
        if m.hf:
            local = m.hf_rope_of_windows(theta)
        m.by_layer(rope=[rope if one is None else local for one in windows])
    if two or not m.hf:  # transformers ignores a score cap for Gemma 3, llama.cpp does not use it
        cap = _cap(m, _CAPS[0], 50.0)
        m.set_attention(cap=cap if two else None)
    cap = _cap(m, _CAPS[1], 30.0 * two)
    m.others["head"] = HeadConfig(tied=m.model.head.tied, cap=cap)
