"""Normalization of the last axis: RMSNorm and LayerNorm."""

from __future__ import annotations

from llmcli.anatomy.spec import Call, TensorSpec, parameter
from llmcli.config import NormConfig


def norm_parameters(
    prefix: str, axis: str, size: int, formula: str, *, bias: bool, layer: int | None
) -> tuple[TensorSpec, ...]:
    """`<prefix>.w` and, with a bias, `<prefix>.b`, both `[size]`; `formula` uses them."""
    names = ("w", "b") if bias else ("w",)
    return tuple(
        parameter(f"{prefix}.{name}", (axis,), (size,), formula, layer=layer) for name in names
    )


def norm_activations(
    norm: NormConfig,
    prefix: str,
    letters: tuple[str, str],
    width: int,
    call: Call,
    *,
    layer: int | None,
    tokens: int,
) -> tuple[TensorSpec, ...]:
    """`<prefix>.scale` `[B, T, 1]`, the number that is divided by, and `<prefix>.out` `[B, T, D]`.

    `letters`: of the residual stream that is normalized, and of what comes out; `tokens`: the
    number of its positions (1 where only the last is needed).
    """
    stream, out = letters
    square = f"({stream} − μ)²" if norm.kind == "layer" else squared(stream)
    return (
        call.activation(
            f"{prefix}.scale",
            {"T": tokens, "1": 1},
            f"s = √(mean({square}) + ε)",
            layer=layer,
            wide=True,
        ),
        call.activation(
            f"{prefix}.out",
            {"T": tokens, "D": width},
            norm_formula(norm, stream, out),
            layer=layer,
        ),
    )


def squared(letter: str) -> str:
    """`X²`, and `(T³)²` where a letter has a number above it."""
    return f"{letter}²" if len(letter) == 1 else f"({letter})²"


def norm_formula(norm: NormConfig, x: str, out: str) -> str:
    """`T¹ = RMSNorm(X) = X / s · w` or `T¹ = LayerNorm(X) = (X − μ) / s · w + b`."""
    kind = f"RMSNorm({x}) = {x}" if norm.kind == "rms" else f"LayerNorm({x}) = ({x} − μ)"
    return f"{out} = {kind} / s · w" + (" + b" if norm.bias else "")
