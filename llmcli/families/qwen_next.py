"""Qwen3-Next and Qwen 3.5 (Alibaba 2025 and 2026): gated DeltaNet, gated attention in some layers.

Norms multiply by 1 + w, except the norm of DeltaNet's output. Qwen3-Next and the larger Qwen 3.5
have mixtures of experts with a shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.errors import UnsupportedModel
from llmcli.families import llama, mixture
from llmcli.families.family import Family
from llmcli.families.names import POST_NORM_2, Names
from llmcli.families.qwen_moe import mixture_of, sparse
from llmcli.families.qwen_vl import without_sections
from llmcli.families.read import gguf_header
from llmcli.families.values import MOST, Values, require_divisible
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults that differ from those of Qwen 3
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
_TYPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {
        "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "intermediate_size": 5632,
    },
    "qwen3_5_text": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
}  # fmt: skip
_FIXED: Mapping[str, Mapping[str, Any]] = {  # settings that these types ignore
    "qwen3_next": {},
    "qwen3_5_text": {"num_experts": 0},
    "qwen3_5_moe_text": {
        "norm_topk_prob": True, "mlp_only_layers": None, "decoder_sparse_step": 1,
        "intermediate_size": 1,
    },
}  # fmt: skip
# value heads, key heads, a key's size, tokens of the convolution
_SIZES_HF = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
             "linear_conv_kernel_dim")  # fmt: skip
_SIZES_GGUF = ("ssm.time_step_rank", "ssm.group_count", "ssm.state_size", "ssm.conv_kernel")
_TILED = ("qwen35", "qwen35moe")  # architectures with reordered value heads

_BY_HEAD = """
    linattn.in+linattn.gate@head     linear_attn.in_proj_qkvz  ssm_in
    linattn.beta+linattn.decay@head  linear_attn.in_proj_ba    ssm_ba
"""  # rows grouped by key head, values included
_APART = """
    linattn.in                linear_attn.in_proj_qkv         attn_qkv
    linattn.gate              linear_attn.in_proj_z           attn_gate
    linattn.beta              linear_attn.in_proj_b           ssm_beta
    linattn.decay             linear_attn.in_proj_a           ssm_alpha
    linattn.out               linear_attn.out_proj            ssm_out
    =linattn.A_log            linear_attn.A_log               ssm_a|log
    =linattn.dt_bias          linear_attn.dt_bias             ssm_dt.bias
    =linattn.norm.w           linear_attn.norm.weight         ssm_norm.weight
    =linattn.w                linear_attn.conv1d.weight|shape ssm_conv1d.weight|shape
    attn.q                    self_attn.q_proj                attn_q
    attn.k                    self_attn.k_proj                attn_k
    attn.v                    self_attn.v_proj                attn_v
    attn.q+attn.k+attn.v      -                               attn_qkv
"""


def _names(config: ModelConfig) -> Names:
    """The usual rows first; early GGUF files of `qwen3next` have rows in transformers' order."""
    grouped = config.model_type in ("qwen3_next", "qwen3next")
    rows = (_BY_HEAD, _APART) if grouped else (_APART, _BY_HEAD)
    return POST_NORM_2.but("".join(rows), predicts=True)


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    kind = config["model_type"]
    settings = without_sections({**_DEFAULTS, **_TYPES[kind], **config, **_FIXED[kind]})
    own = {"model_type": "qwen3", "layer_types": None, "use_sliding_window": False}
    model = llama.from_hf({**settings, **own}, rotated=0.25)
    values, layers = Values(settings), len(model.layers)
    if values.text("hidden_act", "silu") not in ("silu", "swish"):  # also of convolutions
        raise UnsupportedModel(f"`{kind}` with another activation than `silu` is not supported")
    attends = None
    if values.has("layer_types"):
        kinds = values.layer_types(layers, ("linear_attention", "full_attention"))
        attends = [one == "full_attention" for one in kinds]
    size = values.integer("linear_value_head_dim", most=MOST["head_dim"])
    delta = replace(_delta(values, _SIZES_HF, model.final_norm), value_dim=size)
    model = _hybrid(model, values, delta, attends, kind)
    return _with_experts(model, values)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    header = gguf_header(metadata, tensors, mixtures=mixture.GGUF_ARCHS)
    values, arch, layers = header.values, header.arch, header.layers
    filled, attends = {}, None
    if not values.raw("feed_forward_length"):  # all layers have experts
        filled["feed_forward_length"] = values.raw("expert_feed_forward_length")
    for key, none in (("attention.head_count_kv", False), ("attention.recurrent_layers", True)):
        listed = values.raw(key)  # an entry may mark an attention layer
        if isinstance(listed, list):
            if len(listed) < layers:
                raise values.wrong(key, f"an entry for each of {layers} layers")
            attends = [bool(one) != none for one in listed[:layers]]
            filled[key] = [one or 1 for one in listed[:layers]]
    model = llama.from_gguf(
        {**metadata, **{f"{arch}.{key}": value for key, value in filled.items()}}, tensors
    )
    delta = _delta(values, _SIZES_GGUF, model.final_norm)
    inner = values.integer("ssm.inner_size", most=MOST["hidden"])
    size = require_divisible("`ssm.inner_size`", inner, f"`{_SIZES_GGUF[0]}`", delta.heads)
    tiled = values.flag("ssm.v_head_reordered", arch in _TILED)  # written by Ollama
    tiled = tiled and 1 < delta.key_heads < delta.heads  # otherwise both orders are the same
    return _hybrid(model, values, replace(delta, value_dim=size, tiled=tiled), attends, arch)


def _delta(values: Values, keys: Sequence[str], norm: NormConfig) -> DeltaConfig:
    """Read DeltaNet's sizes; values have the size of keys."""
    heads, key_heads = (values.integer(key, most=MOST["heads"]) for key in keys[:2])
    require_divisible(f"`{keys[0]}`", heads, f"`{keys[1]}`", key_heads)
    size = values.integer(keys[2], most=MOST["head_dim"])
    length = values.integer(keys[3], least=2, most=64)
    return DeltaConfig(
        heads=heads, key_heads=key_heads, key_dim=size, value_dim=size, length=length, norm=norm
    )


def _hybrid(
    model: ModelConfig, values: Values, delta: DeltaConfig, attends: Sequence[bool] | None,
    kind: str,
) -> ModelConfig:  # fmt: skip
    """`attends`: whether each layer is attention; None: the last one of each period is."""
    period = values.integer("full_attention_interval", 4, most=MOST["layers"])
    norm = replace(model.final_norm, offset=1.0)

    def block(number: int, attention: AttentionConfig, ffn: object) -> LayerConfig:
        has = (number + 1) % period == 0 if attends is None else attends[number]
        mixer = replace(attention, qk_norm=norm, gated=True) if has else delta
        return sequential(mixer, ffn, norm=norm)

    return llama.rebuilt(model, block, family="qwen_next", model_type=kind, final_norm=norm)


def _with_experts(model: ModelConfig, values: Values) -> ModelConfig:
    """Replace feed-forwards by experts in the layers that have them."""
    if not values.integer("num_experts", least=0, most=MOST["heads"]):
        return model
    experts = mixture_of(values, shared=True)
    layers = [
        sequential(layer.parts[0], experts, norm=model.final_norm) if mixes else layer
        for layer, mixes in zip(model.layers, sparse(values, len(model.layers)), strict=True)
    ]
    return replace(model, layers=tuple(layers))


FAMILIES = (Family(
    name="qwen_next",
    words="gated DeltaNet, attention with gated results in every fourth layer, norms of 1 + w; "
    "experts and a shared one (qwen3_next, qwen3_5_moe)",
    hf_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    hf_multimodal=("qwen3_5", "qwen3_5_moe"),
    gguf_archs=("qwen3next", *_TILED),
    from_hf=from_hf, from_gguf=from_gguf, rules_hf=lambda config: _names(config).hf(config),
    rules_gguf=lambda config: _names(config).gguf(config),
    mixers=("gated DeltaNet", "attention"), feed_forwards=("gated MLP", "mixture of experts"),
),)  # fmt: skip
