"""The feed-forward part: `act(T⁴ W_up) W_down`, or gated, `(act(T⁴ W_gate) ∘ T⁴ W_up) W_down`."""

from __future__ import annotations

from llmcli.anatomy.spec import Call, TensorSpec, projection
from llmcli.config import Activation, MlpConfig

FUNCTIONS: dict[Activation, str] = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU_tanh",
    "relu": "ReLU",
}


def mlp_parameters(
    mlp: MlpConfig, prefix: str, width: int, *, layer: int
) -> tuple[TensorSpec, ...]:
    """`W_gate` (gated only) and `W_up` `[D, F]`, `W_down` `[F, D]`, and their biases."""
    up = "U = T⁴ W_up"
    rows = [("up", ("D", "F"), (width, mlp.hidden), up)]
    if mlp.gated:
        rows.insert(0, ("gate", ("D", "F"), (width, mlp.hidden), "G = T⁴ W_gate"))
    rows.append(("down", ("F", "D"), (mlp.hidden, width), "T⁵ = L W_down"))
    specs: list[TensorSpec] = []
    for symbol, axes, shape, formula in rows:
        fused = "gate_up" if mlp.gated and symbol != "down" else ""
        specs += projection(
            prefix, symbol, axes, shape, formula, bias=mlp.bias, layer=layer, fused=fused
        )
    return tuple(specs)


def mlp_activations(
    mlp: MlpConfig, prefix: str, width: int, call: Call, *, layer: int
) -> tuple[TensorSpec, ...]:
    """Gated: `gate up act post`; plain: `pre post`. All `[B, T, F]`; `post` enters `W_down`."""
    flops = call.product_flops(width, mlp.hidden)
    function = FUNCTIONS[mlp.activation]
    bias = {symbol: f" + b_{symbol}" if mlp.bias else "" for symbol in ("gate", "up")}
    both = f"{prefix}.gate_up"  # what one product gives
    shared = {"gate": both, "up": both}
    if mlp.gated:
        rows = [
            ("gate", f"G = T⁴ W_gate{bias['gate']}", flops),
            ("up", f"U = T⁴ W_up{bias['up']}", flops),
            ("act", f"Activation(G) = {function}(G)", 0),
            ("post", "L = Activation(G) ∘ U", 0),
        ]
    else:
        rows = [
            ("pre", f"U = T⁴ W_up{bias['up']}", flops),
            ("post", f"L = Activation(U) = {function}(U)", 0),
        ]
    sizes = {"T": call.tokens, "F": mlp.hidden}
    return tuple(
        call.activation(
            f"{prefix}.{name}", sizes, formula, flops=flops, layer=layer, shares=shared.get(name)
        )
        for name, formula, flops in rows
    )
