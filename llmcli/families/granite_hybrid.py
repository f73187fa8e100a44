"""Granite 4 (IBM 2025): Granite with Mamba-2 in most layers, with routed experts and a shared one.

Without routed experts, the shared expert is the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig, sequential
from llmcli.families import mamba2_mixer
from llmcli.families.dense import GRANITE
from llmcli.families.family import Family
from llmcli.families.names import LLAMA
from llmcli.families.read import GGUF_SCALES
from llmcli.families.values import MOST, Values
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig, SharedConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.ssm.config import SsmConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

Ffn = MlpConfig | ExpertsConfig

_DEFAULTS = {  # `GraniteMoeHybridConfig`'s
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
_KEYS = mamba2_mixer.Keys(
    heads="mamba_n_heads", head_dim="mamba_d_head", groups="mamba_n_groups",
    state="mamba_d_state", length="mamba_d_conv", bias="mamba_proj_bias",
    conv_bias="mamba_conv_bias", function="hidden_act",
)  # fmt: skip
# Experts as published and as in memory; gate and up are always one tensor.
_NAMES = LLAMA.but(mamba2_mixer.MIXER.replace("mixer.", "mamba.") + """
    mlp.gate+mlp.up  shared_mlp.input_linear
    mlp.down         shared_mlp.output_linear  ffn_down
""", experts="""
    =moe.W_gate+moe.W_up           block_sparse_moe.input_linear.weight
    =moe.W_gate+moe.W_up           block_sparse_moe.experts.gate_up_proj
    =moe.W_down                    block_sparse_moe.output_linear.weight
    =moe.W_down                    block_sparse_moe.experts.down_proj
    moe.router                     block_sparse_moe.router.layer
    moe.router                     block_sparse_moe.router
    moe.shared.gate+moe.shared.up  shared_mlp.input_linear
    moe.shared.down                shared_mlp.output_linear
""")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    values = Values({**_DEFAULTS, **config})
    if values.raw("mamba_d_head") == "auto":
        values = Values({**_DEFAULTS, **config, "mamba_d_head": None})
    model = GRANITE.from_hf(config)
    mlp = model.layers[0].parts[-1]
    assert isinstance(mlp, MlpConfig)
    size = values.integer("shared_intermediate_size", most=MOST["hidden"])
    ffn: Ffn = replace(mlp, hidden=size, bias=False)
    if count := values.integer("num_local_experts", least=0, most=MOST["heads"]):
        ffn = ExpertsConfig(
            experts=count, hidden=mlp.hidden, activation=mlp.activation,
            shared=SharedConfig(hidden=size), routing=RoutingConfig(
                chosen=values.integer("num_experts_per_tok", most=count),
                scores="softmax of the chosen",
            ),
        )  # fmt: skip
    attends = mamba2_mixer.attending_hf(values, len(model.layers))
    ssm = None
    if not all(attends):
        ssm = mamba2_mixer.from_hf(
            values, _KEYS, model.final_norm.eps, mamba2_mixer.bounds(values),
            inner=values.integer("mamba_expand", most=64) * model.width,
        )  # fmt: skip
    model = _hybrid(model, [ffn] * len(attends), [None if one else ssm for one in attends])
    if values.text("position_embedding_type", "nope") == "rope":
        return model
    return replace(model, layers=tuple(
        layer if (a := layer.attention) is None else layer.with_attention(replace(a, rope=None))
        for layer in model.layers
    ))  # fmt: skip


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig: a layer without key/value heads is Mamba-2."""
    values = Values(metadata, prefix=f"{Values(metadata).text('general.architecture')}.")
    filled, numbers = mamba2_mixer.as_llama(metadata)
    model = GRANITE.from_gguf(filled, tensors)
    eps = model.final_norm.eps
    mixers = [
        None if heads else mamba2_mixer.from_gguf(values, tensors, layer, eps)
        for layer, heads in enumerate(numbers[mamba2_mixer.KV_HEADS])
    ]
    return _hybrid(model, [layer.parts[-1] for layer in model.layers], mixers)


def _hybrid(
    model: ModelConfig, ffns: Sequence[object], mixers: Sequence[SsmConfig | None]
) -> ModelConfig:
    """Granite with these feed-forwards, and these mixers in place of attention unless None."""
    layers = []
    for layer, ffn, mixer in zip(model.layers, ffns, mixers, strict=True):
        multiplier = layer.sublayers[0][0].multiplier
        parts = (layer.attention if mixer is None else mixer, ffn)
        layers.append(sequential(*parts, norm=model.final_norm, multiplier=multiplier))
    return replace(
        model, family="granite_hybrid", model_type="granitemoehybrid", layers=tuple(layers)
    )


FAMILIES = (Family(
    name="granite_hybrid", words="as granite with Mamba-2 in most layers, rotary positions where "
    "it says so, a shared expert beside others (softmax of the chosen) or alone",
    hf_types=("granitemoehybrid",), gguf_archs=("granitehybrid",),
    gguf_reads=GGUF_SCALES, from_hf=from_hf,
    from_gguf=from_gguf, rules_hf=_NAMES.hf, rules_gguf=_NAMES.gguf,
    mixers=("Mamba-2", "attention"), feed_forwards=("gated MLP", "mixture of experts"),
),)  # fmt: skip
