"""Llama 2/3, Mistral, SmolLM, Qwen 2/3: RMSNorm, RoPE, grouped-query attention, gated SiLU MLP.

The types differ in defaults, biases, q/k norms and windows: values in `_TYPES`, as in transformers'
configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.errors import CheckpointError
from llmcli.families import mixture, names
from llmcli.families.family import Family
from llmcli.families.read import GgufHeader, activation, end_ids, gguf_header
from llmcli.families.rope import rope_from_gguf, rope_from_hf
from llmcli.families.values import MOST, NO_KEYS, Values, require_divisible
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.mlp.config import Activation, MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo


@dataclass(frozen=True, kw_only=True)
class _Type:
    """Defaults of one `model_type`; a bias of None is read from the configuration."""

    context: int
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    window: int | None = None
    window_by_layer: bool = False
    bos: int | None = None
    eos: int | None = None


_TYPES = {
    "llama": _Type(context=2048, qkv_bias=None, out_bias=None, mlp_bias=None, bos=1, eos=2),
    "mistral": _Type(context=131072, kv_heads=8, window=4096, bos=1, eos=2),
    "ministral": _Type(
        context=131072, kv_heads=8, window=4096, window_by_layer=True, bos=1, eos=2
    ),
    "qwen2": _Type(context=32768, kv_heads=32, window=4096, window_by_layer=True, qkv_bias=True),
    "qwen3": _Type(
        context=32768,
        kv_heads=32,
        head_dim=128,
        qkv_bias=None,
        out_bias=None,
        qk_norm=True,
        window=4096,
        window_by_layer=True,
    ),
}


def from_hf(
    config: Mapping[str, Any], *, rotated: float | None = None, keys: Mapping[str, str] = NO_KEYS
) -> ModelConfig:
    """config.json → ModelConfig.

    Sizes are required; other defaults are transformers'. `rotated`: default share of a head with
    RoPE, for types with partial RoPE. `keys`: the type's own names of some settings.
    """
    values = Values(config, keys=keys)
    model_type = values.text("model_type")
    kind = _TYPES[model_type]
    vocab = values.integer("vocab_size", most=MOST["vocab"])
    width = values.integer("hidden_size", most=MOST["width"])
    norm = NormConfig(kind="rms", eps=values.number("rms_norm_eps", 1e-6, above=False))
    mlp = MlpConfig(
        hidden=values.integer("intermediate_size", most=MOST["hidden"]),
        activation=activation(values, "hidden_act", "silu"),
        gated=True,
        bias=values.flag("mlp_bias", False) if kind.mlp_bias is None else kind.mlp_bias,
    )
    context = values.integer("max_position_embeddings", kind.context, most=MOST["positions"])
    attention = _hf_attention(values, kind, width, context, norm, rotated)
    layers = values.integer("num_hidden_layers", most=MOST["layers"])
    bos, eos = end_ids(values, vocab, bos=kind.bos, eos=kind.eos)
    return ModelConfig(
        family="qwen" if model_type in QWEN.hf_types else "llama",
        model_type=model_type,
        vocab=vocab,
        width=width,
        context=context,
        layers=tuple(
            sequential(replace(attention, window=window), mlp, norm=norm)
            for window in _windows(values, kind, layers)
        ),
        embedding=EmbeddingConfig(),
        final_norm=norm,
        head=HeadConfig(tied=values.flag("tie_word_embeddings", False)),
        bos=bos,
        eos=eos,
    )


def from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], *,
    function: Activation = "silu",
) -> ModelConfig:  # fmt: skip
    """GGUF metadata → ModelConfig. Biases, q/k norms and mixtures depend on the tensors present."""
    header = gguf_header(metadata, tensors, mixtures=mixture.GGUF_ARCHS)
    values, count = header.values, header.layers
    # the key for LayerNorm, whose families replace the norms
    eps = "attention.layer_norm_epsilon"
    eps = eps if values.has(eps) else "attention.layer_norm_rms_epsilon"
    norm = NormConfig(kind="rms", eps=values.number(eps, above=False))
    heads = values.per_layer("attention.head_count", count, most=MOST["heads"])
    kv_heads = values.per_layer("attention.head_count_kv", count, heads, most=MOST["heads"])
    hidden = values.per_layer("feed_forward_length", count, most=MOST["hidden"])

    def layer(index: int) -> LayerConfig:
        has = partial(_has, tensors, index)
        attention = _gguf_attention(header, tensors, heads[index], kv_heads[index])
        attention = replace(
            attention,
            qk_norm=norm if has("attn_q_norm.weight") else None,
            qkv_bias=has("attn_q.bias"),
            out_bias=has("attn_output.bias"),
        )
        if has("ffn_gate_inp.weight"):
            experts = mixture.from_gguf(
                values, header.arch, hidden[index], function, correction=has("exp_probs_b.bias")
            )
            return sequential(attention, experts, norm=norm)
        mlp = MlpConfig(
            hidden=hidden[index], activation=function, gated=True, bias=has("ffn_down.bias")
        )
        return sequential(attention, mlp, norm=norm)

    mixes = _has(tensors, count - 1, "ffn_gate_inp.weight")
    return ModelConfig(
        family="qwen" if header.arch in QWEN.gguf_archs else "mixtral" if mixes else "llama",
        model_type=header.arch,
        vocab=header.vocab,
        width=header.width,
        context=header.context,
        layers=tuple(layer(index) for index in range(count)),
        embedding=EmbeddingConfig(),
        final_norm=norm,
        head=HeadConfig(tied=header.tied),
        bos=header.bos,
        eos=header.eos,
    )


def first_attention(model: ModelConfig) -> AttentionConfig:
    """The attention of the first layer."""
    found = model.layers[0].attention
    assert found is not None
    return found


def rebuilt(
    model: ModelConfig,
    block: Callable[[int, AttentionConfig, Any], LayerConfig],
    **changes: Any,
) -> ModelConfig:
    """Rebuild every layer with `block(number, attention, feed_forward)`."""
    layers = []
    for number, layer in enumerate(model.layers):
        attention, mlp = layer.parts
        assert isinstance(attention, AttentionConfig)
        assert isinstance(mlp, MlpConfig | ExpertsConfig)
        layers.append(block(number, attention, mlp))
    return replace(model, layers=tuple(layers), **changes)


def _hf_attention(
    values: Values, kind: _Type, width: int, context: int, norm: NormConfig,
    rotated: float | None,
) -> AttentionConfig:  # fmt: skip
    heads = values.integer("num_attention_heads", most=MOST["heads"])
    # Absent: the type's default; an explicit null: the number of query heads.
    usual = heads if values.says("num_key_value_heads") or kind.kv_heads is None else kind.kv_heads
    kv_heads = values.integer("num_key_value_heads", usual, most=MOST["heads"])
    require_divisible("`num_attention_heads`", heads, "`num_key_value_heads`", kv_heads)
    if kind.head_dim is None and not values.has("head_dim"):
        head_dim = require_divisible("`hidden_size`", width, "`num_attention_heads`", heads)
    else:
        head_dim = values.integer("head_dim", kind.head_dim, most=MOST["head_dim"])
    biased = values.flag("attention_bias", False)
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope_from_hf(values, head_dim=head_dim, context=context, share=rotated),
        qk_norm=norm if kind.qk_norm else None,
        qkv_bias=biased if kind.qkv_bias is None else kind.qkv_bias,
        out_bias=biased if kind.out_bias is None else kind.out_bias,
    )


def _gguf_attention(
    header: GgufHeader, tensors: Mapping[str, TensorInfo], heads: int, kv_heads: int
) -> AttentionConfig:
    values = header.values
    require_divisible("the number of heads", heads, "the number of key/value heads", kv_heads)
    usual = None
    if not (values.has("attention.key_length") and values.has("attention.value_length")):
        usual = require_divisible("the width", header.width, "the number of heads", heads)
    head_dim = values.integer("attention.key_length", usual, most=MOST["head_dim"])
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=values.integer("attention.value_length", usual, most=MOST["head_dim"]),
        scale=head_dim**-0.5,
        rope=rope_from_gguf(values, tensors, head_dim=head_dim, context=header.context),
    )


def _windows(values: Values, kind: _Type, layers: int) -> list[int | None]:
    """The window of every layer: Mistral has one for all, others list the layers that have it."""
    if kind.window is None:
        return [None] * layers
    window = None
    if values.has("sliding_window") or not values.says("sliding_window"):
        window = values.integer("sliding_window", kind.window, most=MOST["positions"])
    if not kind.window_by_layer:
        return [window] * layers
    qwen = values.text("model_type") in QWEN.hf_types  # only these have two more settings
    if qwen and not values.flag("use_sliding_window", False):
        window = None
    if not values.has("layer_types"):
        if not qwen:
            return [window] * layers
        first = values.integer("max_window_layers", 28, least=0, most=MOST["layers"])
        return [window if index >= first else None for index in range(layers)]
    by_type = {"full_attention": None, "sliding_attention": window}
    listed = values.layer_types(layers, by_type)
    if "sliding_attention" in listed and window is None:
        raise CheckpointError("`layer_types` has windows but `sliding_window` is not in use")
    return [by_type[name] for name in listed]


def _has(tensors: Container[str], layer: int, name: str) -> bool:
    return f"blk.{layer}.{name}" in tensors


LLAMA = Family(
    name="llama",
    words="RMSNorm, rotary positions (linear, dynamic, llama3, yarn, longrope), grouped queries, "
    "gated SiLU MLP; biases, window and tied head as configured",
    hf_types=("llama", "mistral", "ministral"),
    hf_multimodal=("mistral3",),
    gguf_archs=("llama",),
    ran=("smollm2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    rules_hf=names.LLAMA.hf,
    rules_gguf=names.LLAMA.gguf,
)
QWEN = Family(
    name="qwen",
    words="the same with biases of q, k, v (qwen2) or normalized queries and keys (qwen3), "
    "windows by layer",
    hf_types=("qwen2", "qwen3"),
    gguf_archs=("qwen2", "qwen3"),
    from_hf=from_hf,
    from_gguf=from_gguf,
    rules_hf=names.QWEN.hf,
    rules_gguf=names.QWEN.gguf,
)
FAMILIES = (LLAMA, QWEN)
