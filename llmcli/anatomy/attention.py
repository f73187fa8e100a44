"""Softmax attention: H query heads over Hk key/value heads (Vaswani et al. 2017; GQA 2023)."""

from __future__ import annotations

import math
from collections.abc import Container

from llmcli.anatomy.norm import norm_formula, norm_parameters
from llmcli.anatomy.spec import Call, TensorSpec, projection
from llmcli.config import AttentionConfig, NormConfig


def entering(prefix: str, there: Container[str]) -> tuple[str, str]:
    """The names of queries and keys as they enter the product: rotated, normalized or plain.

    `there`: the names that the model has. `prefix`: `blocks.3.attn`.
    """
    query, key = (
        next(name for form in ("_rot", "_norm", "") if (name := f"{prefix}.{part}{form}") in there)
        for part in "qk"
    )
    return query, key


def cached(state: str, there: Container[str]) -> str:
    """The activation that a part of the cache holds: `blocks.0.attn.k_rot` of `cache.0.k`."""
    _, layer, part = state.split(".")
    prefix = f"blocks.{layer}.attn"
    return f"{prefix}.v" if part == "v" else entering(prefix, there)[1]


def attention_parameters(
    attention: AttentionConfig, prefix: str, width: int, *, layer: int
) -> tuple[TensorSpec, ...]:
    """`W_q` `[D, H·dh]`, `W_k` `[D, Hk·dh]`, `W_v` `[D, Hk·dv]`, `W_o` `[H·dv, D]` and biases.

    With `qk_norm` also `q_norm.w` and `k_norm.w` `[dh]`, shared by all heads.
    """
    a = attention
    outputs = (
        ("q", "Q", "H·dh", a.heads * a.head_dim),
        ("k", "K", "Hk·dh", a.kv_heads * a.head_dim),
        ("v", "V", "Hk·dv", a.kv_heads * a.value_dim),
    )
    specs: list[TensorSpec] = []
    for symbol, result, axis, size in outputs:
        formula = f"{result} = T¹ W_{symbol}"
        specs += projection(
            prefix,
            symbol,
            ("D", axis),
            (width, size),
            formula,
            bias=a.qkv_bias,
            layer=layer,
            fused="qkv",
        )
    if a.qk_norm is not None:
        for symbol in ("q", "k"):
            specs += norm_parameters(
                f"{prefix}.{symbol}_norm",
                "dh",
                a.head_dim,
                _qk_norm_formula(a.qk_norm, symbol.upper()),
                bias=a.qk_norm.bias,
                layer=layer,
            )
    specs += projection(
        prefix,
        "o",
        ("H·dv", "D"),
        (a.heads * a.value_dim, width),
        "T² = C W_o",
        bias=a.out_bias,
        layer=layer,
    )
    return tuple(specs)


def attention_activations(
    attention: AttentionConfig, prefix: str, width: int, call: Call, *, layer: int
) -> tuple[TensorSpec, ...]:
    """`q k v`, then `q_norm k_norm`, `q_rot k_rot` where the part has them, then `z`.

    `scores` and `pattern` before `z` and `result` after it are never written: no fused kernel
    has them in memory, they are derived from what it does write.
    """
    a = attention
    bias = {symbol: f" + b_{symbol}" if a.qkv_bias else "" for symbol in "qkv"}
    q = {"H": a.heads, "T": call.tokens, "dh": a.head_dim}
    k = {"Hk": a.kv_heads, "T": call.tokens, "dh": a.head_dim}
    v = {"Hk": a.kv_heads, "T": call.tokens, "dv": a.value_dim}
    per_column = call.product_flops(width, 1)
    # what is normalized has at least float32; then values of 16 bits are a copy
    wide = a.qk_norm is not None
    own = wide and call.dtype != call.wide_dtype
    # the last word: what one call makes for all of them, and each is a view of
    rows: list[tuple[str, dict[str, int], str, int, str]] = [
        ("q", q, f"Q = T¹ W_q{bias['q']}", per_column * a.heads * a.head_dim, "qkv"),
        ("k", k, f"K = T¹ W_k{bias['k']}", per_column * a.kv_heads * a.head_dim, "qkv"),
        ("v", v, f"V = T¹ W_v{bias['v']}", per_column * a.kv_heads * a.value_dim, "qkv"),
    ]
    if a.qk_norm is not None:
        rows += [
            ("q_norm", q, _qk_norm_formula(a.qk_norm, "Q"), 0, "qk_norm"),
            ("k_norm", k, _qk_norm_formula(a.qk_norm, "K"), 0, "qk_norm"),
        ]
    if a.rope is not None:
        mark = "" if a.qk_norm is None else "_norm"
        rows += [
            ("q_rot", q, f"Q_rot = R(position) Q{mark}", 0, "qk_rot"),
            ("k_rot", k, f"K_rot = R(position) K{mark}", 0, "qk_rot"),
        ]
    projected = [
        call.activation(
            f"{prefix}.{name}",
            sizes,
            formula,
            flops=flops,
            layer=layer,
            wide=wide and name in ("q", "k"),
            shares=None if own and name == "v" else f"{prefix}.{fused}",
        )
        for name, sizes, formula, flops, fused in rows
    ]
    return (*projected, *_mixed(a, prefix, width, call, layer))


def attention_states(
    attention: AttentionConfig, *, batch: int, capacity: int, dtype: str | None, layer: int
) -> tuple[TensorSpec, ...]:
    """`cache.{layer}.k` `[B, Hk, S, dh]` (after norm and rotation) and `.v` `[B, Hk, S, dv]`."""
    a = attention
    kept = (
        ("k", "dh", a.head_dim, "the rotated keys of every position so far"),
        ("v", "dv", a.value_dim, "the values of every position so far"),
    )
    return tuple(
        TensorSpec(
            name=f"cache.{layer}.{name}",
            kind="state",
            axes=("B", "Hk", "S", axis),
            shape=(batch, a.kv_heads, capacity, size),
            formula=formula if a.rope is not None else formula.replace("rotated ", ""),
            dtype=dtype,
            layer=layer,
        )
        for name, axis, size, formula in kept
    )


def visible_pairs(tokens: int, past: int, window: int | None) -> int:
    """How many (query, key) pairs a causal mask with an optional window leaves.

    A query at position p sees p + 1 keys, or the last `window` of them, itself included.
    """
    if window is None or window >= past + tokens:
        return tokens * past + tokens * (tokens + 1) // 2
    growing = max(0, min(tokens, window - past))  # queries that still see every key before them
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def _mixed(
    a: AttentionConfig, prefix: str, width: int, call: Call, layer: int
) -> tuple[TensorSpec, ...]:
    """`scores pattern z result`, of which the kernel writes `z` alone."""
    per_pair = 2 * call.batch * a.heads * (a.head_dim + a.value_dim)
    pairs = call.tokens * call.keys
    hidden = pairs - visible_pairs(call.tokens, call.past, a.window)
    scores = _scores_formula(a, width)
    bias = " + b_o" if a.out_bias else ""
    square = {"H": a.heads, "T": call.tokens, "S": call.keys}
    share = {"H": a.heads, "T": call.tokens, "D": width}

    def derived(name: str, sizes: dict[str, int], formula: str) -> TensorSpec:
        return call.activation(
            f"{prefix}.{name}", sizes, formula, layer=layer, wide=True, written=False
        )

    return (
        derived("scores", square, f"S = {scores}"),
        derived("pattern", square, "A = softmax(S)"),
        call.activation(
            f"{prefix}.z",
            {"H": a.heads, "T": call.tokens, "dv": a.value_dim},
            "C = A V",
            flops=per_pair * pairs,
            masked_flops=per_pair * hidden,
            layer=layer,
        ),
        derived("result", share, f"R = C W_o, head by head (T² is their sum{bias})"),
    )


def _qk_norm_formula(norm: NormConfig, letter: str) -> str:
    return norm_formula(norm, letter, f"{letter}_norm")


def _scores_formula(a: AttentionConfig, width: int) -> str:
    """`Q Kᵀ / √(d/h) + M`: √d_k where heads are no parts of the width, or the own scale."""
    suffix = "_rot" if a.rope is not None else "_norm" if a.qk_norm is not None else ""
    product = f"Q{suffix} K{suffix}ᵀ"
    if not math.isclose(a.scale, a.head_dim**-0.5):
        return f"{product} · {a.scale:g} + M"
    return f"{product} / {'√(d/h)' if a.divides(width) else '√d_k'} + M"
