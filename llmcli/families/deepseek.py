"""Families with latent attention or mixtures in the format of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from llmcli.config.experts import ExpertsConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.model import ModelConfig
from llmcli.config.norm import NormConfig
from llmcli.errors import UnsupportedModel
from llmcli.families import mixture
from llmcli.families.draft import Draft
from llmcli.families.names import QWEN, Names
from llmcli.families.record import family
from llmcli.families.rope import scores_yarn_from_gguf, scores_yarn_from_hf
from llmcli.families.values import LIMITS, ConfigReader

_NORM = NormConfig(kind="rms", eps=1e-6)  # of latents, independent of `rms_norm_eps`


def _dense(values: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has a dense feed-forward instead of experts."""
    if values.has("mlp_layer_types"):
        expected = "`dense` or `sparse` for each layer"
        kinds = values.each("mlp_layer_types", layers, ("dense", "sparse"), expected)
        return [one == "dense" for one in kinds]
    first = values.integer("first_k_dense_replace", 1, least=0, most=LIMITS["layers"])
    step = values.integer("moe_layer_freq", 1, most=LIMITS["layers"])
    return [layer < first or layer % step > 0 for layer in range(layers)]


def _lengths(values: ConfigReader) -> tuple[str, str]:
    """The keys of a head's length and of its values' length."""
    keys = "attention.key_length", "attention.value_length"
    later = f"{keys[0]}_mla", f"{keys[1]}_mla"
    return later if values.has(later[0]) else keys


def _rotated_metadata(values: ConfigReader) -> dict[str, Any]:
    heads, keys = values.raw("attention.head_count"), ("key_length", "value_length")
    rotated = values.integer("rope.dimension_count", most=LIMITS["head_dim"])
    return {"attention.head_count_kv": heads, **{f"attention.{key}": rotated for key in keys}}


# content dimensions of a head come first; old GGUF files have `attn_kv_b`
_LATENT_QUERIES = QWEN.but("""
    attn.q_latent             self_attn.q_a_proj            attn_q_a
    attn.q_latent_norm        self_attn.q_a_layernorm       attn_q_a_norm
    attn.q+attn.q_pe@head     self_attn.q_b_proj            attn_q_b
    attn.kv_latent+attn.k_pe  self_attn.kv_a_proj_with_mqa  attn_kv_a_mqa
    attn.kv_latent_norm       self_attn.kv_a_layernorm      attn_kv_a_norm
    attn.k+attn.v@head        self_attn.kv_b_proj           attn_kv_b
    attn.k                    -                             attn_k_b|by_head|shape
    attn.v                    -                             attn_v_b|shape
    without: attn.q_norm attn.k_norm attn.q
    predicts: true
""")
_QUERIES = _LATENT_QUERIES.but("attn.q+attn.q_pe@head  self_attn.q_proj  attn_q")


def _names(config: ModelConfig) -> Names:
    part = config.layers[0].parts[0]
    return _QUERIES if getattr(part, "query_rank", None) is None else _LATENT_QUERIES


@family(
    """
    deepseek: latent attention: a cache of latents, and of one rotated key for all heads; experts
        of groups and a shared one, dense first layers
    types: deepseek_v2 deepseek_v3 glm4_moe_lite | deepseek2
    gguf_reads: rope.scaling.yarn_log_multiplier
    mixers: latent attention
    feed_forwards: mixture of experts, gated MLP
    keys: head_dim=qk_rope_head_dim
    fixed: num_key_value_heads=null
    fixed deepseek_v3 glm4_moe_lite: mlp_bias=false
    defaults: kv_lora_rank=512 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64
        v_head_dim=128 bos_token_id=0 eos_token_id=1
    defaults deepseek_v2: first_k_dense_replace=0 bos_token_id=1 eos_token_id=2 n_routed_experts=64
        n_shared_experts=2 moe_intermediate_size=1407
    defaults deepseek_v3: first_k_dense_replace=3 max_position_embeddings=4096 n_routed_experts=256
        n_shared_experts=1 moe_intermediate_size=2048 num_experts_per_tok=8 n_group=8 topk_group=4
        routed_scaling_factor=2.5
    defaults glm4_moe_lite: n_routed_experts=64 n_shared_experts=1 moe_intermediate_size=1536
        num_experts_per_tok=4 routed_scaling_factor=1.8 q_lora_rank=768 qk_nope_head_dim=192
        v_head_dim=256 rms_norm_eps=1e-5 max_position_embeddings=202752
    """,
    names=_names,
    fill=_rotated_metadata,
)
def deepseek(m: Draft) -> None:
    """DeepSeek-V2 and V3 (2024, arXiv 2405.04434, 2412.19437) and GLM-4.7-Flash.

    Latent attention; a mixture of experts with a shared expert in all layers but the first. GGUF
    files older than llama.cpp's latent cache have other lengths.
    """
    values, rope = m.values, m.attention[0].rope
    assert rope is not None
    if m.hf:
        if not values.flag("rope_interleave", True):
            raise UnsupportedModel("`rope_interleave` = `false` is not supported")
        content = values.integer("qk_nope_head_dim", most=LIMITS["head_dim"])
        factor, keys = scores_yarn_from_hf(values), ("q_lora_rank", "kv_lora_rank", "v_head_dim")
        second = m.kind == "deepseek_v2"
        m.ffn = [
            mlp if dense else mixture.read_deepseek(values, mlp.activation, second=second)
            for mlp, dense in zip(m.ffn, _dense(values, len(m.ffn)), strict=True)
        ]
    else:
        length, value = _lengths(values)
        content = values.integer(length, least=rope.dims + 1, most=LIMITS["head_dim"]) - rope.dims
        rope, factor = scores_yarn_from_gguf(rope, values)
        keys = ("attention.q_lora_rank", "attention.kv_lora_rank", value)
        experts = next((one for one in m.ffn if isinstance(one, ExpertsConfig)), None)
        second = experts is not None and experts.routing.scores == "softmax"
        m.others["model_type"] = "deepseek_v2" if second else "deepseek_v3"
    query_rank = None
    if values.has(keys[0]):
        query_rank = values.integer(keys[0], most=LIMITS["width"])
    attention = LatentConfig(
        heads=m.attention[0].heads,
        content=content,
        query_rank=query_rank,
        rope=rope,
        norm=_NORM,
        rank=values.integer(keys[1], most=LIMITS["width"]),
        value_dim=values.integer(keys[2], most=LIMITS["head_dim"]),
        scale=(content + rope.dims) ** -0.5 * factor,
        bias=m.hf and values.flag("attention_bias", False),
    )
    for number, ffn in enumerate(m.ffn):
        m.layer(number, attention, ffn)


@family("""
    glm4_moe: half of each head rotated, sigmoid routing by groups with a correction, a shared
        expert, dense first layers
    types: glm4_moe | glm4moe
    feed_forwards: mixture of experts, gated MLP
    options: rotated=0.5
    fixed: mlp_bias=false
    defaults: num_key_value_heads=8 max_position_embeddings=131072 rms_norm_eps=1e-5
        bos_token_id=null eos_token_id=null n_routed_experts=128 num_experts_per_tok=8
        moe_intermediate_size=1408 n_shared_experts=1
    names: post_norm_2
        predicts: true
""")
def glm4_moe(m: Draft) -> None:
    """GLM-4.5 and its successors (Zhipu 2025, arXiv 2508.06471): sigmoid routing.

    RoPE on half of each head, as in other GLMs, but pairing its two halves.
    """
    if not m.hf:
        return
    dense = m.values.integer("first_k_dense_replace", 1, least=0, most=LIMITS["layers"])
    normed = m.values.flag("use_qk_norm", False)
    m.set_attention(out_bias=False, qk_norm=m.norm if normed else None)
    m.ffn[dense:] = [mixture.read_deepseek(m.values, mlp.activation) for mlp in m.ffn[dense:]]
