"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, attention in some layers.

LFM2-MoE has experts in all but the first layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig, sequential
from llmcli.families import llama, mixture
from llmcli.families.family import Family
from llmcli.families.names import QWEN, experts
from llmcli.families.read import gguf_header
from llmcli.families.values import MOST, Values
from llmcli.parts.conv.config import ShortConvConfig
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `Lfm2Config` that differ from LlamaConfig's, and settings that it does not read
_DEFAULTS = {
    "rope_theta": 1e6, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {  # additional defaults of `Lfm2MoeConfig`
    "vocab_size": 65_536, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
_LLAMA_ONLY = {
    "model_type": "llama", "hidden_act": "silu", "mlp_bias": False, "attention_bias": False,
}  # fmt: skip
_NAMES = QWEN.but("""
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
""", experts=experts("feed_forward", "w1", "w3", "w2"))


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig; names of the first releases take precedence."""
    first = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    renamed = {new: config[old] for old, new in first.items() if config.get(old) is not None}
    mixes = config["model_type"] == "lfm2_moe"
    defaults = {**_DEFAULTS, **_MOE} if mixes else _DEFAULTS
    values = Values({**defaults, **config, **renamed})
    own = {"rms_norm_eps": values.number("norm_eps", 1e-5, above=False),
           "intermediate_size": _hidden(values)}  # fmt: skip
    model = llama.from_hf({**defaults, **config, **renamed, **own, **_LLAMA_ONLY})
    if mixes:
        model = _with_experts(model, values)
    conv = ShortConvConfig(
        length=values.integer("conv_L_cache", 3, least=2, most=64),
        bias=values.flag("conv_bias", False),
    )
    return _with_convolutions(model, _attends(values, len(model.layers)), conv)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig: a layer without key/value heads is a convolution."""
    header = gguf_header(metadata, tensors, mixtures=("lfm2moe",))
    key, values = "attention.head_count_kv", header.values
    heads = values.integer("attention.head_count", most=MOST["heads"])
    listed = values.raw(key)
    if not isinstance(listed, list) or len(listed) != header.layers:
        raise values.wrong(key, f"numbers for {header.layers} layers")
    attends = [Values({key: n}).integer(key, least=0, most=heads) > 0 for n in listed]
    filled = {f"{header.arch}.{key}": [n or heads for n in listed]}
    model = llama.from_gguf({**metadata, **filled}, tensors)
    conv = ShortConvConfig(length=values.integer("shortconv.l_cache", least=2, most=64))
    return _with_convolutions(model, attends, conv)


def _with_convolutions(
    model: ModelConfig, attends: Sequence[bool], conv: ShortConvConfig
) -> ModelConfig:
    norm, layers = model.final_norm, []
    for layer, has in zip(model.layers, attends, strict=True):
        attention, ffn = layer.attention, layer.parts[-1]
        assert attention is not None
        mixer = replace(attention, qk_norm=norm) if has else conv
        layers.append(sequential(mixer, ffn, norm=norm))
    kind = "lfm2" if mixture.found_in(model) is None else "lfm2_moe"
    return replace(model, family="lfm2", model_type=kind, layers=tuple(layers))


def _with_experts(model: ModelConfig, values: Values) -> ModelConfig:
    """Experts in all layers but the first ones."""
    count = values.integer("num_experts", most=MOST["heads"])
    dense = values.integer("num_dense_layers", least=0, most=MOST["layers"])
    mixed = ExpertsConfig(
        experts=count, hidden=values.integer("moe_intermediate_size", most=MOST["hidden"]),
        activation="silu", routing=RoutingConfig(
            chosen=values.integer("num_experts_per_tok", most=count), scores="sigmoid", least=1e-6,
            renormalized=values.flag("norm_topk_prob", True),
            correction=values.flag("use_expert_bias", True),
            scale=values.number("routed_scaling_factor", 1.0),
        ),
    )  # fmt: skip
    return llama.rebuilt(model, lambda number, attention, mlp: sequential(
        attention, mlp if number < dense else mixed, norm=model.final_norm
    ))  # fmt: skip


def _hidden(values: Values) -> int:
    """Width of the feed-forward: if auto-adjusted, 2/3 × the setting × a factor, rounded up."""
    hidden = values.integer("intermediate_size", most=MOST["hidden"])
    if not values.flag("block_auto_adjust_ff_dim", True):
        return hidden
    hidden = int(values.number("block_ffn_dim_multiplier", 1.0) * int(2 * hidden / 3))
    multiple = values.integer("block_multiple_of", 256, most=MOST["hidden"])
    return -(-hidden // multiple) * multiple


def _attends(values: Values, layers: int) -> list[bool]:
    kinds, listed = values.raw("layer_types"), values.raw("full_attn_idxs")
    experts = values.text("model_type") == "lfm2_moe"  # its configuration has no default
    if kinds is None and not experts:  # first releases list the attention layers
        return [not isinstance(listed, list) or i in listed for i in range(layers)]
    types = values.layer_types(layers, ("conv", "full_attention"))
    return [kind == "full_attention" for kind in types]


FAMILIES = (Family(
    name="lfm2", words="gated short convolutions, attention as in qwen3 in some layers; "
    "experts by sigmoids with a correction behind the first layers (lfm2_moe)",
    hf_types=("lfm2", "lfm2_moe"), gguf_archs=("lfm2", "lfm2moe"), from_hf=from_hf,
    from_gguf=from_gguf, rules_hf=_NAMES.hf, rules_gguf=_NAMES.gguf,
    mixers=("short convolution", "attention"), feed_forwards=("gated MLP", "mixture of experts"),
),)  # fmt: skip
