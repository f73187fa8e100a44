"""Reads a Llama: RMSNorm, RoPE, grouped-query attention, gated SiLU MLP.

Defaults of a config.json are those of transformers' `LlamaConfig`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli.config.attention import AttentionConfig, ScoreConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.mlp import Activation, MlpConfig
from llmcli.config.model import LayerConfig, ModelConfig, sequential
from llmcli.config.norm import NormConfig
from llmcli.families import mixture
from llmcli.families.read import (
    activation,
    end_ids,
    gguf_ends,
    gguf_layers,
    gguf_numbers,
    gguf_vocab,
    refuse_other_parts,
)
from llmcli.families.rope import rope_from_gguf, rope_from_hf
from llmcli.families.values import LIMITS, ConfigReader, require_divisible

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo


def from_hf(
    values: ConfigReader,
    *,
    function: Activation = "silu",
    rotary: bool = True,
    rotated: float | None = None,
    expansion: int | None = None,
) -> ModelConfig:
    """config.json → ModelConfig.

    Sizes are required, but of a hidden layer of `expansion` widths. `rotated`: default share of a
    head with RoPE, for types with partial RoPE.
    """
    vocab = values.integer("vocab_size", most=LIMITS["vocab"])
    width = values.integer("hidden_size", most=LIMITS["width"])
    norm = NormConfig(kind="rms", eps=values.number("rms_norm_eps", 1e-6, above=False))
    mlp = MlpConfig(
        hidden=values.integer(
            "intermediate_size", expansion and expansion * width, most=LIMITS["hidden"]
        ),
        activation=activation(values, "hidden_act", function),
        gated=True,
        bias=values.flag("mlp_bias", False),
    )
    context = values.integer("max_position_embeddings", 2048, most=LIMITS["positions"])
    attention = _hf_attention(values, width)
    if rotary:
        rope = rope_from_hf(values, head_dim=attention.head_dim, context=context, share=rotated)
        attention = replace(attention, rope=rope)
    layers = values.integer("num_hidden_layers", most=LIMITS["layers"])
    bos, eos = end_ids(values, vocab, bos=1, eos=2)
    return ModelConfig(
        family="llama",
        model_type="llama",
        vocab=vocab,
        width=width,
        context=context,
        layers=(sequential(attention, mlp, norm=norm),) * layers,
        embedding=EmbeddingConfig(),
        final_norm=norm,
        head=HeadConfig(tied=values.flag("tie_word_embeddings", False)),
        bos=bos,
        eos=eos,
    )


def from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    *,
    function: Activation = "silu",
    rotary: bool = True,
    lacking: bool = False,
) -> ModelConfig:
    """GGUF metadata → ModelConfig. Biases, q/k norms and mixtures depend on the tensors present.

    `lacking`: layers may have 0 heads or neurons, and are given those of the others.
    """
    general = ConfigReader(metadata)
    arch = general.text("general.architecture")
    values = ConfigReader(metadata, prefix=f"{arch}.")
    refuse_other_parts(values, mixtures=arch in mixture.GGUF_ARCHS)
    width = values.integer("embedding_length", most=LIMITS["width"])
    vocab = gguf_vocab(metadata, values, tensors)
    bos, eos = gguf_ends(general, vocab)
    count = gguf_layers(values)
    context = values.integer("context_length", most=LIMITS["positions"])
    # the key for LayerNorm, whose families replace the norms
    eps = "attention.layer_norm_epsilon"
    eps = eps if values.has(eps) else "attention.layer_norm_rms_epsilon"
    norm = NormConfig(kind="rms", eps=values.number(eps, above=False))

    def numbers(key: str, most: int, default: Sequence[int] | None = None) -> Sequence[int]:
        found = gguf_numbers(values, key, most) if lacking else None
        if found is None:
            return values.per_layer(key, count, default, most=most)
        return [number or max(found) or 1 for number in found]

    heads = numbers("attention.head_count", LIMITS["heads"])
    kv_heads = numbers("attention.head_count_kv", LIMITS["heads"], heads)
    hidden = numbers("feed_forward_length", LIMITS["hidden"])

    def layer(index: int) -> LayerConfig:
        has = partial(_has, tensors, index)
        attention = _gguf_attention(values, width, heads[index], kv_heads[index])
        size, rope = attention.head_dim, None
        if rotary:
            rope = rope_from_gguf(values, tensors, head_dim=size, context=context)
        attention = replace(
            attention,
            rope=rope,
            qk_norm=norm if has("attn_q_norm.weight") else None,
            qkv_bias=has("attn_q.bias"),
            out_bias=has("attn_output.bias"),
        )
        if has("ffn_gate_inp.weight"):
            experts = mixture.from_gguf(
                values, arch, hidden[index], function, correction=has("exp_probs_b.bias")
            )
            return sequential(attention, experts, norm=norm)
        mlp = MlpConfig(
            hidden=hidden[index], activation=function, gated=True, bias=has("ffn_down.bias")
        )
        return sequential(attention, mlp, norm=norm)

    return ModelConfig(
        family="llama",
        model_type=arch,
        vocab=vocab,
        width=width,
        context=context,
        layers=tuple(layer(index) for index in range(count)),
        embedding=EmbeddingConfig(),
        final_norm=norm,
        head=HeadConfig(tied="output.weight" not in tensors),
        bos=bos,
        eos=eos,
    )


def _hf_attention(values: ConfigReader, width: int) -> AttentionConfig:
    heads = values.integer("num_attention_heads", most=LIMITS["heads"])
    kv_heads = values.integer("num_key_value_heads", heads, most=LIMITS["heads"])
    values.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if not values.has("head_dim"):
        head_dim = values.divide("hidden_size", width, "num_attention_heads", heads)
    else:
        head_dim = values.integer("head_dim", most=LIMITS["head_dim"])
    biased = values.flag("attention_bias", False)
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scores=ScoreConfig(scale=head_dim**-0.5),
        rope=None,
        qkv_bias=biased,
        out_bias=biased,
    )


def _gguf_attention(values: ConfigReader, width: int, heads: int, kv_heads: int) -> AttentionConfig:
    require_divisible("the number of heads", heads, "the number of key/value heads", kv_heads)
    usual = None
    if not (values.has("attention.key_length") and values.has("attention.value_length")):
        usual = require_divisible("the width", width, "the number of heads", heads)
    head_dim = values.integer("attention.key_length", usual, most=LIMITS["head_dim"])
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=values.integer("attention.value_length", usual, most=LIMITS["head_dim"]),
        scores=ScoreConfig(scale=head_dim**-0.5),
        rope=None,
    )


def _has(tensors: Container[str], layer: int, name: str) -> bool:
    return f"blk.{layer}.{name}" in tensors
