"""Families with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from llmcli.config.attention import Chunk, QueryGrowth, YarnScaling
from llmcli.config.experts import ExpertsConfig, SharedConfig
from llmcli.config.mlp import GateClamp
from llmcli.config.norm import JoinedNorm
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.draft import Draft
from llmcli.families.read import hf_rotated, hf_window
from llmcli.families.record import family
from llmcli.families.values import LIMITS, ConfigReader, shortened


@family("""
    mixtral: as mistral, with a mixture of experts in every layer (in GGUF a llama)
    types: mixtral |
    feed_forwards: mixture of experts
    fixed: attention_bias=false mlp_bias=false
    defaults: max_position_embeddings=131072 num_key_value_heads=8 rms_norm_eps=1e-5 rope_theta=1e6
        sliding_window=null num_local_experts=8 num_experts_per_tok=2
    names: llama
        experts: block_sparse_moe w1 w3 w2
""")
def mixtral(m: Draft) -> None:
    """Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral with experts."""
    m.set_attention(window=hf_window(m.values))
    m.set_experts("num_local_experts", hidden="intermediate_size", renormalized=True)


@family("""
    olmoe: experts in every layer, queries and keys normalized over the width
    types: olmoe | olmoe
    feed_forwards: mixture of experts
    fixed: mlp_bias=false
    defaults: rms_norm_eps=1e-5 max_position_embeddings=4096 bos_token_id=null eos_token_id=50279
        num_experts=64 num_experts_per_tok=8
    names: qwen
""")
def olmoe(m: Draft) -> None:
    """OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): full-width q/k norms, clipping after them.

    llama.cpp does not clip here.
    """
    m.set_attention(qk_norm=JoinedNorm(**vars(m.norm)))
    if m.hf:
        m.set_attention(clip=m.values.optional_number("clip_qkv"))
        norm = m.values.flag("norm_topk_prob", False)
        m.set_experts("num_experts", hidden="intermediate_size", renormalized=norm)


_SLOPE, _LIMIT = 1.702, 7.0  # of gates; the slope is that of `quick_gelu`


@family("""
    gpt_oss: experts with biases and clamped gates in every layer, attention sinks, a window in
        every other layer
    types: gpt_oss | gpt-oss
    gguf_reads: windows
    feed_forwards: mixture of experts
    options: function=quick_gelu
    fixed: mlp_bias=false
    defaults: num_key_value_heads=8 head_dim=64 max_position_embeddings=131072 rms_norm_eps=1e-5
        rope_theta=150000.0 attention_bias=true sliding_window=128 bos_token_id=null
        eos_token_id=null num_local_experts=128 num_experts_per_tok=4
    rope: rope_type=yarn factor=32.0 beta_fast=32.0 beta_slow=1.0 truncate=false
        original_max_position_embeddings=4096
    names: post_norm_2
        =attn.sink  self_attn.sinks  attn_sinks.weight
        experts: -
        moe.router                mlp.router
        =moe.W_down               mlp.experts.down_proj|turned
        =moe.W_down               mlp.experts.down_proj_blocks
        =moe.b_down               mlp.experts.down_proj_bias
        =moe.W_gate+moe.W_up@row  mlp.experts.gate_up_proj|turned
        =moe.W_gate+moe.W_up@row  mlp.experts.gate_up_proj_blocks
        =moe.b_gate+moe.b_up@row  mlp.experts.gate_up_proj_bias
""")
def gpt_oss(m: Draft) -> None:
    """gpt-oss (OpenAI 2025, arXiv 2508.10925): attention sinks, experts with biases.

    Gates are clamped; every other layer, from the first on, has a sliding window. Experts are
    published in MXFP4, or in bfloat16 with `[in, out]` matrices; gate and up rows are interleaved
    in both.

    In GGUF no key holds the gate limit, or says that YaRN's ramp bounds are not rounded (8.09 and
    17.40 at the published sizes), so the published values are used. llama.cpp rounds them for every
    model, to 8 and 18 (`ggml_rope_yarn_corr_dims`), which rotates pairs 9 to 17 of 32 up to 1.8
    times as fast: at large positions its output differs from OpenAI's code, transformers and
    llmcli.
    """
    values, limit, rope = m.values, _LIMIT, m.attention[0].rope
    if m.hf:
        if (slope := values.number("swiglu_alpha", _SLOPE)) != _SLOPE:
            raise UnsupportedModel(
                f"`swiglu_alpha` = `{shortened(slope)}` is not supported: gates have {_SLOPE}"
            )
        m.set_ffn(activation="quick_gelu")
        scores = "softmax of the chosen"
        m.set_experts("num_local_experts", hidden="intermediate_size", scores=scores)
        limit = values.number("swiglu_limit", _LIMIT)
    elif not all(isinstance(one, ExpertsConfig) for one in m.ffn):
        raise UnsupportedModel("a gpt-oss model with layers without experts is not supported")
    elif rope is not None and isinstance(rope.scaling, YarnScaling):
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    m.set_attention(sinks=True, rope=rope)
    m.by_layer(window=m.windows(2))
    clamp = GateClamp(limit=limit, offset=1.0)
    m.ffn = [
        replace(one, bias=True, clamp=clamp, routing=replace(one.routing, bias=True))
        for one in m.ffn
    ]


@family("""
    llama4: one expert beside a shared one for each token, attention within chunks in three of four
        layers, no rotary positions in the others
    types: llama4_text | llama4
    hf_multimodal: llama4
    gguf_reads: windows
    feed_forwards: mixture of experts, gated MLP
    keys: intermediate_size=intermediate_size_mlp
    fixed: mlp_bias=false
    defaults: num_key_value_heads=8 head_dim=128 max_position_embeddings=131072 rms_norm_eps=1e-5
        rope_theta=500000.0 intermediate_size=8192 intermediate_size_mlp=16384 num_local_experts=16
        num_experts_per_tok=1
    names: llama
        mlp.gate  feed_forward.gate_proj  ffn_gate
        mlp.up    feed_forward.up_proj    ffn_up
        mlp.down  feed_forward.down_proj  ffn_down
        interleaved: always
        experts: -
        moe.router             feed_forward.router
        =moe.W_gate+moe.W_up   feed_forward.experts.gate_up_proj|turned
        =moe.W_down            feed_forward.experts.down_proj|turned
        moe.shared.gate        feed_forward.shared_expert.gate_proj
        moe.shared.up          feed_forward.shared_expert.up_proj
        moe.shared.down        feed_forward.shared_expert.down_proj
""")
def llama4(m: Draft) -> None:
    """Llama 4 (Meta 2025): experts beside a shared one; three of four layers see only their chunk.

    The router's sigmoid multiplies an expert's input. Layers without RoPE see every key, and their
    queries grow with the position (Nakanishi 2025, arXiv 2501.19399). In the others queries and
    keys are normalized without weights: after the rotation in the references, here before it,
    which is the same, since a rotation keeps lengths. GGUF files do not say the size of a chunk
    and the growth, which are the defaults of config.json in llama.cpp.
    """
    values, count = m.values, len(m.attention)
    if m.hf:
        step = values.integer("interleave_moe_layer_step", 1, most=LIMITS["layers"])
        mixed = [*range(step - 1, count, step)]
        if values.has("moe_layers"):
            mixed = values.raw("moe_layers")
        if not isinstance(mixed, list) or not all(one in range(count) for one in mixed):
            raise values.invalid("moe_layers", f"numbers of the {count} layers")
        # the width of an expert, which is not that of a dense feed-forward
        mixes = [number in mixed for number in range(count)]
        m.values = ConfigReader(values.all())
        m.set_experts(
            "num_local_experts", mixes=mixes, hidden="intermediate_size", scores="sigmoid"
        )
    else:
        if not values.integer("attention.sliding_window", 1, least=0, most=LIMITS["positions"]):
            raise UnsupportedModel("a Llama 4 without chunks is not supported in GGUF files")
        period = values.integer("attention.sliding_window_pattern", 4, most=LIMITS["layers"])
        kinds = ["chunked_attention"] * (period - 1) + ["full_attention"]
        normed = values.integer("expert_count", most=LIMITS["heads"]) != 128  # as in llama.cpp
        values = ConfigReader({"use_qk_norm": normed, "layer_types": (kinds * count)[:count]})
    for number, ffn in enumerate(m.ffn):
        if isinstance(ffn, ExpertsConfig):
            routing = replace(ffn.routing, weighs_input=True)
            shared = SharedConfig(hidden=ffn.hidden)
            m.ffn[number] = replace(ffn, shared=shared, routing=routing)
    rotated = hf_rotated(values, count, listed=False)
    size = hf_window(values, 8192, key="attention_chunk_size")
    chunked = [one and size is not None for one in rotated]
    if values.has("layer_types"):
        listed = values.layer_types(count, ("full_attention", "chunked_attention"))
        chunked = [kind == "chunked_attention" for kind in listed]
    if any(chunked) and size is None:
        raise CheckpointError("`layer_types` has chunks but `attention_chunk_size` is not in use")
    growth, norm = None, None
    if values.raw("attn_temperature_tuning") not in (False,):  # in the first files 4, not true
        original = values.integer("floor_scale", 8192, most=LIMITS["positions"])
        growth = QueryGrowth(beta=values.number("attn_scale", 0.1), first=1, original=original)
    if values.flag("use_qk_norm", True):
        norm = replace(m.norm, weights=False)
        rope = m.attention[0].rope
        if rope is not None and getattr(rope.scaling, "attention_factor", 1) != 1:
            raise UnsupportedModel("`use_qk_norm` after a rotation that scales is not supported")
    m.by_layer(
        window=[Chunk(size=size) if one and size is not None else None for one in chunked],
        growth=[None if one else growth for one in rotated],
        qk_norm=[norm if one else None for one in rotated],
    )
    m.rotate_only(rotated)
