"""Exports a model's configuration and tensor names in transformers' form.

Used to build the same model in transformers from our weights, independent of their file. A
configuration is only returned if its family reads it back as an equal model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmcli.config import LayerConfig, ModelConfig
from llmcli.errors import LlmcliError, UnsupportedModel
from llmcli.families.family import Family, families
from llmcli.families.rules import Load, Transpose, plan
from llmcli.parts.attention.config import (
    AttentionConfig,
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from llmcli.parts.conv.config import ShortConvConfig
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.ssm.config import SsmConfig

_ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "quick_gelu": "quick_gelu",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip


def hub_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json of the model, with `model_type`.

    Frequency factors, which it cannot hold, are omitted. Raises UnsupportedModel if no model type
    of transformers is equivalent.
    """
    return _written(config)[1]


def hub_loads(config: ModelConfig, names: Iterable[str]) -> tuple[Load, ...]:
    """Map our parameters (`target`) to transformers' parameters (`source`).

    Loads with the same source are concatenated along rows, and transposed if their operations say
    so. Raises UnsupportedModel for a name without a parameter.
    """
    family, _ = _written(config)
    found = plan(names, family.rules_hf(config), config)
    missing = [*found.unexpected, *(name for name, _ in found.dropped)]
    if missing:
        raise UnsupportedModel(f"no parameter for transformers' `{missing[0]}`")
    return found.loads


def transposed(load: Load) -> bool:
    """Whether transformers stores the matrix `[in, out]`."""
    return Transpose() in load.ops


def _written(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    wanted = _compared(config)
    types = [(family, kind) for family in families() for kind in family.hf_types]
    for family, kind in sorted(types, key=lambda one: one[1] != config.model_type):
        for settings in _settings(config):
            one = settings | {"model_type": kind}
            try:
                same = _compared(family.from_hf(one)) == wanted
            except LlmcliError:  # impossible for this type
                continue
            if same:
                return family, one
    raise UnsupportedModel(
        "transformers has no type of model that computes exactly this one",
        hint="compare with another model, or leave out `--against`",
    )


def _compared(config: ModelConfig) -> ModelConfig:
    """The settings that affect results: all but names, end ids and the rounding of √D.

    Only transformers rounds the factor of the embeddings; GGUF files do not.
    """
    layers = []
    for layer in config.layers:
        attention = layer.attention
        if attention is not None and attention.rope is not None:
            rope = _proportional(attention.rope)
            if isinstance(rope.scaling, FrequencyFactors):
                rope = replace(rope, scaling=None)
            layer = layer.with_attention(replace(attention, rope=rope))
        layers.append(layer)
    embedding = replace(config.embedding, rounded_scale=False)
    return replace(
        config, family="", model_type="", bos=None, eos=(), layers=tuple(layers),
        embedding=embedding,
    )  # fmt: skip


def _proportional(rope: RopeConfig) -> RopeConfig:
    """Replace a GGUF file's factors that are 1, or too large to rotate a pair, by pairs."""
    if not isinstance(rope.scaling, FrequencyFactors) or max(rope.scaling.factors) < 1e20:
        return rope
    pairs = sum(factor == 1 for factor in rope.scaling.factors)
    return replace(rope, scaling=ProportionalScaling(pairs=pairs))


def _settings(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Candidate settings with the keys of all types: each type reads its own, `_written` checks.

    One candidate has the same RoPE for all layers, another RoPE by layer type.
    """
    latents = [part for layer in config.layers for part in layer.parts
               if isinstance(part, LatentConfig)]  # fmt: skip
    attentions = [layer.attention for layer in config.layers if layer.attention is not None]
    attentions += [_rotated(one) for one in latents]
    parts = [part for layer in config.layers for part in layer.parts]
    ffns = [part for part in parts if isinstance(part, MlpConfig | ExpertsConfig)]
    ssm = next((part for part in parts if isinstance(part, SsmConfig)), None)
    if not attentions or not ffns:
        if ssm is not None:
            yield _ends(config) | _mamba2(ssm, config) | {
                "head_dim": ssm.head_dim, "hidden_act": "silu",
            }  # fmt: skip
        return
    mixer = attentions[0]
    ffn = next((part for part in ffns if isinstance(part, MlpConfig)), ffns[0])
    windows = [layer.window for layer in config.layers]
    window = next((size for size in windows if size), None)
    kinds = ["sliding_attention" if size else "full_attention" for size in windows]
    convs = [part for part in parts if isinstance(part, ShortConvConfig)]
    if convs:
        kinds = ["conv" if layer.attention is None else "full_attention" for layer in config.layers]
    deltas = [part for part in parts if isinstance(part, DeltaConfig)]
    if deltas:
        kinds = [kind if layer.attention is not None else "linear_attention"
                 for kind, layer in zip(kinds, config.layers, strict=True)]  # fmt: skip
    if ssm is not None:
        kinds = [_kind(layer) for layer in config.layers]
    activation = _ACTIVATIONS[ffn.activation]
    scale = mixer.head_dim**-0.5
    settings = _ends(config) | {
        "intermediate_size": ffn.hidden,
        "n_inner": ffn.hidden,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": activation,
        "activation_function": activation,
        "mlp_hidden_act": activation,
        "mamba_hidden_act": "silu",
        "attention_bias": mixer.qkv_bias,
        "qkv_bias": mixer.qkv_bias,
        "use_qk_norm": mixer.qk_norm is not None,
        "mlp_bias": isinstance(ffn, MlpConfig) and ffn.bias,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": kinds,
        "scale_attn_weights": mixer.scale == scale,
        "scale_attn_by_inverse_layer_idx": attentions[-1].scale != mixer.scale,
        "conv_L_cache": convs[0].length if convs else None,
        "conv_bias": bool(convs) and convs[0].bias,
        "block_auto_adjust_ff_dim": False,
        "position_embedding_type": "nope" if mixer.rope is None else "rope",
        "mamba_n_heads": 1,  # transformers validates it even if unused
    }
    branches = config.layers[0].sublayers[0]
    settings |= {
        "layer_norm_eps": config.final_norm.eps,
        "norm_epsilon": config.final_norm.eps,
        "use_bias": mixer.qkv_bias,
        "hidden_activation": activation,
        "query_pre_attn_scalar": _whole(mixer.scale**-2),
        "attn_logit_softcapping": mixer.cap,
        "final_logit_softcapping": config.head.cap,
        "attention_multiplier": mixer.scale,
        "residual_multiplier": branches[0].multiplier,
        "embedding_multiplier": config.embedding.scale,
        "logits_scaling": 1 / config.head.scale,
        "logit_scale": config.head.scale,
        "no_rope_layers": [int(attention.rope is not None) for attention in attentions],
        "use_parallel_residual": len(branches) > 1,
    }
    settings |= _by_layer(config, attentions) | _experts(config)
    if deltas:
        settings |= _delta(deltas[0])
    if latents:
        settings |= _latent(latents[0])
    if ssm is not None:
        settings |= _mamba2(ssm, config)
    rotated = [(attention.rope, attention) for attention in attentions if attention.rope]
    full = next((one for one in rotated if one[1].window is None), None)
    slides = next((one for one in rotated if one[1].window is not None), None)
    for one in dict.fromkeys(filter(None, (full, slides))):
        own = settings | {"rope_parameters": _rope(*one) | _scores_yarn(latents)}
        if isinstance(one[0].scaling, LongRopeScaling):  # precedence outside RoPE settings
            own["original_max_position_embeddings"] = one[0].scaling.original
        yield own
    yield settings | {"rope_parameters": {
        name: _rope(*one)
        for name, one in (("full_attention", full), ("sliding_attention", slides)) if one
    } or None}  # fmt: skip


def _ends(config: ModelConfig) -> dict[str, Any]:
    """Settings that every model has: sizes, norms, the head, ids."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "max_position_embeddings": config.embedding.positions or config.context,
        "rms_norm_eps": config.final_norm.eps,
        "layer_norm_epsilon": config.final_norm.eps,
        "norm_eps": config.final_norm.eps,
        "tie_word_embeddings": config.head.tied,
        "bos_token_id": config.bos,
        "eos_token_id": list(config.eos) or None,
        "pad_token_id": None,
    }


def _kind(layer: LayerConfig) -> str:
    """The layer type in models with Mamba-2 layers or layers without a mixer."""
    if layer.attention is not None:
        return "full_attention"
    if any(isinstance(part, SsmConfig) for part in layer.parts):
        return "linear_attention"
    return "moe" if any(isinstance(part, ExpertsConfig) for part in layer.parts) else "mlp"


def _mamba2(ssm: SsmConfig, config: ModelConfig) -> dict[str, Any]:
    """The keys of Mamba-2, alone and in hybrids."""
    expand = _whole(ssm.inner / config.width)
    return {
        **dict.fromkeys(("num_heads", "mamba_n_heads", "mamba_num_heads"), ssm.heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), ssm.head_dim),
        **dict.fromkeys(("n_groups", "mamba_n_groups"), ssm.groups),
        **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), ssm.state),
        **dict.fromkeys(("conv_kernel", "mamba_d_conv"), ssm.length),
        **dict.fromkeys(("expand", "mamba_expand"), expand),
        **dict.fromkeys(("use_bias", "mamba_proj_bias"), ssm.bias),
        **dict.fromkeys(("use_conv_bias", "mamba_conv_bias"), ssm.conv_bias),
        "time_step_limit": [ssm.least, ssm.most],
        "time_step_min": ssm.least,
    }


def _experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of mixtures."""
    found = [
        next((part for part in layer.parts if isinstance(part, ExpertsConfig)), None)
        for layer in config.layers
    ]
    dense = [at for at, part in enumerate(found) if part is None]
    mixtures = [part for part in found if part is not None]
    where = {
        "mlp_only_layers": dense,
        "first_k_dense_replace": len(dense),
        "num_dense_layers": len(dense),
        "mlp_layer_types": ["dense" if at in dense else "sparse" for at in range(len(found))],
    }
    if not mixtures:
        hidden = [part.hidden for layer in config.layers for part in layer.parts
                  if isinstance(part, MlpConfig)]  # fmt: skip
        return where | {"num_local_experts": 0, "shared_intermediate_size": hidden[0]}
    experts, routing = mixtures[0], mixtures[0].routing
    shared = 0 if experts.shared is None else experts.shared.hidden
    return where | {
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), experts.experts),
        "num_experts_per_tok": routing.chosen,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": routing.renormalized,
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size",
                         "moe_shared_expert_intermediate_size"), shared or None),
        "n_shared_experts": shared // experts.hidden or None,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.kept_groups,
        "use_expert_bias": routing.correction,
        "enable_moe_block": routing.norm is not None,
        "top_k_experts": routing.chosen,
        "topk_method": "group_limited_greedy" if routing.groups > 1 else "greedy",
        **({} if experts.clamp is None else {"swiglu_limit": experts.clamp.limit}),
    }


def _rotated(latent: LatentConfig) -> AttentionConfig:
    """The rotated part of latent attention as an AttentionConfig."""
    return AttentionConfig(
        heads=latent.heads, kv_heads=latent.heads, head_dim=latent.rope.dims,
        value_dim=latent.value_dim, scale=latent.scale, rope=latent.rope, qkv_bias=latent.bias,
    )  # fmt: skip


def _latent(latent: LatentConfig) -> dict[str, Any]:
    """The sizes of latent attention."""
    return {
        "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.content, "qk_rope_head_dim": latent.rope.dims,
        "v_head_dim": latent.value_dim,
    }  # fmt: skip


def _delta(delta: DeltaConfig) -> dict[str, Any]:
    """The sizes of DeltaNet."""
    return {
        "linear_num_key_heads": delta.key_heads, "linear_num_value_heads": delta.heads,
        "linear_key_head_dim": delta.key_dim, "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.length,
    }  # fmt: skip


def _scores_yarn(latents: Sequence[LatentConfig]) -> dict[str, float]:
    """`mscale_all_dim`, if scores have an additional factor."""
    if not latents or not isinstance(latents[0].rope.scaling, YarnScaling):
        return {}
    one, factor = latents[0], latents[0].rope.scaling.factor
    more = one.scale * math.sqrt(one.head_dim)
    # rounded, since files have few digits
    found = round((math.sqrt(more) - 1) / (0.1 * math.log(factor)), 9) if factor > 1 else 0.0
    return {"mscale_all_dim": found} if found else {}


def _by_layer(config: ModelConfig, attentions: Sequence[AttentionConfig]) -> dict[str, Any]:
    """Settings of layers that differ in sizes or share keys and values."""
    whole = next((one for one in attentions if one.window is None), attentions[0])
    near = next((one for one in attentions if one.window is not None), attentions[0])
    hidden = [part.hidden for layer in config.layers for part in layer.parts
              if isinstance(part, MlpConfig)]  # fmt: skip
    embedding = config.embedding.per_layer
    return {
        "head_dim": near.head_dim,
        "num_key_value_heads": near.kv_heads,
        "global_head_dim": whole.head_dim,
        "num_global_key_value_heads": whole.kv_heads,
        "attention_k_eq_v": any(one.kv.equal for one in attentions),
        "num_kv_shared_layers": sum(one.kv.layer is not None for one in attentions),
        "use_double_wide_mlp": len(set(hidden)) > 1,
        "hidden_size_per_layer_input": 0 if embedding is None else embedding.size,
        "vocab_size_per_layer_input": config.vocab if embedding is None else embedding.vocab,
    }


def _whole(number: float) -> float | int:
    """The nearest integer if `number` differs from it by rounding only."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


def _rope(rope: RopeConfig, mixer: AttentionConfig) -> dict[str, Any]:
    rope = _proportional(rope)
    written = {"rope_theta": rope.theta, "partial_rotary_factor": rope.dims / mixer.head_dim}
    if (growth := mixer.growth) is not None:
        written |= {
            "llama_4_scaling_beta": growth.beta,
            "original_max_position_embeddings": growth.original,
        }
    match rope.scaling:
        case ProportionalScaling(pairs=pairs, factor=factor):
            share = min(1.0, (2 * pairs + 0.5) / rope.dims)  # transformers rounds down
            kind = {"rope_type": "proportional", "factor": factor}
            return written | kind | {"partial_rotary_factor": share}
        case LinearScaling(factor=factor):
            return written | {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor=factor):
            return written | {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling() as llama3:
            return written | {
                "rope_type": "llama3",
                "factor": llama3.factor,
                "low_freq_factor": llama3.low,
                "high_freq_factor": llama3.high,
                "original_max_position_embeddings": llama3.original,
            }
        case YarnScaling() as yarn:
            return written | {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original,
                "attention_factor": yarn.attention_factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
            }
        case LongRopeScaling() as long:
            return written | {
                "rope_type": "longrope",
                "short_factor": list(long.short),
                "long_factor": list(long.long),
                "original_max_position_embeddings": long.original,
                "attention_factor": long.attention_factor,
            }
    return written | {"rope_type": "default"}
