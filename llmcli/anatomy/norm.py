"""Normalization of the last axis: RMSNorm and LayerNorm."""

from __future__ import annotations

from llmcli.anatomy.spec import Call, TensorSpec, parameter
from llmcli.config import NormConfig


def norm_parameters(
    norm: NormConfig, prefix: str, axis: str, size: int, *, layer: int | None
) -> tuple[TensorSpec, ...]:
    """`<prefix>.w` and, with a bias, `<prefix>.b`, both `[size]`."""
    formula = norm_formula(norm)
    names = ("w", "b") if norm.bias else ("w",)
    return tuple(
        parameter(f"{prefix}.{name}", (axis,), (size,), formula, layer=layer) for name in names
    )


def norm_activations(
    norm: NormConfig, prefix: str, width: int, call: Call, *, layer: int | None, tokens: int
) -> tuple[TensorSpec, ...]:
    """`<prefix>.scale` `[B, T, 1]`, the number that is divided by, and `<prefix>.out` `[B, T, D]`.

    `tokens` is the number of positions that are normalized (1 where only the last is needed).
    """
    inside = "mean(x²)" if norm.kind == "rms" else "mean((x − mean(x))²)"
    return (
        call.activation(
            f"{prefix}.scale", {"T": tokens, "1": 1}, f"s = √({inside} + ε)", layer=layer, wide=True
        ),
        call.activation(
            f"{prefix}.out", {"T": tokens, "D": width}, norm_formula(norm), layer=layer
        ),
    )


def norm_formula(norm: NormConfig, x: str = "x", out: str = "N", w: str = "w") -> str:
    """`N = x / s ∘ w` (rms) or `N = (x − mean(x)) / s ∘ w + b` (layer)."""
    centred = x if norm.kind == "rms" else f"({x} − mean({x}))"
    return f"{out} = {centred} / s ∘ {w}" + (" + b" if norm.bias else "")
