"""Gemma 4 (Google 2026), also as the text model of multimodal checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.config.attention import KeysValues, RopeConfig
from llmcli.config.embedding import EmbeddingConfig, LayerEmbeddingConfig
from llmcli.config.experts import ExpertsConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import Branch, LayerConfig, ModelConfig
from llmcli.config.ple import PleConfig
from llmcli.errors import CheckpointError
from llmcli.families import mixture
from llmcli.families.draft import Draft
from llmcli.families.gemma import NAMES
from llmcli.families.names import Names
from llmcli.families.read import gguf_windows, hf_layer, hf_windows
from llmcli.families.record import family
from llmcli.families.rope import of_layer_type, rope_from_hf
from llmcli.families.values import LIMITS, ConfigReader

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Mapping[str, Any] = {
    _SLIDING: {"rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_CAP = "final_logit_softcapping"


def _hf(m: Draft) -> int:
    """Read a config.json: sizes by layer type, or as transformers 5 writes them.

    Returns the number of last layers that use keys and values of earlier ones.
    """
    values, layers = m.values, len(m.ffn)
    settings, windows = _settings(values.all()), _windows(values)
    shared = values.integer("num_kv_shared_layers", 0, least=0, most=layers)
    equal, wide = (values.flag(key, False) for key in ("attention_k_eq_v", "use_double_wide_mlp"))
    whole = {"head_dim": values.all().get("global_head_dim", 512)}
    whole |= {"num_key_value_heads": values.raw("num_global_key_value_heads")} if equal else {}
    for number, window in enumerate(windows):
        attention, kind = m.attention[number], _SLIDING if window else _FULL
        own = hf_layer(values, number, whole if window is None else {})
        size = own.integer("head_dim", attention.head_dim, most=LIMITS["head_dim"])
        turned = ConfigReader(of_layer_type(settings, kind, theta=1e6))
        m.attention[number] = attention.changed(
            head_dim=size,
            value_dim=size,
            window=window,
            kv_heads=own.integer("num_key_value_heads", attention.kv_heads, most=LIMITS["heads"]),
            rope=rope_from_hf(turned, head_dim=size, context=m.model.context),
            kv=replace(attention.kv, equal=equal and window is None),
        )
        if wide and number >= layers - shared:
            m.ffn[number] = replace(m.ffn[number], hidden=2 * m.ffn[number].hidden)
    experts = None
    if values.flag("enable_moe_block", False):
        function = m.ffn[0].activation
        experts = mixture.read(values, "num_experts", function, chosen="top_k_experts")
    size = values.integer("hidden_size_per_layer_input", 256, least=0, most=LIMITS["width"])
    rows = values.integer("vocab_size_per_layer_input", 262_144, least=0, most=LIMITS["vocab"])
    cap = values.optional_number(_CAP)
    m.others["head"] = replace(m.model.head, cap=cap)
    _embed(m, size, rows)
    m.change = lambda number, layer: _block(m, layer, experts, size, scaled=True)
    return shared


def _windows(values: ConfigReader) -> list[int | None]:
    layers = values.integer("num_hidden_layers", most=LIMITS["layers"])
    windows = hf_windows(values, layers, period=6, window=512)
    windows[-1] = None  # always, as in transformers
    return windows


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with RoPE by layer type; `rope_theta` is required for every type of a layer."""
    values = ConfigReader(settings)
    function, ropes = values.text("hidden_activation", "gelu_pytorch_tanh"), _ROPES
    if values.has("rope_parameters"):
        written = values.section("rope_parameters") or ConfigReader({})
        for window in _windows(values):
            kind = _SLIDING if window else _FULL
            (written.section(kind) or ConfigReader({})).number("rope_theta")
        ropes = written.all()
    return {**settings, "hidden_act": function, "rope_parameters": ropes}


def _gguf(m: Draft) -> int:
    """Read GGUF metadata; a layer without a value tensor uses its keys as values.

    Returns the number of last layers that use keys and values of earlier ones.
    """
    values, layers, experts = m.values, len(m.ffn), None
    if any(isinstance(one, ExpertsConfig) for one in m.ffn):
        experts = mixture.from_gguf(values, m.kind, 0, "gelu_tanh", correction=False)
        hidden = values.per_layer("feed_forward_length", layers, most=LIMITS["hidden"])
        m.ffn = [MlpConfig(hidden=one, activation="gelu_tanh", gated=True) for one in hidden]
    windows = gguf_windows(values, layers, period=6, window=None)
    for number, window in enumerate(windows):
        attention = m.attention[number]
        kv = replace(attention.kv, equal=f"blk.{number}.attn_v.weight" not in m.tensors)
        m.attention[number] = attention = attention.changed(window=window, kv=kv)
        if window is not None:
            size = attention.head_dim
            size = values.integer("attention.key_length_swa", size, most=LIMITS["head_dim"])
            dims = values.integer("rope.dimension_count_swa", size, least=2, most=size)
            rope = RopeConfig(theta=values.number("rope.freq_base_swa", 10_000.0), dims=dims)
            m.attention[number] = replace(attention, head_dim=size, value_dim=size, rope=rope)
    size = values.integer("embedding_length_per_layer_input", 0, least=0, most=LIMITS["width"])
    table = m.tensors.get("per_layer_token_embd.weight", m.tensors.get("token_embd.weight"))
    _embed(m, size, table.shape[0] if table else m.model.vocab)
    cap = values.number(_CAP, 0.0, above=False) or None
    m.others |= {"head": replace(m.model.head, cap=cap), "model_type": m.kind}
    m.change = lambda number, layer: _block(
        m, layer, experts, size, scaled=f"blk.{number}.layer_output_scale.weight" in m.tensors
    )
    return values.integer("attention.shared_kv_layers", 0, least=0, most=layers)


def _embed(m: Draft, size: int, rows: int) -> None:
    """Scale embeddings by √D, rounded to the weights' dtype if the file is not GGUF.

    Per-layer embeddings are of width `size` (0: none), with `rows` tokens.
    """
    if size and rows < m.model.vocab:
        raise CheckpointError(f"embeddings for each layer of {rows} tokens, not {m.model.vocab}")
    width, own = m.model.width, None
    if size:
        # normalizing a projection scaled by width^-½ equals normalizing it with a larger ε
        norm, count = replace(m.norm, eps=m.norm.eps * width), len(m.ffn)
        own = LayerEmbeddingConfig(vocab=rows, layers=count, size=size, scale=size**0.5, norm=norm)
    m.others["embedding"] = EmbeddingConfig(scale=width**0.5, rounded_scale=m.hf, per_layer=own)


def _block(
    m: Draft, layer: LayerConfig, experts: ExpertsConfig | None, size: int, *, scaled: bool
) -> LayerConfig:
    """Add experts in parallel to the feed-forward, and a layer's embeddings of width `size`.

    Experts have pre- and post-norm; a norm follows the sum. The router's norm multiplies by a
    vector and D^-½, which is folded into the loaded weights.
    """
    attention, (mlp,) = layer.sublayers
    activation, sublayers = m.ffn[0].activation, layer.sublayers
    if experts is not None:
        routing = replace(experts.routing, renormalized=True, norm=m.norm, factors=True)
        sublayers = (attention, (mlp, replace(mlp, part=replace(experts, routing=routing))))
        layer = replace(layer, sum_norm=m.norm)
    if size:
        ple = Branch(part=PleConfig(size=size, activation=activation), post_norm=m.norm)
        sublayers = (*sublayers, (ple,))
    return replace(layer, sublayers=sublayers, scaled=scaled)


_DENSE = NAMES.but("""
    =ple.embed.W      embed_tokens_per_layer.weight      per_layer_token_embd.weight
    =ple.W_proj       per_layer_model_projection.weight  per_layer_model_proj.weight
    =ple.proj_norm.w  per_layer_projection_norm.weight   per_layer_proj_norm.weight
    ple.gate          per_layer_input_gate               inp_gate
    ple.out           per_layer_projection               proj
    ln3_post          post_per_layer_input_norm          post_norm
    =out_scale.w      layer_scalar                       layer_output_scale.weight
    experts: -
""")
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
    mixes = any(isinstance(part, ExpertsConfig) for part in config.layers[0].parts)
    return _WITH_EXPERTS if mixes else _DENSE


@family(
    """
    gemma4: normalized values, keys as values or of other layers, embeddings for each layer,
        experts beside the MLP
    types: gemma4_text | gemma4
    hf_multimodal: gemma4
    gguf_reads: windows final_logit_softcapping
    feed_forwards: gated MLP, mixture of experts, per-layer embeddings
    options: function=gelu_tanh
    fixed: mlp_bias=false
    defaults: vocab_size=262144 num_key_value_heads=4 head_dim=256 rms_norm_eps=1e-6
        max_position_embeddings=131072 tie_word_embeddings=true bos_token_id=2 eos_token_id=1
    """,
    names=_names,
    prepare=lambda settings: of_layer_type(_settings(settings), _SLIDING, theta=10_000.0),
)
def gemma4(m: Draft) -> None:
    """Pre- and post-norms as in Gemma 3 but multiplying by w, not 1 + w, and normalized values.

    Layers without a window have another head size, rotate only some pairs and may use keys as
    values. The last layers may share keys and values of earlier ones; per-layer embeddings enter
    each block. A mixture of experts may run in parallel to each dense feed-forward.
    """
    m.post = True
    m.set_attention(scale=1.0, qk_norm=m.norm, kv=KeysValues(norm=replace(m.norm, weights=False)))
    shared = (_hf if m.hf else _gguf)(m)
    windows, first = [one.scores.window for one in m.attention], len(m.attention) - shared
    for number in range(first, len(windows)):
        alike = [n for n in range(first) if windows[n] == windows[number]]
        if not alike:
            raise CheckpointError(f"no layer has keys and values for layer {number} to share")
        attention = m.attention[number]
        kv = replace(attention.kv, equal=False, layer=alike[-1])
        m.attention[number] = replace(attention, kv=kv)
