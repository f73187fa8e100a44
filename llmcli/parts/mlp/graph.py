"""The feed-forward part: `act(T⁴ W_up) W_down`, or gated, `(act(T⁴ W_gate) ∘ T⁴ W_up) W_down`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Activate, Gate
from llmcli.graph.rows import Rows
from llmcli.parts.mlp.config import MlpConfig

_ROWS = """
    gate    G{mark}              T {F}  {up}    the gates before their activation function
    up      U{mark}              T {F}  {up}    the neurons that the gates multiply
    act     Activation(G{mark})  T {F}  {act}   the gates after their activation function
    pre     U{mark}              T {F}  {up}    the neurons before their activation function
    post    L{mark}              T {F}  {act}   the hidden layer as it enters the last projection
    down    T                    T D    {down}
    W_gate  projection to the gates of the hidden layer
    b_gate  bias of the gates
    W_up    projection to the neurons of the hidden layer
    b_up    bias of the neurons
    W_down  projection of the hidden layer back to the width
    b_down  bias of the feed-forward's output
"""
_NAMES = """
    gate    mlp.gate.hook_out mlp.hook_pre
    up      mlp.hook_pre_linear mlp.in.hook_out
    pre     mlp.hook_pre mlp.in.hook_out
    post    mlp.hook_post mlp.out.hook_in
    W_up    mlp.W_in
    b_up    mlp.b_in
    W_down  mlp.W_out
    b_down  mlp.b_out
"""


def mlp_graph(m: MlpConfig, site: Site, *, shared: bool = False) -> PartGraph:
    """Gated: `gate up act post`; plain: `pre post`. All `[B, T, F]`; `post` enters `W_down`.

    `shared`: of the shared expert of a mixture, with the axis `Fs`, which TransformerLens lacks.
    """
    axis, mark, noun = ("Fs", "ₛ", "the shared expert") if shared else ("F", "", "the feed-forward")
    up, act, down = ("shared",) * 3 if shared else ("ffn_up", "ffn_act", "ffn_down")
    r = Rows(
        site.name, _ROWS.format(F=axis, mark=mark, up=up, act=act, down=down), layer=site.layer,
        kind="mlp", sizes={axis: m.hidden}, theirs="" if shared else _NAMES,
    )  # fmt: skip
    if m.gated:
        limit = None if m.clamp is None else m.clamp.limit
        gate = r.project("gate", site.source, fused="gate_up", bias=m.bias, mark=mark)
        neurons = r.project("up", site.source, fused="gate_up", bias=m.bias, mark=mark)
        acted = r.node("act", Activate(source=gate, function=m.activation, limit=limit))
        post = r.node("post", Gate(act=acted, up=neurons, clamp=m.clamp))
    else:
        pre = r.project("pre", site.source, symbol="up", bias=m.bias, mark=mark)
        post = r.node("post", Activate(source=pre, function=m.activation))
    names = () if shared else ("hook_mlp_out", "mlp.out.hook_out", "mlp.hook_out")
    r.output(site, noun, "down", post, *names, over=axis, bias=m.bias, mark=mark)
    _absent(r, m)
    p = site.name
    return r.graph(
        documents={axis: "4d" if not shared and m.hidden == 4 * site.width else f"F{mark}"},
        entering=("mlp.hook_in", "mlp.in.hook_in", *(("mlp.gate.hook_in",) if m.gated else ())),
        similar=(
            (r"(mlp|ffn)\.hidden", (f"{p}.post",)),
            (r"(gate|up)_proj", (rf"{p}.\1", rf"{p}.W_\1")),
            (r"down_proj", (site.makes, f"{p}.W_down")),
            (r"(gate|up|down)_proj\.weight", (rf"{p}.W_\1",)),
        ),
    )


def mlp_facts(m: MlpConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    details = () if m.clamp is None else (f"gates clamped at {m.clamp.limit:g}",)
    return {
        "hidden": m.hidden, "activation": m.activation, "gated": m.gated, "details": details,
    }  # fmt: skip


def _absent(r: Rows, m: MlpConfig) -> None:
    r.absent(r"moe\b", "its feed-forward is one network, no mixture of experts")
    if m.gated:
        why = "its feed-forward is gated, the neurons are `mlp.gate`, `up`, `act` and `post`"
        r.absent(r"mlp\.pre$", why)
    else:
        why = "its feed-forward has no gate, the neurons are `mlp.pre` and `mlp.post`"
        theirs = {"mlp.gate.hook_out": "mlp.gate", "mlp.hook_pre_linear": "mlp.up"}
        r.absent(r"mlp\.(gate|up|act|W_gate|b_gate)$", why, theirs)
    theirs = {} if m.bias else {"mlp.b_in": "mlp.b_up", "mlp.b_out": "mlp.b_down"}
    r.absent(r"mlp\.b_\w+$", "it has no such bias", theirs)
