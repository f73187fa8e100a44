"""Dense families that change a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.config.attention import QueryGrowth
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.norm import JoinedNorm
from llmcli.errors import UnsupportedModel
from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import AFTER, LLAMA, QWEN
from llmcli.families.read import (
    GGUF_CLIP,
    GGUF_PARALLEL,
    GGUF_SCALES,
    GGUF_WINDOWS,
    hf_rotated,
    hf_slides,
    hf_window,
)
from llmcli.families.rope import GGUF_YARN, of_layer_type, renamed_kinds, yarn_as_written
from llmcli.families.unsupported import needs
from llmcli.families.values import MOST, Values


def _llama(m: Draft) -> None:
    """Llama 2 and 3, SmolLM, Mistral: a Mistral has a window, by layer in a Ministral.

    A GGUF file of the architecture is a Mixtral if it has experts.
    """
    if m.hf and m.kind != "llama":
        m.set_windows([True] * len(m.ffn), listed=m.kind == "ministral")
    elif isinstance(m.ffn[-1], ExpertsConfig):
        m.others["family"] = "mixtral"


def _mistral_biases(settings: dict[str, Any]) -> Mapping[str, Any]:
    return settings if settings["model_type"] == "llama" else {**settings, **NO_BIASES}


NO_BIASES = {"attention_bias": False, "mlp_bias": False}
MISTRAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
LLAMAS = llama_like(
    _llama,
    name="llama",
    words="RMSNorm, rotary positions (linear, dynamic, llama3, yarn, longrope), grouped queries, "
    "gated SiLU MLP; biases, window and tied head as configured",
    hf=("llama", "mistral", "ministral"), hf_multimodal=("mistral3",), gguf=("llama",),
    ran=("smollm2",), prepare=_mistral_biases, by_type={"mistral": MISTRAL, "ministral": MISTRAL},
)  # fmt: skip


def _longrope(settings: dict[str, Any]) -> Mapping[str, Any]:
    """Early files call longrope `su` or `yarn`."""
    return renamed_kinds(settings, {"su": "longrope", "yarn": "longrope"})


def _phi3(m: Draft) -> None:
    """Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219, 2412.08905): Llama with fused tensors."""
    if m.hf:
        window = hf_window(m.values)
    else:  # 0 is none
        key = "attention.sliding_window"
        window = m.values.integer(key, 0, least=0, most=MOST["positions"]) or None
    m.set_attention(window=window)


PHI3 = llama_like(
    _phi3,
    name="phi3", words="as llama with fused projections, partial rotary positions, a window",
    hf=("phi3",), gguf=("phi3",), gguf_reads=GGUF_WINDOWS,
    prepare=_longrope, rotated=1.0, fixed=NO_BIASES,
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1,
        "original_max_position_embeddings": 4096, "eos_token_id": 32000,
    },
    names=QWEN.but("""
        attn.q+attn.k+attn.v  self_attn.qkv_proj  attn_qkv
        mlp.gate+mlp.up       mlp.gate_up_proj    ffn_up
    """, without="mlp.gate mlp.up"),
)  # fmt: skip


def _glm(m: Draft) -> None:
    """GLM-4 (Zhipu 2024, arXiv 2406.12793): RoPE on half of each head, adjacent dimensions paired.

    `glm4` (GLM-4-0414) adds post-norms.
    """
    m.post = m.kind == "glm4"
    m.set_attention(out_bias=False)


GLM = llama_like(
    _glm,
    name="glm",
    words="half of each head rotated, biases of q, k, v; norms after the parts, too (glm4)",
    hf=("glm", "glm4"), gguf=("chatglm", "glm4"), rotated=0.5, fixed={"mlp_bias": False},
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 0.00000015625, "attention_bias": True, "bos_token_id": None,
        "eos_token_id": [151_329, 151_336, 151_338],
    },
    names=LLAMA.but("""
        ln1_post         post_self_attn_layernorm  post_attention_norm
        ln2_post         post_mlp_layernorm        post_ffw_norm
        mlp.gate+mlp.up  mlp.gate_up_proj          ffn_up
    """, without="mlp.gate mlp.up", interleaved="always"),
)  # fmt: skip

# in the order of `GGUF_SCALES`; logits are divided by the last
_GRANITE = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")


def granite(m: Draft) -> None:
    """Granite (IBM 2024, arXiv 2405.04324): Llama with multipliers.

    In GGUF `rope.scaling.finetuned` says whether queries and keys use RoPE.
    """
    defaults = (m.attention[0].scores.scale, 1.0, 1.0, 1.0)
    scale, m.multiplier, embedding, logits = (
        m.multiplier_of(hf, gguf, gguf_default=default)
        for hf, gguf, default in zip(_GRANITE, GGUF_SCALES, defaults, strict=True)
    )
    m.set_attention(scale=scale)
    if not m.hf and not m.values.flag("rope.scaling.finetuned", True):
        m.set_attention(rope=None)
    m.others["embedding"] = EmbeddingConfig(scale=embedding)
    m.others["head"] = HeadConfig(tied=m.model.head.tied, scale=1 / logits)


GRANITE = llama_like(
    granite,
    name="granite",
    words="as llama with multipliers of embeddings, scores, residual parts and logits",
    hf=("granite",), gguf=("granite",), gguf_reads=GGUF_SCALES,
    defaults={"bos_token_id": 1, "eos_token_id": 2},
)  # fmt: skip


def _smollm3(m: Draft) -> None:
    """SmolLM3 (Hugging Face 2025): Llama without RoPE in every fourth layer.

    GGUF files do not record which layers lack RoPE, and llama.cpp has no windows here.
    """
    values, count = m.values, len(m.attention)
    rotated = hf_rotated(values if m.hf else Values({}), count)
    window = hf_window(values) if m.hf and values.flag("use_sliding_window", False) else None
    slides = [not one for one in rotated]
    if m.hf and values.has("layer_types"):
        slides = hf_slides(values, count)
    m.by_layer(window=[window if one else None for one in slides])
    m.rotate_only(rotated)


SMOLLM3 = llama_like(
    _smollm3,
    name="smollm3", words="as llama, some layers without rotary positions",
    hf=("smollm3",), gguf=("smollm3",),
    defaults={
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
        "bos_token_id": 128_000, "eos_token_id": 128_001, "tie_word_embeddings": True,
    },
)  # fmt: skip


_OLMO_THETA = 500_000.0


def _olmo2(m: Draft) -> None:
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


def _full_attention(settings: dict[str, Any]) -> Mapping[str, Any]:
    if settings["model_type"] == "olmo2":
        return settings
    return of_layer_type(settings, "full_attention", theta=_OLMO_THETA)


OLMO2 = llama_like(
    _olmo2,
    name="olmo",
    words="norms after the parts, queries and keys normalized over the width (olmo2); windows "
    "in three of four layers (olmo3)",
    hf=("olmo2", "olmo3"), gguf=("olmo2",), gguf_reads=GGUF_WINDOWS,
    prepare=_full_attention, fixed={"mlp_bias": False},
    defaults={"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279},
    names=QWEN.but(AFTER, without="ln1 ln2"),
)  # fmt: skip


def _exaone4(m: Draft) -> None:
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


EXAONE4 = llama_like(
    _exaone4,
    name="exaone4",
    words="norms after the parts, normalized queries and keys; windows in three of four "
    "layers, which alone have rotary positions",
    hf=("exaone4",), gguf=("exaone4",), gguf_reads=GGUF_WINDOWS,
    fixed=NO_BIASES,
    defaults={
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2,
        "sliding_window": 4096,
    },
    names=QWEN.but(AFTER, without="ln1 ln2"),
)  # fmt: skip


def _cohere2(m: Draft) -> None:
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


COHERE2 = llama_like(
    _cohere2,
    name="cohere2",
    words="attention and feed-forward side by side, scaled logits; windows in three of four "
    "layers, which alone have rotary positions",
    hf=("cohere2",), gguf=("cohere2",), gguf_reads=(*GGUF_WINDOWS, "logit_scale"),
    eps="layer_norm_eps", fixed={"mlp_bias": False},
    defaults={
        "max_position_embeddings": 8192, "bos_token_id": 5, "eos_token_id": 255_001,
        "tie_word_embeddings": True,
    },
    names=LLAMA.but(without="ln2", interleaved="always"),
)  # fmt: skip


def _starcoder2(m: Draft) -> None:
    """StarCoder 2 (BigCode 2024, arXiv 2402.19173): LayerNorm, biases, no gate."""
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    if m.hf:  # llama.cpp has no window here
        biased = m.values.flag("use_bias", True)
        m.set_attention(qkv_bias=biased, out_bias=biased, window=hf_window(m.values))
        m.set_ffn(bias=biased)


STARCODER2 = llama_like(
    _starcoder2,
    name="starcoder2",
    words="LayerNorm and biases, rotary positions, grouped queries, a feed-forward without "
    "a gate",
    hf=("starcoder2",), gguf=("starcoder2",), feed_forwards=("MLP",), function="gelu_tanh",
    eps="norm_epsilon", fixed={"attention_bias": None, "mlp_bias": None},
    defaults={
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 50_256,
        "eos_token_id": 50_256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
    },
    names=QWEN.but("""
        mlp.up    mlp.c_fc    ffn_up
        mlp.down  mlp.c_proj  ffn_down
    """, without="mlp.gate"),
)  # fmt: skip


def _neox_rope(settings: dict[str, Any]) -> Mapping[str, Any]:
    """Early files have other names for the RoPE settings."""
    found: dict[str, Any] = {}
    for old, new in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        if Values(settings).has(old):
            found[new] = Values(settings).number(old)
    return found | settings


def _neox(m: Draft) -> None:
    """GPT-NeoX and Pythia (EleutherAI 2022 and 2023, arXiv 2204.06745, 2304.01373).

    Parallel attention and feed-forward, each with a LayerNorm; RoPE on a quarter of each head; q, k
    and v of a head are stored together.
    """
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    if not m.hf:
        m.set_attention(qkv_bias="blk.0.attn_qkv.bias" in m.tensors)
    m.parallel = 2 if m.values.flag(GGUF_PARALLEL, True) else 0


GPT_NEOX = llama_like(
    _neox,
    name="gpt_neox",
    words="attention and feed-forward side by side, LayerNorm and biases, a part of each head "
    "rotated",
    hf=("gpt_neox",), gguf=("gptneox",), gguf_reads=(GGUF_PARALLEL,), feed_forwards=("MLP",),
    eps="layer_norm_eps", rotated=0.25, function="gelu", prepare=_neox_rope,
    fixed={"mlp_bias": True, "head_dim": None, "num_key_value_heads": None},
    defaults={
        "max_position_embeddings": 2048, "hidden_act": "gelu", "bos_token_id": 0,
        "eos_token_id": 2, "attention_bias": True,
    },
    names=QWEN.but("""
        embed                      embed_in                   token_embd
        ln_final                   final_layer_norm           output_norm
        head                       embed_out                  output
        head                       lm_head                    -
        attn.q+attn.k+attn.v@head  attention.query_key_value  -
        attn.q+attn.k+attn.v       -                          attn_qkv
        attn.o                     attention.dense            attn_output
        mlp.up                     mlp.dense_h_to_4h          ffn_up
        mlp.down                   mlp.dense_4h_to_h          ffn_down
    """, without="attn.q attn.k attn.v mlp.gate", prefixes=("gpt_neox.", ""), buffers=tuple(
        (f"attention.{one}", "masks and frequencies are computed")
        for one in ("bias", "masked_bias", "rotary_emb.inv_freq")
    )),
)  # fmt: skip

_YARN = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _ministral3_rope(settings: dict[str, Any]) -> Mapping[str, Any]:
    rope = settings["rope_parameters"]
    return {**settings, "rope_parameters": _YARN if rope is None else rope}


def _ministral3(m: Draft) -> None:
    """Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position."""
    if m.hf:
        rope = Values(_ministral3_rope(m.values.all())).section("rope_parameters") or Values({})
        growth = QueryGrowth(
            beta=rope.number("llama_4_scaling_beta", above=False),
            original=rope.integer("original_max_position_embeddings", most=MOST["positions"]),
        )
        m.set_attention(window=hf_window(m.values), growth=growth)
        return
    rotation = m.attention[0].rope
    assert rotation is not None
    m.set_attention(rope=yarn_as_written(rotation, m.values))  # llama.cpp has no window here
    if beta := m.values.number("attention.temperature_scale", 0.0, above=False):
        key = "rope.scaling.original_context_length"
        original = m.values.integer(key, m.model.context, most=MOST["positions"])
        m.set_attention(growth=QueryGrowth(beta=beta, original=original))


MINISTRAL3 = llama_like(
    _ministral3,
    name="ministral3", words="as mistral with queries that grow with their position",
    hf=("ministral3",), hf_multimodal=("mistral3",), gguf=("mistral3",), gguf_reads=GGUF_YARN,
    prepare=_ministral3_rope, fixed=NO_BIASES,
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": _YARN,
    },
)  # fmt: skip


EXAONE = llama_like(
    name="exaone", words="as llama, under names of its own",
    hf=("exaone",), gguf=("exaone",),
    keys={
        "num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    defaults={
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "bos_token_id": 1, "eos_token_id": 361,
    },
    names=QWEN.but("""
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
    """, prefixes=("transformer.",), layer="h.{layer}", buffers=(), also=QWEN),
)  # fmt: skip


def _stablelm(m: Draft) -> None:
    """StableLM 2 (Stability AI 2024, arXiv 2402.17834): LayerNorm, RoPE on a quarter of each head.

    The 12b has parallel attention and feed-forward, which read one norm.
    """
    m.layer_norms(bias=True)
    m.set_attention(out_bias=False)
    if m.hf:
        by_head = m.values.flag("qk_layernorm", False)
        m.parallel = int(m.values.flag("use_parallel_residual", False))
    else:  # llama.cpp does not read the flag
        by_head = "blk.0.attn_q_norm.weight" in m.tensors
        m.parallel = int("blk.0.ffn_norm.weight" not in m.tensors)
    if by_head:
        parts = needs(["a norm for each head"])
        raise UnsupportedModel(f"`qk_layernorm` of `stablelm` is not supported{parts}")


STABLELM = llama_like(
    _stablelm,
    name="stablelm",
    words="LayerNorm, a part of each head rotated; attention and feed-forward side by side "
    "where configured",
    hf=("stablelm",), gguf=("stablelm",), gguf_reads=(GGUF_PARALLEL,),
    eps="layer_norm_eps", rotated=0.25, fixed={"mlp_bias": False, "head_dim": None},
    keys={"attention_bias": "use_qkv_bias"},
    defaults={
        "num_key_value_heads": 32, "max_position_embeddings": 4096, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    names=QWEN,
)  # fmt: skip


def _olmo(m: Draft) -> None:
    """OLMo (AI2 2024, arXiv 2402.00838): LayerNorm without weights, clipped q, k and v."""
    m.layer_norms(bias=False, weights=False)
    clip = m.values.optional_number("clip_qkv" if m.hf else GGUF_CLIP, above=m.hf)
    m.set_attention(clip=clip or None)  # llama.cpp: 0 is none


OLMO = llama_like(
    _olmo,
    name="olmo1", words="norms without weights; queries, keys and values clipped as configured",
    hf=("olmo",), gguf=("olmo",), gguf_reads=(GGUF_CLIP,),
    fixed={"mlp_bias": False, "head_dim": None, "rms_norm_eps": 1e-5},
    defaults={"bos_token_id": None, "eos_token_id": 50_279},
)  # fmt: skip


def _internlm3(m: Draft) -> None:
    """InternLM3 (Shanghai AI Lab 2025): `qkv_bias` is of q, k and v, `bias` of all other matrices.

    transformers' configuration calls them `attention_bias` and `mlp_bias`.
    """
    m.set_attention(out_bias=m.ffn[0].bias)


INTERNLM3 = llama_like(
    _internlm3,
    name="internlm3",
    words="as llama, one setting for the biases of q, k, v and one for all others (in GGUF a "
    "llama)",
    hf=("internlm3",), gguf=(), keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
FAMILIES = (
    LLAMAS, PHI3, GLM, GRANITE, SMOLLM3, OLMO2, EXAONE4, COHERE2, STARCODER2, GPT_NEOX, MINISTRAL3,
    EXAONE, STABLELM, OLMO, INTERNLM3,
)  # fmt: skip
