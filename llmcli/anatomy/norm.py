"""Normalization of the last axis: RMSNorm and LayerNorm.

In formulas `R` is the residual stream, `R'` the same after attention was added, and `X`, `X'`
are what a norm makes of them for the part that follows.
"""

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
    norm: NormConfig,
    prefix: str,
    stream: str,
    width: int,
    call: Call,
    *,
    layer: int | None,
    tokens: int,
) -> tuple[TensorSpec, ...]:
    """`<prefix>.scale` `[B, T, 1]`, the number that is divided by, and `<prefix>.out` `[B, T, D]`.

    `stream` is the letter of the residual stream that is normalized; `tokens` the number of its
    positions (1 where only the last is needed).
    """
    inside = f"mean({stream}²)" if norm.kind == "rms" else f"mean(({stream} − mean({stream}))²)"
    out = stream.replace("R", "X")
    return (
        call.activation(
            f"{prefix}.scale", {"T": tokens, "1": 1}, f"s = √({inside} + ε)", layer=layer, wide=True
        ),
        call.activation(
            f"{prefix}.out",
            {"T": tokens, "D": width},
            norm_formula(norm, stream, out),
            layer=layer,
        ),
    )


def norm_formula(norm: NormConfig, x: str = "R", out: str = "X") -> str:
    """`X = R / s ∘ w` (rms) or `X = (R − mean(R)) / s ∘ w + b` (layer)."""
    centred = x if norm.kind == "rms" else f"({x} − mean({x}))"
    return f"{out} = {centred} / s ∘ w" + (" + b" if norm.bias else "")
