"""Families with other mixers than attention in some or all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcli.config.conv import ShortConvConfig
from llmcli.config.experts import ExpertsConfig, SharedConfig
from llmcli.config.norm import NormConfig
from llmcli.config.ssm import SsmConfig
from llmcli.errors import UnsupportedModel
from llmcli.families import mixture
from llmcli.families.dense import granite
from llmcli.families.draft import Draft
from llmcli.families.read import GGUF_SIZES, gguf_layers, gguf_numbers
from llmcli.families.record import family
from llmcli.families.values import LIMITS, ConfigReader, require_divisible, shortened


def _having(m: Draft, key: str) -> list[bool]:
    """Whether each layer of a GGUF file has the parts whose numbers are listed there."""
    numbers = gguf_numbers(m.values, key)
    if numbers is None:
        raise m.values.invalid(key, f"numbers for {gguf_layers(m.values)} layers")
    return [number > 0 for number in numbers]


def _mamba_hf(
    values: ConfigReader,
    keys: str,
    eps: float,
    inner: int | None = None,
    bounds: tuple[float, float] | None = None,
) -> SsmConfig:
    """Read a Mamba-2 mixer of config.json; all settings but the flags are required.

    `keys`: those of heads, groups, state, length of the convolution, head size, the biases of
    projections and of the convolution, and the activation. `inner`: total width of all heads if
    known otherwise; the head size is then optional. `bounds`: of dt, by default those of
    `time_step_limit`, else none. Raises CheckpointError and UnsupportedModel.
    """
    *sizes, head_size, bias, conv_bias, function = keys.split()
    if (name := values.text(function, "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(
            f"`{function}` = `{shortened(name)}` is not supported: Mamba-2 has `silu`"
        )
    ssm, usual, limit = _mamba_sizes(values, sizes, eps), None, "time_step_limit"
    if inner is not None:
        usual = require_divisible("the inner size", inner, f"`{sizes[0]}`", ssm.heads)
    head_dim = values.integer(head_size, usual, most=LIMITS["head_dim"])
    if usual not in (None, head_dim):
        raise values.invalid(head_size, f"{usual}, as {inner} numbers are in {ssm.heads} heads")
    least, most = bounds or (0.0, math.inf)
    if bounds is None and values.has(limit):
        least, most = values.numbers(limit, 2, above=False, infinite=True)
    if least > most:
        raise values.invalid(limit, "two numbers, the lower one first")
    biases = values.flag(bias, False), values.flag(conv_bias, True)
    ssm = replace(ssm, head_dim=head_dim, bias=biases[0], conv_bias=biases[1])
    return replace(ssm, least=least, most=most)


def _mamba_sizes(values: ConfigReader, keys: Sequence[str], eps: float) -> SsmConfig:
    """The mixer by heads, groups, state and length of the convolution, with heads of no size."""
    heads = values.integer(keys[0], most=LIMITS["heads"])
    groups = values.integer(keys[1], most=heads)
    require_divisible(f"`{keys[0]}`", heads, f"`{keys[1]}`", groups)
    state = values.integer(keys[2], most=LIMITS["head_dim"])
    length = values.integer(keys[3], least=2, most=64)
    norm = NormConfig(kind="rms", eps=eps)
    return SsmConfig(heads=heads, groups=groups, head_dim=0, state=state, length=length, norm=norm)


def _mamba_gguf(m: Draft, layer: int) -> SsmConfig:
    """The Mamba-2 mixer of a GGUF layer; dt is not clamped."""
    ssm = _mamba_sizes(m.values, GGUF_SIZES, m.norm.eps)
    inner = m.values.integer("ssm.inner_size", most=LIMITS["width"])
    head_dim = require_divisible("`ssm.inner_size`", inner, f"`{GGUF_SIZES[0]}`", ssm.heads)
    names = (f"blk.{layer}.{name}.bias" for name in ("ssm_in", "ssm_conv1d"))
    bias, conv_bias = (name in m.tensors for name in names)
    return replace(ssm, head_dim=head_dim, bias=bias, conv_bias=conv_bias)


def _mixing(values: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer is Mamba-2, by old or new layer types; without types, all are."""
    key = "layer_types" if values.has("layer_types") else "layers_block_type"
    if not values.has(key):
        return [True] * layers
    named, mixing = ConfigReader({"layer_types": values.raw(key)}), ("mamba", "linear_attention")
    kinds = named.layer_types(layers, (*mixing, "attention", "full_attention"))
    return [kind in mixing for kind in kinds]


def _renamed(settings: Mapping[str, Any], first: Mapping[str, str]) -> dict[str, Any]:
    """Settings by their later names; those of the first releases take precedence."""
    given = {new: settings[old] for old, new in first.items() if settings.get(old) is not None}
    return {**settings, **given}


def _lfm2_settings(settings: dict[str, Any]) -> Mapping[str, Any]:
    """The width of the feed-forward, if auto-adjusted, is 2/3 × the setting × a factor, rounded up.
    """
    first = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    settings = _renamed(settings, first)
    values = ConfigReader(settings)
    hidden = values.integer("intermediate_size", most=LIMITS["hidden"])
    if values.flag("block_auto_adjust_ff_dim", True):
        hidden = int(values.number("block_ffn_dim_multiplier", 1.0) * int(2 * hidden / 3))
        multiple = values.integer("block_multiple_of", 256, most=LIMITS["hidden"])
        hidden = -(-hidden // multiple) * multiple
    return {**settings, "intermediate_size": hidden}


def _lfm2_attends(values: ConfigReader, layers: int) -> list[bool]:
    kinds, listed = values.raw("layer_types"), values.raw("full_attn_idxs")
    mixes = values.text("model_type") == "lfm2_moe"  # its configuration has no default
    if kinds is None and not mixes:  # first releases list the attention layers
        return [not isinstance(listed, list) or i in listed for i in range(layers)]
    types = values.layer_types(layers, ("conv", "full_attention"))
    return [kind == "full_attention" for kind in types]


@family(
    """
    lfm2: gated short convolutions, attention as in qwen3 in some layers; experts by sigmoids with
        a correction behind the first layers (lfm2_moe)
    types: lfm2 lfm2_moe | lfm2 lfm2moe
    options: lacking=true
    keys: rms_norm_eps=norm_eps
    mixers: short convolution, attention
    feed_forwards: gated MLP, mixture of experts
    fixed: hidden_act=silu attention_bias=false mlp_bias=false
    defaults: norm_eps=1e-5 rope_theta=1e6 num_key_value_heads=8 max_position_embeddings=128000
        tie_word_embeddings=true bos_token_id=1 eos_token_id=2
    defaults lfm2_moe: vocab_size=65536 num_dense_layers=2 num_experts=32 num_experts_per_tok=4
        moe_intermediate_size=1792 block_auto_adjust_ff_dim=false
    names: qwen
        ln_final                 embedding_norm         token_embd_norm
        ln1                      operator_norm          attn_norm
        ln2                      ffn_norm               ffn_norm
        attn.q_norm              self_attn.q_layernorm  attn_q_norm
        attn.k_norm              self_attn.k_layernorm  attn_k_norm
        attn.o                   self_attn.out_proj     attn_output
        mlp.gate                 feed_forward.w1        ffn_gate
        mlp.up                   feed_forward.w3        ffn_up
        mlp.down                 feed_forward.w2        ffn_down
        conv.B+conv.gate+conv.x  conv.in_proj           shortconv.in_proj
        conv.out                 conv.out_proj          shortconv.out_proj
        =conv.w                  conv.conv.weight|shape shortconv.conv.weight|shape
        =conv.b                  conv.conv.bias         shortconv.conv.bias
        =moe.b_choice            feed_forward.expert_bias
        experts: feed_forward w1 w3 w2
    """,
    prepare=_lfm2_settings,
)
def lfm2(m: Draft) -> None:
    """LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, some attention layers.

    LFM2-MoE has experts in all but the first layers.
    """
    values = m.values
    if m.hf:
        attends = _lfm2_attends(values, len(m.ffn))
        length, bias = "conv_L_cache", values.flag("conv_bias", False)
        if m.kind == "lfm2_moe":
            dense = values.integer("num_dense_layers", least=0, most=LIMITS["layers"])
            m.set_experts(
                "num_experts",
                mixes=[number >= dense for number in range(len(m.ffn))],
                scores="sigmoid",
                least=1e-6,
                renormalized=values.flag("norm_topk_prob", True),
                correction=values.flag("use_expert_bias", True),
                scale=values.number("routed_scaling_factor", 1.0),
            )
    else:
        attends, length, bias = _having(m, "attention.head_count_kv"), "shortconv.l_cache", False
    default = 3 if m.hf else None
    conv = ShortConvConfig(length=values.integer(length, default, least=2, most=64), bias=bias)
    m.set_attention(qk_norm=m.norm)
    for number, attention in enumerate(attends):
        if not attention:
            m.layer(number, conv, m.ffn[number])
    mixes = any(isinstance(one, ExpertsConfig) for one in m.ffn)
    m.others["model_type"] = "lfm2_moe" if mixes else "lfm2"


_MAMBA2 = "num_heads n_groups state_size conv_kernel head_dim use_bias use_conv_bias hidden_act"


@family("""
    mamba2: blocks of a Mamba-2 mixer alone, without attention and feed-forwards
    types: mamba2 | mamba2
    keys: rms_norm_eps=layer_norm_epsilon
    mixers: Mamba-2
    feed_forwards:
    options: rotary=false
    metadata: attention.head_count=1 attention.head_count_kv=1 feed_forward_length=1
        attention.layer_norm_epsilon=null attention.key_length=2 attention.value_length=2
    fixed: num_attention_heads=1 num_key_value_heads=1 head_dim=2 intermediate_size=1
        hidden_act=silu attention_bias=false mlp_bias=false max_position_embeddings=1048576
    defaults: layer_norm_epsilon=1e-5 num_heads=128 head_dim=64 state_size=128 n_groups=8
        conv_kernel=4 bos_token_id=0 eos_token_id=2
    names: none
        mixer: mixer.
        embed     embeddings  token_embd
        embed     embedding
        ln_final  norm_f      output_norm
        head      lm_head     output
        ln1       norm        attn_norm
        buffers: -
        rotary: false
        prefixes: backbone. -
""")
def mamba2(m: Draft) -> None:
    """Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): blocks of one norm and one mixer.

    There is no limit to the context: 1,048,576 tokens are nominal. `embedding` is the name in the
    checkpoints of state-spaces.
    """
    for number in range(len(m.ffn)):
        if m.hf:
            inner = int(m.values.number("expand", 2.0) * m.model.width)
            m.layer(number, _mamba_hf(m.values, _MAMBA2, m.norm.eps, inner))
        else:
            m.layer(number, _mamba_gguf(m, number))


_GRANITE = (
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_d_head mamba_proj_bias"
    " mamba_conv_bias hidden_act"
)


@family("""
    granite_hybrid: as granite with Mamba-2 in most layers, rotary positions where it says so, a
        shared expert beside others (softmax of the chosen) or alone
    types: granitemoehybrid | granitehybrid
    options: lacking=true
    gguf_reads: scales
    mixers: Mamba-2, attention
    feed_forwards: gated MLP, mixture of experts
    defaults: bos_token_id=1 eos_token_id=2 num_local_experts=8 num_experts_per_tok=2
        shared_intermediate_size=1024 mamba_n_heads=128 mamba_n_groups=1 mamba_d_state=256
        mamba_d_conv=4 mamba_expand=2
    names: llama
        mixer: mamba.
        mlp.gate+mlp.up  shared_mlp.input_linear
        mlp.down         shared_mlp.output_linear  ffn_down
        experts: -
        =moe.W_gate+moe.W_up           block_sparse_moe.input_linear.weight
        =moe.W_gate+moe.W_up           block_sparse_moe.experts.gate_up_proj
        =moe.W_down                    block_sparse_moe.output_linear.weight
        =moe.W_down                    block_sparse_moe.experts.down_proj
        moe.router                     block_sparse_moe.router.layer
        moe.router                     block_sparse_moe.router
        moe.shared.gate+moe.shared.up  shared_mlp.input_linear
        moe.shared.down                shared_mlp.output_linear
""")
def granite_hybrid(m: Draft) -> None:
    """Granite 4 (IBM 2025): Granite with Mamba-2 in most layers, experts and a shared one.

    Without routed experts, the shared expert is the feed-forward.
    """
    granite.build(m)
    if not m.hf:
        for number, attends in enumerate(_having(m, "attention.head_count_kv")):
            if not attends:
                m.layer(number, _mamba_gguf(m, number), m.ffn[number])
        return
    values = m.values
    if values.raw("mamba_d_head") == "auto":
        values = ConfigReader(values.all() | {"mamba_d_head": None})
    size = values.integer("shared_intermediate_size", most=LIMITS["hidden"])
    if values.integer("num_local_experts", least=0, most=LIMITS["heads"]):
        shared, scores = SharedConfig(hidden=size), "softmax of the chosen"
        m.set_experts("num_local_experts", hidden="intermediate_size", shared=shared, scores=scores)
    else:
        m.set_ffn(hidden=size, bias=False)
    for number, mixes in enumerate(_mixing(values, len(m.ffn))):
        if mixes:
            inner = values.integer("mamba_expand", most=64) * m.model.width
            m.layer(number, _mamba_hf(values, _GRANITE, m.norm.eps, inner), m.ffn[number])
    if values.text("position_embedding_type", "nope") != "rope":
        m.set_attention(rope=None)


_NEMOTRON = (
    "mamba_num_heads n_groups ssm_state_size conv_kernel mamba_head_dim use_bias use_conv_bias"
    " mamba_hidden_act"
)
_OLD = ("mamba_n_groups", "mamba_d_conv", "mamba_dt_min", "mamba_conv_bias")  # first releases
_FIRST = dict(zip(_OLD, ["n_groups", "conv_kernel", "time_step_min", "use_conv_bias"], strict=True))
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {kind: kind for kind in _PATTERN.values()}
_KINDS |= {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_hf(m: Draft) -> None:
    kinds = _kinds(m.values)
    # one shared expert, whose full width is given
    values = ConfigReader({**_renamed(m.values.all(), _FIRST), "n_shared_experts": 1})
    parts: dict[str, object] = {"attention": m.attention[0], "mlp": m.ffn[0]}
    if "mamba" in kinds:  # the only bound of dt that transformers reads
        bounds = values.number("time_step_min", 0.001, above=False), math.inf
        parts["mamba"] = _mamba_hf(values, _NEMOTRON, m.norm.eps, bounds=bounds)
    if "moe" in kinds:
        _no_latents(values)
        if values.flag("mlp_bias", False):
            raise UnsupportedModel("`mlp_bias` = `true` is not supported beside experts")
        size = values.integer("moe_shared_expert_intermediate_size", most=LIMITS["hidden"])
        mixed = mixture.read_deepseek(values, m.ffn[0].activation)
        parts["moe"] = replace(mixed, gated=False, shared=SharedConfig(hidden=size))
    for number, kind in enumerate(kinds):
        m.layer(number, parts[kind])


def _no_latents(values: ConfigReader) -> None:
    key = "moe_latent_size"
    if values.raw(key):
        raise UnsupportedModel(
            f"`{key}` = `{shortened(values.raw(key))}` is not supported: experts read the width"
        )


def _kinds(values: ConfigReader) -> list[str]:
    """The type of each block, from a list of types or a string of letters."""
    key = "layer_types" if values.has("layer_types") else "layers_block_type"
    listed = values.raw(key)
    if listed is None:
        key = "hybrid_override_pattern"
        listed = [_PATTERN.get(one, one) for one in values.text(key, "ME*-")]
    if not isinstance(listed, list) or not 0 < len(listed) <= LIMITS["layers"]:
        raise values.invalid(key, f"a type for each of 1 to {LIMITS['layers']} blocks")
    named = ConfigReader({"layer_types": listed}).layer_types(len(listed), _KINDS)
    return [_KINDS[kind] for kind in named]


def _nemotron_settings(settings: dict[str, Any]) -> Mapping[str, Any]:
    values = ConfigReader(settings)
    return {**settings, "num_hidden_layers": len(_kinds(values))}


@family(
    """
    nemotron_h: blocks of one part each: Mamba-2, attention without positions, a feed-forward
        without gates (ReLU²), or experts of that kind by sigmoids and a shared one
    types: nemotron_h | nemotron_h nemotron_h_moe
    keys: rms_norm_eps=layer_norm_epsilon hidden_act=mlp_hidden_act
    mixers: Mamba-2, attention
    feed_forwards: MLP, mixture of experts
    options: function=relu2 rotary=false lacking=true
    fixed: attention_bias=false tie_word_embeddings=false
    defaults: mlp_hidden_act=relu2 layer_norm_epsilon=1e-5 bos_token_id=1 eos_token_id=2
        num_attention_heads=32 num_key_value_heads=8 head_dim=128 intermediate_size=21504
        max_position_embeddings=4096 mamba_num_heads=128 mamba_head_dim=64 n_groups=8
        ssm_state_size=128 conv_kernel=4 n_routed_experts=8 num_experts_per_tok=2
        moe_intermediate_size=7688 moe_shared_expert_intermediate_size=7688
    names: llama
        mixer: mixer.
        embed     embeddings       token_embd
        ln_final  norm_f           output_norm
        ln1       norm             attn_norm
        attn.q    mixer.q_proj     attn_q
        attn.k    mixer.k_proj     attn_k
        attn.v    mixer.v_proj     attn_v
        attn.o    mixer.o_proj     attn_output
        mlp.up    mixer.up_proj    ffn_up
        mlp.down  mixer.down_proj  ffn_down
        without: ln2 mlp.gate
        prefixes: model. backbone. -
        predicts: true
        experts: -
        moe.router       mixer.gate
        =moe.b_choice    mixer.gate.e_score_correction_bias
        moe.up           mixer.experts.{expert}.up_proj
        moe.down         mixer.experts.{expert}.down_proj
        =moe.W_up        mixer.experts.up_proj
        =moe.W_down      mixer.experts.down_proj
        moe.shared.up    mixer.shared_experts.up_proj
        moe.shared.down  mixer.shared_experts.down_proj
    """,
    prepare=_nemotron_settings,
)
def nemotron_h(m: Draft) -> None:
    """Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624): blocks of one part each.

    The part is Mamba-2, attention without positions, an ungated feed-forward, or ungated experts
    with sigmoid routing, a correction bias and a shared expert. In GGUF a block without key/value
    heads and neurons is Mamba-2. transformers never ties the embeddings.
    """
    if not m.hf:
        _no_latents(m.values)
    m.set_ffn(gated=False)
    if m.hf:
        _nemotron_hf(m)
        return
    parts = (_having(m, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    for number, (attends, feeds) in enumerate(zip(*parts, strict=True)):
        if attends:
            m.layer(number, m.attention[number])
        elif feeds:
            m.layer(number, m.ffn[number])
        else:
            m.layer(number, _mamba_gguf(m, number))
