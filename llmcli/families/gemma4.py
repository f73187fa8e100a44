"""Gemma 4 (Google 2026), also as the text model of multimodal checkpoints.

Pre- and post-norms as in Gemma 3 but multiplying by w, not 1 + w, and normalized values. Layers
without a window have another head size, rotate only some pairs and may use keys as values. The last
layers may share keys and values of earlier ones; per-layer embeddings enter each block. A mixture
of experts may run in parallel to each dense feed-forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama, mixture
from llmcli.families.family import Family
from llmcli.families.gemma import NAMES
from llmcli.families.gemma4_blocks import gemma4
from llmcli.families.names import Names
from llmcli.families.read import (
    GGUF_WINDOWS,
    activation,
    gguf_windows,
    hf_layer,
    hf_windows,
)
from llmcli.families.rope import of_layer_type, rope_from_hf
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig, KeysValues, RopeConfig
from llmcli.parts.experts.config import ExpertsConfig, RoutingConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULTS: Mapping[str, Any] = {  # `Gemma4TextConfig`'s
    "vocab_size": 262_144, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
_ROPES: Mapping[str, Any] = {
    _SLIDING: {"rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}

_DENSE = NAMES.but("""
    =ple.embed.W      embed_tokens_per_layer.weight      per_layer_token_embd.weight
    =ple.W_proj       per_layer_model_projection.weight  per_layer_model_proj.weight
    =ple.proj_norm.w  per_layer_projection_norm.weight   per_layer_proj_norm.weight
    ple.gate          per_layer_input_gate               inp_gate
    ple.out           per_layer_projection               proj
    ln3_post          post_per_layer_input_norm          post_norm
    =out_scale.w      layer_scalar                       layer_output_scale.weight
""", experts="")
_WITH_EXPERTS = _DENSE.but("""
    ln3                   pre_feedforward_layernorm_2   pre_ffw_norm_2
    ln2_post              post_feedforward_layernorm_1  post_ffw_norm_1
    ln3_post              post_feedforward_layernorm_2  post_ffw_norm_2
    ln4_post              post_per_layer_input_norm     post_norm
    sum_norm              post_feedforward_layernorm    post_ffw_norm
    =moe.router_norm.w    router.scale|by_width         ffn_gate_inp.scale|by_width
    =moe.expert_factor    router.per_expert_scale       ffn_down_exps.scale
    =moe.W_gate+moe.W_up  experts.gate_up_proj          -
    =moe.W_down           experts.down_proj             -
    moe.router            router.proj                   -
""")


def _names(config: ModelConfig) -> Names:
    return _DENSE if mixture.found_in(config) is None else _WITH_EXPERTS


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig; sizes are given by layer type or as transformers 5 writes them."""
    values = Values(config)
    layers = values.integer("num_hidden_layers", most=MOST["layers"])
    windows = hf_windows(values, layers, period=6, window=512)
    windows[-1] = None  # always, as in transformers
    settings = {
        **_DEFAULTS, **config, "model_type": "llama", "mlp_bias": False,
        "hidden_act": values.text("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": _ropes(values, {_SLIDING if window else _FULL for window in windows}),
    }  # fmt: skip
    model = llama.from_hf(of_layer_type(settings, _SLIDING, theta=10_000.0))
    shared = values.integer("num_kv_shared_layers", 0, least=0, most=len(windows))
    equal, wide = (values.flag(key, False) for key in ("attention_k_eq_v", "use_double_wide_mlp"))
    whole = {"head_dim": config.get("global_head_dim", 512)}
    whole |= {"num_key_value_heads": config.get("num_global_key_value_heads")} if equal else {}

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        window, kind = windows[number], _SLIDING if windows[number] else _FULL
        own = hf_layer(values, number, whole if window is None else {})
        size = own.integer("head_dim", attention.head_dim, most=MOST["head_dim"])
        turned = Values(of_layer_type(settings, kind, theta=1e6))
        attention = replace(
            attention, head_dim=size, value_dim=size, window=window,
            kv_heads=own.integer("num_key_value_heads", attention.kv_heads, most=MOST["heads"]),
            rope=rope_from_hf(turned, head_dim=size, context=model.context),
            kv=KeysValues(equal=equal and window is None),
        )  # fmt: skip
        if wide and number >= len(windows) - shared:
            mlp = replace(mlp, hidden=2 * mlp.hidden)
        return replace(sequential(attention, mlp, norm=None), scaled=True)

    experts = None
    if values.flag("enable_moe_block", False):
        count = values.integer("num_experts", most=MOST["heads"])
        experts = ExpertsConfig(
            experts=count, hidden=values.integer("moe_intermediate_size", most=MOST["hidden"]),
            activation=activation(values, "hidden_activation", "gelu_pytorch_tanh"),
            routing=RoutingConfig(chosen=values.integer("top_k_experts", most=count)),
        )  # fmt: skip
    size = values.integer("hidden_size_per_layer_input", 256, least=0, most=MOST["width"])
    rows = values.integer("vocab_size_per_layer_input", 262_144, least=0, most=MOST["vocab"])
    cap = values.optional_number("final_logit_softcapping")
    model = replace(model, head=replace(model.head, cap=cap), model_type=config["model_type"])
    model = llama.rebuilt(model, block)
    return gemma4(model, experts, shared=shared, size=size, rows=rows, rounded=True)


def _ropes(values: Values, kinds: Collection[str]) -> Mapping[str, Any]:
    """RoPE settings by layer type; `rope_theta` is required for every type in `kinds`."""
    if not values.has("rope_parameters"):
        return _ROPES
    written = values.section("rope_parameters") or Values({})
    for kind in kinds:
        (written.section(kind) or Values({})).number("rope_theta")
    return written.all()


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig. A layer without a value tensor uses its keys as values."""
    arch, key = metadata["general.architecture"], "final_logit_softcapping"
    values = Values(metadata, prefix=f"{arch}.")
    rest = {name: value for name, value in metadata.items() if not name.endswith(key)}
    router = "ffn_gate_inp.weight"
    dense = {name: info for name, info in tensors.items() if not name.endswith(router)}
    model = llama.from_gguf(rest, dense, function="gelu_tanh")
    experts = None
    if len(dense) < len(tensors):
        experts = mixture.from_gguf(values, arch, 0, "gelu_tanh", correction=False)
    shared = values.integer("attention.shared_kv_layers", 0, least=0, most=len(model.layers))
    windows = gguf_windows(values, len(model.layers), period=6, window=None)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        kv = KeysValues(equal=f"blk.{number}.attn_v.weight" not in tensors)
        attention = replace(attention, window=windows[number], qk_norm=None, kv=kv)
        if attention.window is not None:
            size = attention.head_dim
            size = values.integer("attention.key_length_swa", size, most=MOST["head_dim"])
            dims = values.integer("rope.dimension_count_swa", size, least=2, most=size)
            rope = RopeConfig(theta=values.number("rope.freq_base_swa", 10_000.0), dims=dims)
            attention = replace(attention, head_dim=size, value_dim=size, rope=rope)
        scaled = f"blk.{number}.layer_output_scale.weight" in tensors
        return replace(sequential(attention, mlp, norm=None), scaled=scaled)

    size = values.integer("embedding_length_per_layer_input", 0, least=0, most=MOST["width"])
    table = tensors.get("per_layer_token_embd.weight", tensors.get("token_embd.weight"))
    cap = values.number(key, 0.0, above=False) or None
    model = llama.rebuilt(model, block, head=replace(model.head, cap=cap))
    rows = table.shape[0] if table else model.vocab
    return gemma4(model, experts, shared=shared, size=size, rows=rows)


FAMILIES = (Family(
    name="gemma4",
    words="normalized values, keys as values or of other layers, embeddings for each layer, "
    "experts beside the MLP",
    hf_types=("gemma4_text",), gguf_archs=("gemma4",), hf_multimodal=("gemma4",),
    gguf_reads=(*GGUF_WINDOWS, "final_logit_softcapping"),
    from_hf=from_hf, from_gguf=from_gguf, rules_hf=lambda config: _names(config).hf(config),
    rules_gguf=lambda config: _names(config).gguf(config),
    feed_forwards=("gated MLP", "mixture of experts", "per-layer embeddings"),
),)  # fmt: skip
