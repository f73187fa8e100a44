"""The feed-forward part: `act(T⁴ W_up) W_down`, or gated, `(act(T⁴ W_gate) ∘ T⁴ W_up) W_down`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmcli.config.experts import ExpertsConfig
from llmcli.config.mlp import MlpConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Activate, Gate
from llmcli.graph.rows import Rows

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


def mlp_graph(m: MlpConfig, site: Site, *, shared: bool = False) -> PartGraph:
    """Gated: `gate up act post`; plain: `pre post`. All `[B, T, F]`; `post` enters `W_down`.

    `shared`: of the shared expert of a mixture, with the axis `Fs`.
    """
    axis, mark, noun = ("Fs", "ₛ", "the shared expert") if shared else ("F", "", "the feed-forward")
    up, act, down = ("shared",) * 3 if shared else ("ffn_up", "ffn_act", "ffn_down")
    lines = _ROWS.format(F=axis, mark=mark, up=up, act=act, down=down)
    r = Rows(site.name, lines, "mlp", {axis: m.hidden}, layer=site.layer)

    def project(leaf: str, symbol: str, fused: str) -> str:
        return r.project(leaf, site.source, symbol=symbol, fused=fused, bias=m.bias, mark=mark)

    post = hidden_rows(r, m, project)
    r.output(site, noun, "down", post, over=axis, bias=m.bias, mark=mark)
    number = "4d" if not shared and m.hidden == 4 * site.width else f"F{mark}"
    return r.graph(documents={axis: number})


def hidden_rows(
    r: Rows, c: MlpConfig | ExpertsConfig, project: Callable[[str, str, str], str]
) -> str:
    """`gate up act post`, or without gates `pre post`; `project(leaf, symbol, fused)`."""
    if not c.gated:
        pre = project("pre", "up", "")
        return r.node("post", Activate(source=pre, function=c.activation))
    limit = None if c.clamp is None else c.clamp.limit
    gate, up = (project(leaf, leaf, "gate_up") for leaf in ("gate", "up"))
    act = r.node("act", Activate(source=gate, function=c.activation, limit=limit))
    return r.node("post", Gate(act=act, up=up, clamp=c.clamp))


def mlp_facts(m: MlpConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    details = () if m.clamp is None else (f"gates clamped at {m.clamp.limit:g}",)
    network = {"hidden": m.hidden, "activation": m.activation, "gated": m.gated}
    return {**network, "details": details}
