"""Families of Qwen: dense, with experts, with gated DeltaNet, and text models of Qwen-VL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcli.config.delta import DeltaConfig
from llmcli.config.experts import SharedConfig
from llmcli.config.model import ModelConfig
from llmcli.errors import UnsupportedModel
from llmcli.families.draft import Draft
from llmcli.families.names import POST_NORM_2, Names
from llmcli.families.read import GGUF_SIZES, gguf_layers
from llmcli.families.record import family
from llmcli.families.values import LIMITS, ConfigReader, require_divisible


def _qwen_attention(m: Draft, *, two: bool) -> None:
    if two:
        m.set_attention(qkv_bias=True, out_bias=False)
    else:
        m.set_attention(qk_norm=m.norm)


@family("""
    qwen: as llama with biases of q, k, v (qwen2) or normalized queries and keys (qwen3), windows
        by layer
    types: qwen2 qwen3 | qwen2 qwen3
    fixed: mlp_bias=false
    defaults: max_position_embeddings=32768 num_key_value_heads=32 bos_token_id=null
        eos_token_id=null
    defaults qwen3: head_dim=128
    names: qwen
""")
def qwen_dense(m: Draft) -> None:
    """Qwen 2 and 3 (Alibaba 2024 and 2025, arXiv 2407.10671 and 2505.09388).

    Biases of queries, keys and values, or normalized queries and keys; windows by layer. In GGUF
    the tensors say which.
    """
    if not m.hf:
        return
    _qwen_attention(m, two=m.kind.startswith("qwen2"))
    first = 0
    if not m.values.has("layer_types"):
        first = m.values.integer("max_window_layers", 28, least=0, most=LIMITS["layers"])
    m.set_windows([number >= first for number in range(len(m.ffn))], switched=True)


@family("""
    qwen_vl: the text model of qwen2_vl, qwen2_5_vl and qwen3_vl: qwen2 and qwen3
    types: | qwen2vl qwen3vl
    hf_multimodal: qwen2_vl qwen2_5_vl qwen3_vl
    hf_texts: qwen2_vl_text qwen2_5_vl_text qwen3_vl_text
    fixed: mlp_bias=false
    ropes: mrope=default
    defaults: max_position_embeddings=32768 num_key_value_heads=8 bos_token_id=null
        eos_token_id=null rope_theta=1e6
    defaults qwen3_vl_text: max_position_embeddings=128000 num_key_value_heads=32 head_dim=128
        rope_theta=500000.0
    names: qwen
""")
def qwen_vl(m: Draft) -> None:
    """The text model of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923): Qwen 2 or 3.

    Multimodal RoPE has a section for time and two for image coordinates. For text all three
    positions are equal, so sections have no effect.
    """
    qwen_dense.build(m)
    m.others["family"] = "qwen"
    if m.hf:
        m.others["model_type"] = m.kind.partition("_")[0]


def _with_head_size(settings: dict[str, Any]) -> Mapping[str, Any]:
    values = ConfigReader(settings)
    if settings["model_type"] == "qwen3_moe" and not values.has("head_dim"):
        heads = values.integer("num_attention_heads", most=LIMITS["heads"])
        size = values.integer("hidden_size", most=LIMITS["width"]) // heads
        settings = {**settings, "head_dim": size}
    return settings


def _set_experts(m: Draft, *, shared: bool, count: str = "num_experts") -> None:
    """Read experts of some layers, optionally with a shared one; `count`: of their number."""
    values, layers = m.values, len(m.ffn)
    step = values.integer("decoder_sparse_step", 1, most=LIMITS["layers"])
    dense, key = values.raw("mlp_only_layers") or [], "shared_expert_intermediate_size"
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise values.invalid("mlp_only_layers", "a list of layers")
    mixes = [number not in dense and (number + 1) % step == 0 for number in range(layers)]
    beside = None
    if shared:
        beside = SharedConfig(hidden=values.integer(key, most=LIMITS["hidden"]), weighed=True)
    renormalized = values.flag("norm_topk_prob", False)
    m.set_experts(count, mixes=mixes, shared=beside, renormalized=renormalized)


@family(
    """
    qwen_moe: as qwen2 with experts and a shared one (qwen2_moe), or as qwen3 with experts, in all
        or some layers
    types: qwen2_moe qwen3_moe | qwen2moe qwen3moe
    feed_forwards: mixture of experts, gated MLP
    fixed: mlp_bias=false
    defaults: max_position_embeddings=32768 bos_token_id=null eos_token_id=null
    defaults qwen2_moe: num_key_value_heads=16 num_experts=60 num_experts_per_tok=4
        moe_intermediate_size=1408 shared_expert_intermediate_size=5632
    defaults qwen3_moe: num_key_value_heads=4 num_experts=128 num_experts_per_tok=8
        moe_intermediate_size=768
    names: qwen
    """,
    prepare=_with_head_size,
)
def qwen_moe(m: Draft) -> None:
    """Qwen 1.5, 2 and 3 with experts; windows: all layers of Qwen 3, every other of Qwen 2."""
    if not m.hf:
        return
    two, layers = m.kind == "qwen2_moe", len(m.ffn)
    _qwen_attention(m, two=two)
    slides = [True] * layers
    if two:
        first = m.values.integer("max_window_layers", 28, least=0, most=LIMITS["layers"])
        slides = [number % 2 == 0 and number < first for number in range(layers)]
        m.set_attention(qkv_bias=m.values.flag("qkv_bias", True))
    m.set_windows(slides, listed=two, switched=True)
    # written by transformers 5 for Qwen 3
    count = "num_local_experts" if m.values.contains("num_local_experts") else "num_experts"
    _set_experts(m, shared=two, count=count)

# value heads, key heads, a key's size, tokens of the convolution
_SIZES_HF = (
    *("linear_num_value_heads", "linear_num_key_heads"),
    *("linear_key_head_dim", "linear_conv_kernel_dim"),
)
_TILED = ("qwen35", "qwen35moe")  # architectures with reordered value heads
_KV_HEADS, _RECURRENT = "attention.head_count_kv", "attention.recurrent_layers"


def _delta(m: Draft, keys: Sequence[str]) -> DeltaConfig:
    """Read DeltaNet's sizes; the caller replaces that of values."""
    heads, key_heads = (m.values.integer(key, most=LIMITS["heads"]) for key in keys[:2])
    require_divisible(f"`{keys[0]}`", heads, f"`{keys[1]}`", key_heads)
    size = m.values.integer(keys[2], most=LIMITS["head_dim"])
    length = m.values.integer(keys[3], least=2, most=64)
    return DeltaConfig(
        heads=heads, key_heads=key_heads, key_dim=size, value_dim=size, length=length, norm=m.norm
    )


def _next_metadata(values: ConfigReader) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    if not values.raw("feed_forward_length"):  # all layers have experts
        filled["feed_forward_length"] = values.raw("expert_feed_forward_length")
    listed, layers = values.raw(_RECURRENT), gguf_layers(values)
    if isinstance(listed, list) and len(listed) < layers:
        raise values.invalid(_RECURRENT, f"an entry for each of {layers} layers")
    return filled


# rows grouped by key head, values included
_BY_KEY_HEAD = """
    linattn.in+linattn.gate@head     linear_attn.in_proj_qkvz         ssm_in
    linattn.beta+linattn.decay@head  linear_attn.in_proj_ba           ssm_ba
"""
_APART = """
    linattn.in                       linear_attn.in_proj_qkv          attn_qkv
    linattn.gate                     linear_attn.in_proj_z            attn_gate
    linattn.beta                     linear_attn.in_proj_b            ssm_beta
    linattn.decay                    linear_attn.in_proj_a            ssm_alpha
    linattn.out                      linear_attn.out_proj             ssm_out
    =linattn.A_log                   linear_attn.A_log                ssm_a|log
    =linattn.dt_bias                 linear_attn.dt_bias              ssm_dt.bias
    =linattn.norm.w                  linear_attn.norm.weight          ssm_norm.weight
    =linattn.w                       linear_attn.conv1d.weight|shape  ssm_conv1d.weight|shape
    attn.q                           self_attn.q_proj                 attn_q
    attn.k                           self_attn.k_proj                 attn_k
    attn.v                           self_attn.v_proj                 attn_v
    attn.q+attn.k+attn.v             -                                attn_qkv
"""


def _next_names(config: ModelConfig) -> Names:
    """The usual rows first; early GGUF files of `qwen3next` have rows in transformers' order."""
    grouped = config.model_type in ("qwen3_next", "qwen3next")
    rows = (_BY_KEY_HEAD, _APART) if grouped else (_APART, _BY_KEY_HEAD)
    return POST_NORM_2.but("".join((*rows, "predicts: true")))


@family(
    """
    qwen_next: gated DeltaNet, attention with gated results in every fourth layer, norms of 1 + w;
        experts and a shared one (qwen3_next, qwen3_5_moe)
    types: qwen3_next qwen3_5_text qwen3_5_moe_text | qwen3next qwen35 qwen35moe
    hf_multimodal: qwen3_5 qwen3_5_moe
    mixers: gated DeltaNet, attention
    feed_forwards: gated MLP, mixture of experts
    options: rotated=0.25 lacking=true
    ropes: mrope=default
    fixed: mlp_bias=false
    fixed qwen3_5_text: num_experts=0
    fixed qwen3_5_moe_text: norm_topk_prob=true mlp_only_layers=null decoder_sparse_step=1
        intermediate_size=1
    defaults: max_position_embeddings=32768 num_key_value_heads=32 bos_token_id=null
        eos_token_id=null head_dim=256 linear_conv_kernel_dim=4 linear_key_head_dim=128
        linear_value_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32
        moe_intermediate_size=512 shared_expert_intermediate_size=512 norm_topk_prob=true
    defaults qwen3_next: num_key_value_heads=2 num_experts=512 num_experts_per_tok=10
        intermediate_size=5632
    defaults qwen3_5_text: num_key_value_heads=4
    defaults qwen3_5_moe_text: num_key_value_heads=2 num_experts=256 num_experts_per_tok=8
    """,
    names=_next_names,
    fill=_next_metadata,
)
def qwen_next(m: Draft) -> None:
    """Qwen3-Next and Qwen 3.5 (Alibaba 2025 and 2026): gated DeltaNet, some gated attention layers.

    Norms multiply by 1 + w, except the norm of DeltaNet's output. Qwen3-Next and the larger Qwen
    3.5 have mixtures of experts with a shared expert.
    """
    values, layers = m.values, len(m.ffn)
    period = values.integer("full_attention_interval", 4, most=LIMITS["layers"])
    attends = [(number + 1) % period == 0 for number in range(layers)]
    if m.hf:
        if values.text("hidden_act", "silu") not in ("silu", "swish"):  # also of convolutions
            raise UnsupportedModel(
                f"`{m.kind}` with another activation than `silu` is not supported"
            )
        if values.has("layer_types"):
            kinds = values.layer_types(layers, ("linear_attention", "full_attention"))
            attends = [one == "full_attention" for one in kinds]
        delta = _delta(m, _SIZES_HF)
        size = values.integer("linear_value_head_dim", most=LIMITS["head_dim"])
        if values.integer("num_experts", least=0, most=LIMITS["heads"]):
            _set_experts(m, shared=True)
    else:
        for key, recurs in ((_KV_HEADS, False), (_RECURRENT, True)):
            if isinstance(listed := values.raw(key), list):
                attends = [bool(one) != recurs for one in listed[:layers]]
        delta = _delta(m, GGUF_SIZES)
        inner = values.integer("ssm.inner_size", most=LIMITS["hidden"])
        size = require_divisible("`ssm.inner_size`", inner, f"`{GGUF_SIZES[0]}`", delta.heads)
        tiled = values.flag("ssm.v_head_reordered", m.kind in _TILED)  # written by Ollama
        # otherwise both orders are the same
        delta = replace(delta, tiled=tiled and 1 < delta.key_heads < delta.heads)
    delta = replace(delta, value_dim=size)
    m.norm = replace(m.norm, offset=1.0)
    m.set_attention(qk_norm=m.norm, gated=True)
    for number, attention in enumerate(attends):
        if not attention:
            m.layer(number, delta, m.ffn[number])
