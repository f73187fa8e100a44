"""Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624): blocks of one part each.

The part is Mamba-2, attention without positions, an ungated feed-forward, or ungated experts with
sigmoid routing, a correction bias and a shared expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig, sequential
from llmcli.errors import UnsupportedModel
from llmcli.families import llama, mamba2_mixer, mixture
from llmcli.families.family import Family
from llmcli.families.names import LLAMA
from llmcli.families.values import MOST, Values, shortened
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.experts.config import ExpertsConfig, SharedConfig
from llmcli.parts.mlp.config import Activation, MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

_DEFAULTS = {  # `NemotronHConfig`'s
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 21504, "max_position_embeddings": 4096, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}  # fmt: skip
_FIRST = {  # names of the first releases take precedence
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
_KEYS = mamba2_mixer.Keys(
    heads="mamba_num_heads", head_dim="mamba_head_dim", groups="n_groups", state="ssm_state_size",
    length="conv_kernel", bias="use_bias", conv_bias="use_conv_bias", function="mamba_hidden_act",
)  # fmt: skip
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_TYPES = {**{kind: kind for kind in _PATTERN.values()},
          "linear_attention": "mamba", "full_attention": "attention"}  # fmt: skip
_NAMES = LLAMA.but(mamba2_mixer.MIXER + """
    embed     embeddings       token_embd
    ln_final  norm_f           output_norm
    ln1       norm             attn_norm
    attn.q    mixer.q_proj     attn_q
    attn.k    mixer.k_proj     attn_k
    attn.v    mixer.v_proj     attn_v
    attn.o    mixer.o_proj     attn_output
    mlp.up    mixer.up_proj    ffn_up
    mlp.down  mixer.down_proj  ffn_down
""", without="ln2 mlp.gate", prefixes=("model.", "backbone.", ""), predicts=True, experts="""
    moe.router       mixer.gate
    =moe.b_choice    mixer.gate.e_score_correction_bias
    moe.up           mixer.experts.{expert}.up_proj
    moe.down         mixer.experts.{expert}.down_proj
    =moe.W_up        mixer.experts.up_proj
    =moe.W_down      mixer.experts.down_proj
    moe.shared.up    mixer.shared_experts.up_proj
    moe.shared.down  mixer.shared_experts.down_proj
""")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    renamed = {new: config[old] for old, new in _FIRST.items() if config.get(old) is not None}
    # one shared expert, whose full width is given
    values = Values({**_DEFAULTS, **config, **renamed, "n_shared_experts": 1})
    kinds = _kinds(values)
    eps = values.number("layer_norm_epsilon", 1e-5, above=False)
    bias = values.flag("mlp_bias", False)
    own = {
        "model_type": "llama", "rms_norm_eps": eps, "num_hidden_layers": len(kinds),
        "attention_bias": False, "hidden_act": values.text("mlp_hidden_act", "relu2"),
        "mlp_bias": bias, "rope_parameters": None, "rope_scaling": None,
        "partial_rotary_factor": None, "tie_word_embeddings": False,  # transformers ties none
    }  # fmt: skip
    model = llama.from_hf({"bos_token_id": 1, "eos_token_id": 2, **_DEFAULTS, **config, **own})
    attention, mlp = llama.first_attention(model), model.layers[0].parts[-1]
    assert isinstance(mlp, MlpConfig)
    parts: dict[str, object] = {
        "attention": replace(attention, rope=None), "mlp": replace(mlp, gated=False),
    }  # fmt: skip
    if "mamba" in kinds:  # the only bound of dt that transformers reads
        least = values.number("time_step_min", 0.001, above=False)
        parts["mamba"] = mamba2_mixer.from_hf(values, _KEYS, eps, (least, math.inf))
    if "moe" in kinds:
        parts["moe"] = _experts(values, mlp.activation)
    return _nemotron(model, [parts[kind] for kind in kinds])


def _experts(values: Values, function: Activation) -> ExpertsConfig:
    _no_latents(values)
    if values.flag("mlp_bias", False):
        raise UnsupportedModel("`mlp_bias` = `true` is not supported beside experts")
    size = values.integer("moe_shared_expert_intermediate_size", most=MOST["hidden"])
    experts = mixture.from_hf(values, function)
    return replace(experts, gated=False, shared=SharedConfig(hidden=size))


def _no_latents(values: Values) -> None:
    key = "moe_latent_size"
    if values.raw(key):
        raise UnsupportedModel(
            f"`{key}` = `{shortened(values.raw(key))}` is not supported: experts read the width"
        )


def _kinds(values: Values) -> list[str]:
    """The type of each block, from a list of types or a string of letters."""
    key = "layer_types" if values.has("layer_types") else "layers_block_type"
    listed = values.raw(key)
    if listed is None:
        key = "hybrid_override_pattern"
        listed = [_PATTERN.get(one, one) for one in values.text(key, "ME*-")]
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST["layers"]:
        raise values.wrong(key, f"a type for each of 1 to {MOST['layers']} blocks")
    named = Values({"layer_types": listed}).layer_types(len(listed), _TYPES)
    return [_TYPES[kind] for kind in named]


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig: a block without key/value heads and neurons is Mamba-2."""
    arch = Values(metadata).text("general.architecture")
    values = Values(metadata, prefix=f"{arch}.")
    _no_latents(values)
    filled, numbers = mamba2_mixer.as_llama(metadata)
    if mamba2_mixer.NEURONS not in numbers:
        raise values.wrong(mamba2_mixer.NEURONS, "numbers for all layers")
    # unused without RoPE, and may exceed the head size
    unrotated = filled | {f"{arch}.rope.dimension_count": None}
    model = llama.from_gguf(unrotated, tensors, function="relu2")
    parts: list[object] = []
    for layer, of in enumerate(model.layers):
        attention, ffn = of.parts
        assert isinstance(attention, AttentionConfig)
        assert isinstance(ffn, MlpConfig | ExpertsConfig)
        if numbers[mamba2_mixer.KV_HEADS][layer]:
            parts.append(replace(attention, rope=None))
        elif numbers[mamba2_mixer.NEURONS][layer]:
            parts.append(replace(ffn, gated=False))
        else:
            eps = model.final_norm.eps
            parts.append(mamba2_mixer.from_gguf(values, tensors, layer, eps))
    return _nemotron(model, parts)


def _nemotron(model: ModelConfig, parts: Sequence[object]) -> ModelConfig:
    layers = tuple(sequential(part, norm=model.final_norm) for part in parts)
    return replace(model, family="nemotron_h", model_type="nemotron_h", layers=layers)


FAMILIES = (Family(
    name="nemotron_h", words="blocks of one part each: Mamba-2, attention without positions, a "
    "feed-forward without gates (ReLU²), or experts of that kind by sigmoids and a shared one",
    hf_types=("nemotron_h",), gguf_archs=("nemotron_h", "nemotron_h_moe"), from_hf=from_hf,
    from_gguf=from_gguf, rules_hf=_NAMES.hf, rules_gguf=_NAMES.gguf,
    mixers=("Mamba-2", "attention"), feed_forwards=("MLP", "mixture of experts"),
),)  # fmt: skip
