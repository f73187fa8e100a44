"""Dense families that change a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.config.attention import QueryGrowth
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.norm import HeadNorm, JoinedNorm
from llmcli.families.draft import Draft
from llmcli.families.read import GGUF_READS, hf_rotated, hf_slides, hf_window
from llmcli.families.record import family
from llmcli.families.rope import of_layer_type, yarn_as_written
from llmcli.families.values import LIMITS, ConfigReader


@family("""
    llama: RMSNorm, rotary positions (linear, dynamic, llama3, yarn, longrope), grouped queries,
        gated SiLU MLP; biases, window and tied head as configured
    types: llama mistral ministral | llama
    hf_multimodal: mistral3
    ran: smollm2
    fixed mistral ministral: attention_bias=false mlp_bias=false
    defaults mistral ministral: max_position_embeddings=131072 num_key_value_heads=8
""")
def llamas(m: Draft) -> None:
    """Llama 2 and 3, SmolLM, Mistral: a Mistral has a window, by layer in a Ministral.

    A GGUF file of the architecture is a Mixtral if it has experts.
    """
    if m.hf and m.kind != "llama":
        m.set_windows([True] * len(m.ffn), listed=m.kind == "ministral")
    elif isinstance(m.ffn[-1], ExpertsConfig):
        m.others["family"] = "mixtral"


@family("""
    phi3: as llama with fused projections, partial rotary positions, a window
    types: phi3 | phi3
    gguf_reads: windows
    options: rotated=1.0
    ropes: su=longrope yarn=longrope
    fixed: attention_bias=false mlp_bias=false
    defaults: rms_norm_eps=1e-5 max_position_embeddings=4096 bos_token_id=1
        original_max_position_embeddings=4096 eos_token_id=32000
    names: qwen
        attn.q+attn.k+attn.v  self_attn.qkv_proj  attn_qkv
        mlp.gate+mlp.up       mlp.gate_up_proj    ffn_up
        without: mlp.gate mlp.up
""")
def phi3(m: Draft) -> None:
    """Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219, 2412.08905): Llama with fused tensors."""
    if m.hf:
        window = hf_window(m.values)
    else:  # 0 is none
        key = "attention.sliding_window"
        window = m.values.integer(key, 0, least=0, most=LIMITS["positions"]) or None
    m.set_attention(window=window)


@family("""
    glm: half of each head rotated, biases of q, k, v; norms after the parts, too (glm4)
    types: glm glm4 | chatglm glm4
    options: rotated=0.5
    fixed: mlp_bias=false
    defaults: num_key_value_heads=2 head_dim=128 max_position_embeddings=131072
        rms_norm_eps=1.5625e-07 attention_bias=true bos_token_id=null
        eos_token_id=[151329,151336,151338]
    names: llama
        ln1_post         post_self_attn_layernorm  post_attention_norm
        ln2_post         post_mlp_layernorm        post_ffw_norm
        mlp.gate+mlp.up  mlp.gate_up_proj          ffn_up
        without: mlp.gate mlp.up
        interleaved: always
""")
def glm(m: Draft) -> None:
    """GLM-4 (Zhipu 2024, arXiv 2406.12793): RoPE on half of each head, adjacent dimensions paired.

    `glm4` (GLM-4-0414) adds post-norms.
    """
    m.post = m.kind == "glm4"
    m.set_attention(out_bias=False)


# in the order of GGUF's; logits are divided by the last
_GRANITE = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")


@family("""
    granite: as llama with multipliers of embeddings, scores, residual parts and logits
    types: granite | granite
    gguf_reads: scales
    defaults: bos_token_id=1 eos_token_id=2
""")
def granite(m: Draft) -> None:
    """Granite (IBM 2024, arXiv 2405.04324): Llama with multipliers.

    In GGUF `rope.scaling.finetuned` says whether queries and keys use RoPE.
    """
    defaults = (m.attention[0].scores.scale, 1.0, 1.0, 1.0)
    scale, m.multiplier, embedding, logits = (
        m.multiplier_of(hf, gguf, gguf_default=default)
        for hf, gguf, default in zip(_GRANITE, GGUF_READS["scales"], defaults, strict=True)
    )
    m.set_attention(scale=scale)
    if not m.hf and not m.values.flag("rope.scaling.finetuned", True):
        m.set_attention(rope=None)
    m.others["embedding"] = EmbeddingConfig(scale=embedding)
    m.others["head"] = HeadConfig(tied=m.model.head.tied, scale=1 / logits)


@family("""
    smollm3: as llama, some layers without rotary positions
    types: smollm3 | smollm3
    defaults: num_key_value_heads=4 max_position_embeddings=32768 rope_theta=2e6 bos_token_id=128000
        eos_token_id=128001 tie_word_embeddings=true
""")
def smollm3(m: Draft) -> None:
    """SmolLM3 (Hugging Face 2025): Llama without RoPE in every fourth layer.

    GGUF files do not record which layers lack RoPE, and llama.cpp has no windows here.
    """
    values, count = m.values, len(m.attention)
    rotated = hf_rotated(values if m.hf else ConfigReader({}), count)
    window = hf_window(values) if m.hf and values.flag("use_sliding_window", False) else None
    slides = [not one for one in rotated]
    if m.hf and values.has("layer_types"):
        slides = hf_slides(values, count)
    m.by_layer(window=[window if one else None for one in slides])
    m.rotate_only(rotated)


_OLMO_THETA = 500_000.0


def _full_attention(settings: dict[str, Any]) -> Mapping[str, Any]:
    if settings["model_type"] == "olmo2":
        return settings
    return of_layer_type(settings, "full_attention", theta=_OLMO_THETA)


@family(
    """
    olmo: norms after the parts, queries and keys normalized over the width (olmo2); windows in
        three of four layers (olmo3)
    types: olmo2 olmo3 | olmo2
    gguf_reads: windows
    fixed: mlp_bias=false
    defaults: rms_norm_eps=1e-5 bos_token_id=null eos_token_id=50279
    names: qwen
        ln1_post     post_attention_layernorm    post_attention_norm
        ln2_post     post_feedforward_layernorm  post_ffw_norm
        without: ln1 ln2
    """,
    prepare=_full_attention,
)
def olmo2(m: Draft) -> None:
    """OLMo 2 and 3 (OLMo et al. 2024, arXiv 2501.00656; 2025, arXiv 2512.13961).

    Each part has a post-norm and no pre-norm; queries and keys are normalized over their full
    width. In OLMo 3 three of four layers have a sliding window and unscaled RoPE.
    """
    m.pre, m.post = False, True
    m.set_attention(qk_norm=JoinedNorm(**vars(m.norm)))
    if m.kind == "olmo2" and m.hf:
        return
    rope = m.attention[0].rope
    assert rope is not None
    local = m.hf_rope_of_windows(_OLMO_THETA) if m.hf else replace(rope, scaling=None)
    windows = m.windows(4, hf_default=4096)
    m.by_layer(window=windows, rope=[rope if one is None else local for one in windows])


@family("""
    exaone4: norms after the parts, normalized queries and keys; windows in three of four layers,
        which alone have rotary positions
    types: exaone4 | exaone4
    gguf_reads: windows
    fixed: attention_bias=false mlp_bias=false
    defaults: num_key_value_heads=32 rms_norm_eps=1e-5 bos_token_id=0 eos_token_id=2
        sliding_window=4096
    names: qwen
        ln1_post     post_attention_layernorm    post_attention_norm
        ln2_post     post_feedforward_layernorm  post_ffw_norm
        without: ln1 ln2
""")
def exaone4(m: Draft) -> None:
    """EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): post-norms and per-head q/k norms.

    In models with sliding windows, only the windowed layers use RoPE.
    """
    m.pre, m.post = False, True
    m.set_attention(qk_norm=m.norm)
    if m.hf and not m.values.has("sliding_window"):
        return
    windows = m.windows(4)
    if m.hf or any(windows):
        m.by_layer(window=windows)
        m.rotate_only(windows)


@family("""
    cohere2: attention and feed-forward side by side, scaled logits; windows in three of four
        layers, which alone have rotary positions
    types: cohere2 | cohere2
    keys: rms_norm_eps=layer_norm_eps
    gguf_reads: windows logit_scale
    fixed: mlp_bias=false
    defaults: layer_norm_eps=1e-5 max_position_embeddings=8192 bos_token_id=5 eos_token_id=255001
        tie_word_embeddings=true
    names: llama
        without: ln2
        interleaved: always
""")
def cohere2(m: Draft) -> None:
    """Command R7B and A (Cohere 2025, arXiv 2504.00698): parallel attention and feed-forward.

    Both read one LayerNorm without bias. Three of four layers use a sliding window; only these have
    RoPE, with adjacent dimensions paired.
    """
    windows = m.windows(4, hf_default=4096)
    m.layer_norms(bias=False)
    m.parallel = 1
    m.by_layer(window=windows)
    m.rotate_only(windows)
    scale = m.multiplier_of("logit_scale", "logit_scale", hf_default=0.0625)
    m.others["head"] = HeadConfig(tied=m.model.head.tied, scale=scale)


@family("""
    starcoder2: LayerNorm and biases, rotary positions, grouped queries, a feed-forward without a
        gate
    types: starcoder2 | starcoder2
    keys: rms_norm_eps=norm_epsilon
    feed_forwards: MLP
    options: function=gelu_tanh
    fixed: attention_bias=null mlp_bias=null
    defaults: norm_epsilon=1e-5 num_key_value_heads=2 max_position_embeddings=4096
        bos_token_id=50256 eos_token_id=50256 tie_word_embeddings=true
    names: qwen
        mlp.up    mlp.c_fc    ffn_up
        mlp.down  mlp.c_proj  ffn_down
        without: mlp.gate
""")
def starcoder2(m: Draft) -> None:
    """StarCoder 2 (BigCode 2024, arXiv 2402.19173): LayerNorm, biases, no gate."""
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    if m.hf:  # llama.cpp has no window here
        biased = m.values.flag("use_bias", True)
        m.set_attention(qkv_bias=biased, out_bias=biased, window=hf_window(m.values))
        m.set_ffn(bias=biased)


@family("""
    gpt_neox: attention and feed-forward side by side, LayerNorm and biases, a part of each head
        rotated
    types: gpt_neox | gptneox
    keys: rms_norm_eps=layer_norm_eps rope_theta=rotary_emb_base partial_rotary_factor=rotary_pct
    gguf_reads: parallel
    feed_forwards: MLP
    options: rotated=0.25 function=gelu
    fixed: mlp_bias=true head_dim=null num_key_value_heads=null
    defaults: layer_norm_eps=1e-5 max_position_embeddings=2048 bos_token_id=0 eos_token_id=2
        attention_bias=true
    names: qwen
        embed                      embed_in                   token_embd
        ln_final                   final_layer_norm           output_norm
        head                       embed_out                  output
        head                       lm_head                    -
        attn.q+attn.k+attn.v@head  attention.query_key_value  -
        attn.q+attn.k+attn.v       -                          attn_qkv
        attn.o                     attention.dense            attn_output
        mlp.up                     mlp.dense_h_to_4h          ffn_up
        mlp.down                   mlp.dense_4h_to_h          ffn_down
        without: attn.q attn.k attn.v mlp.gate
        prefixes: gpt_neox. -
        buffers: attention.bias attention.masked_bias: masks and frequencies are computed
        buffers: attention.rotary_emb.inv_freq: masks and frequencies are computed
""")
def gpt_neox(m: Draft) -> None:
    """GPT-NeoX and Pythia (EleutherAI 2022 and 2023, arXiv 2204.06745, 2304.01373).

    Parallel attention and feed-forward, each with a LayerNorm; RoPE on a quarter of each head; q, k
    and v of a head are stored together.
    """
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    if not m.hf:
        m.set_attention(qkv_bias="blk.0.attn_qkv.bias" in m.tensors)
    m.parallel = 2 if m.values.flag("use_parallel_residual", True) else 0


@family("""
    ministral3: as mistral with queries that grow with their position
    types: ministral3 | mistral3
    hf_multimodal: mistral3
    gguf_reads: yarn
    fixed: attention_bias=false mlp_bias=false
    defaults: num_key_value_heads=8 head_dim=128 max_position_embeddings=262144 rms_norm_eps=1e-5
        bos_token_id=1 eos_token_id=2
    rope: type=yarn rope_theta=1e6 factor=16.0 original_max_position_embeddings=16384 mscale=1.0
        mscale_all_dim=1.0 llama_4_scaling_beta=0.1
""")
def ministral3(m: Draft) -> None:
    """Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position."""
    if m.hf:
        rope = m.values.section("rope_parameters") or ConfigReader({})
        growth = QueryGrowth(
            beta=rope.number("llama_4_scaling_beta", above=False),
            original=rope.integer("original_max_position_embeddings", most=LIMITS["positions"]),
        )
        m.set_attention(window=hf_window(m.values), growth=growth)
        return
    rotation = m.attention[0].rope
    assert rotation is not None
    m.set_attention(rope=yarn_as_written(rotation, m.values))  # llama.cpp has no window here
    if beta := m.values.number("attention.temperature_scale", 0.0, above=False):
        key = "rope.scaling.original_context_length"
        original = m.values.integer(key, m.model.context, most=LIMITS["positions"])
        m.set_attention(growth=QueryGrowth(beta=beta, original=original))


@family("""
    exaone: as llama, under names of its own
    types: exaone | exaone
    keys: num_hidden_layers=num_layers rms_norm_eps=layer_norm_epsilon
        hidden_act=activation_function
    defaults: num_key_value_heads=8 max_position_embeddings=4096 rms_norm_eps=1e-5
        rope_theta=500000.0 bos_token_id=1 eos_token_id=361
    names: qwen
        embed     wte                      token_embd
        ln_final  ln_f                     output_norm
        head      -                        output
        ln1       ln_1                     attn_norm
        ln2       ln_2                     ffn_norm
        attn.q    attn.attention.q_proj    attn_q
        attn.k    attn.attention.k_proj    attn_k
        attn.v    attn.attention.v_proj    attn_v
        attn.o    attn.attention.out_proj  attn_output
        mlp.gate  mlp.c_fc_0               ffn_gate
        mlp.up    mlp.c_fc_1               ffn_up
        mlp.down  mlp.c_proj               ffn_down
        prefixes: transformer.
        layer: h.{layer}
        buffers: -
        also: qwen
""")
def exaone(m: Draft) -> None:
    """EXAONE 3 (LG AI Research 2024, arXiv 2408.03541): a Llama."""


@family("""
    stablelm: LayerNorm, a part of each head rotated; attention and feed-forward side by side
        where configured
    types: stablelm | stablelm
    gguf_reads: parallel
    options: rotated=0.25
    keys: rms_norm_eps=layer_norm_eps attention_bias=use_qkv_bias
    fixed: mlp_bias=false head_dim=null
    defaults: layer_norm_eps=1e-5 num_key_value_heads=32 max_position_embeddings=4096 bos_token_id=0
        eos_token_id=0
    names: qwen
        attn.q_norm  self_attn.q_layernorm.norms.{head}  attn_q_norm
        attn.k_norm  self_attn.k_layernorm.norms.{head}  attn_k_norm
""")
def stablelm(m: Draft) -> None:
    """StableLM 2 (Stability AI 2024, arXiv 2402.17834): LayerNorm, RoPE on a quarter of each head.

    The 12b has parallel attention and feed-forward, which read one norm, and normalizes each head's
    queries and keys with weights of its own.
    """
    m.layer_norms(bias=True)
    if m.hf:
        by_head = m.values.flag("qk_layernorm", False)
        m.parallel = int(m.values.flag("use_parallel_residual", False))
    else:  # llama.cpp does not read the flag
        by_head = "blk.0.attn_q_norm.weight" in m.tensors
        m.parallel = int("blk.0.ffn_norm.weight" not in m.tensors)
    norm = HeadNorm(kind="layer", eps=m.norm.eps) if by_head else None
    m.set_attention(out_bias=False, qk_norm=norm)


@family("""
    olmo1: norms without weights; queries, keys and values clipped as configured
    types: olmo | olmo
    gguf_reads: clip
    fixed: mlp_bias=false head_dim=null rms_norm_eps=1e-5
    defaults: bos_token_id=null eos_token_id=50279
""")
def olmo(m: Draft) -> None:
    """OLMo (AI2 2024, arXiv 2402.00838): LayerNorm without weights, clipped q, k and v."""
    m.layer_norms(bias=False, weights=False)
    clip = m.values.optional_number("clip_qkv" if m.hf else "attention.clamp_kqv", above=m.hf)
    m.set_attention(clip=clip or None)  # llama.cpp: 0 is none


@family("""
    internlm3: as llama, one setting for the biases of q, k, v and one for all others (in GGUF a
        llama)
    types: internlm3 |
    keys: attention_bias=qkv_bias mlp_bias=bias
    defaults: num_key_value_heads=2 head_dim=128 max_position_embeddings=32768 rms_norm_eps=1e-5
""")
def internlm3(m: Draft) -> None:
    """InternLM3 (Shanghai AI Lab 2025): `qkv_bias` is of q, k and v, `bias` of all other matrices.

    transformers' configuration calls them `attention_bias` and `mlp_bias`.
    """
    m.set_attention(out_bias=m.ffn[0].bias)
