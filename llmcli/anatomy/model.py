"""The whole model's tensors, assembled from its parts in the order in which they are used."""

from __future__ import annotations

from llmcli.anatomy.attention import (
    attention_activations,
    attention_parameters,
    attention_states,
)
from llmcli.anatomy.embedding import (
    embedding_activations,
    embedding_parameters,
    head_activations,
    head_parameters,
)
from llmcli.anatomy.mlp import mlp_activations, mlp_parameters
from llmcli.anatomy.norm import norm_activations, norm_formula, norm_parameters
from llmcli.anatomy.spec import Call, Logits, Phase, TensorSpec
from llmcli.config import LayerConfig, ModelConfig, NormConfig


def parameters(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every parameter of the model in execution order; a tied head has none of its own."""
    specs = list(embedding_parameters(config.embedding, config.vocab, config.width))
    for index, layer in enumerate(config.layers):
        block = f"blocks.{index}"
        specs += _norm_parameters(config, layer.ln1, f"{block}.ln1", ("X", "T¹"), index)
        specs += attention_parameters(layer.mixer, f"{block}.attn", config.width, layer=index)
        specs += _norm_parameters(config, layer.ln2, f"{block}.ln2", ("T³", "T⁴"), index)
        specs += mlp_parameters(layer.ffn, f"{block}.mlp", config.width, layer=index)
    specs += _norm_parameters(config, config.final_norm, "ln_final", ("H", "H′"), None)
    specs += head_parameters(config.head, config.vocab, config.width)
    return tuple(specs)


def activations(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    phase: Phase,
    logits: Logits = "all",
    dtype: str | None = None,
) -> tuple[TensorSpec, ...]:
    """Every activation that one forward call emits, in execution order.

    `batch` sequences bring `tokens` new positions each after `past` cached ones; with
    `logits="last"` only the last position goes through the final norm and the head, with `none`
    no position does.
    """
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    return tuple(spec for spec in _executed(config, call, logits) if spec.written)


def unwritten(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    phase: Phase,
    dtype: str | None = None,
) -> tuple[TensorSpec, ...]:
    """What the same call computes but never has in memory: every layer's `attn.scores`,
    `attn.pattern` and `attn.result`, which are derived from what it emits.
    """
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    return tuple(spec for spec in _executed(config, call, "all") if not spec.written)


def calculated(
    config: ModelConfig,
    *,
    batch: int,
    tokens: int,
    past: int,
    phase: Phase,
    logits: Logits = "all",
    dtype: str | None = None,
) -> tuple[TensorSpec, ...]:
    """`activations` and `unwritten` together, in execution order."""
    call = Call(batch=batch, tokens=tokens, past=past, phase=phase, dtype=dtype)
    return tuple(_executed(config, call, logits))


def states(
    config: ModelConfig, *, batch: int, capacity: int, dtype: str | None = None
) -> tuple[TensorSpec, ...]:
    """What is kept between calls: the key/value cache of every layer for `capacity` positions."""
    return tuple(
        spec
        for index, layer in enumerate(config.layers)
        for spec in attention_states(
            layer.mixer, batch=batch, capacity=capacity, dtype=dtype, layer=index
        )
    )


def _norm_parameters(
    config: ModelConfig, norm: NormConfig, prefix: str, letters: tuple[str, str], index: int | None
) -> tuple[TensorSpec, ...]:
    formula = norm_formula(norm, *letters)
    return norm_parameters(prefix, "D", config.width, formula, bias=norm.bias, layer=index)


def _executed(config: ModelConfig, call: Call, logits: Logits) -> list[TensorSpec]:
    specs = list(embedding_activations(config.embedding, config.width, call))
    for index, layer in enumerate(config.layers):
        specs += _block_activations(config, layer, index, call)
    if logits == "none":
        return specs
    last = call.tokens if logits == "all" else 1
    specs += norm_activations(
        config.final_norm, "ln_final", ("H", "H′"), config.width, call, layer=None, tokens=last
    )
    specs += head_activations(config.head, config.vocab, config.width, call, tokens=last)
    return specs


def _block_activations(
    config: ModelConfig, layer: LayerConfig, index: int, call: Call
) -> list[TensorSpec]:
    block, width = f"blocks.{index}", config.width
    mixer, ffn = layer.mixer, layer.ffn
    stream = {"T": call.tokens, "D": width}

    def residual(name: str, formula: str, flops: int = 0, shares: str | None = None) -> TensorSpec:
        return call.activation(
            f"{block}.{name}", stream, formula, flops=flops, layer=index, wide=True, shares=shares
        )

    def norm(name: str, config: NormConfig, letters: tuple[str, str]) -> tuple[TensorSpec, ...]:
        return norm_activations(
            config, f"{block}.{name}", letters, width, call, layer=index, tokens=call.tokens
        )

    before = f"blocks.{index - 1}.resid_post"
    entry = residual("resid_pre", f"X = H of block {index - 1} = T⁵ + T³", shares=before)
    if index == 0 and config.embedding.positions is None:
        entry = residual("resid_pre", "X = E", shares="embed")
    elif index == 0:
        entry = residual("resid_pre", "X = E + P")
    z_columns = mixer.heads * mixer.value_dim
    return [
        entry,
        *norm("ln1", layer.ln1, ("X", "T¹")),
        *attention_activations(mixer, f"{block}.attn", width, call, layer=index),
        residual(
            "attn_out",
            "T² = C W_o" + (" + b_o" if mixer.out_bias else ""),
            call.product_flops(z_columns, width),
        ),
        residual("resid_mid", "T³ = T² + X"),
        *norm("ln2", layer.ln2, ("T³", "T⁴")),
        *mlp_activations(ffn, f"{block}.mlp", width, call, layer=index),
        residual(
            "mlp_out",
            "T⁵ = L W_down" + (" + b_down" if ffn.bias else ""),
            call.product_flops(ffn.hidden, width),
        ),
        residual("resid_post", "H = T⁵ + T³"),
    ]
