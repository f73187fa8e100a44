"""The gated short convolution: `B gate x`, then `in`, `conv`, `out`, and the output.

Letters: T tokens, D width, C channels, L tokens of the convolution's window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Convolve, Gate
from llmcli.graph.rows import Rows, sizes_of
from llmcli.parts.conv.config import AXES, ShortConvConfig

_ROWS = """
    B      B  T C  conv_in   the input gates
    gate   C  T C  conv_in   the output gates
    x      U  T C  conv_in   the values that the input gates multiply
    in     Y  T C  conv      the input of the convolution
    conv   Z  T C  conv      the weighted sum of the last tokens
    out    O  T C  conv      the result, gated, as it enters the last projection
    leave  T  T D  conv_out
    w      a filter for each dimension
    b      bias of the convolution
    W_out  projection to the output
    b_out  bias of the output
"""


def conv_graph(c: ShortConvConfig, site: Site) -> PartGraph:
    """All `[B, T, C]`, the output `[B, T, D]`; the state holds the last L rows of `in`."""
    p = site.name
    sizes = {"C": site.width} | sizes_of(c, AXES)
    r = Rows(p, _ROWS, layer=site.layer, kind="mixers", sizes=sizes)
    b, gate, x = (
        r.project(leaf, site.source, bias=c.bias, fused="B_gate_x") for leaf in ("B", "gate", "x")
    )
    enters = r.node("in", Gate(act=b, up=x))
    conv = r.node("conv", Convolve(
        source=enters, weight=r.parameter("w", "C L", "conv"),
        bias=r.parameter("b", "C", "conv") if c.bias else None, length=c.length,
    ), words=f"the weighted sum of the last {c.length} tokens")  # fmt: skip
    out = r.node("out", Gate(act=gate, up=conv))
    r.output(
        site, "the short convolution", "leave", out, "hook_attn_out", symbol="out", over="C",
        bias=c.bias,
    )  # fmt: skip
    r.ring(enters, "C")
    r.absent(rf"{p.rpartition('.')[2]}\.b", "it has no such bias")
    return r.graph(documents={"C": "d"} if c.channels is None else {})


def conv_facts(c: ShortConvConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    return {"kind": "short convolution", "details": (f"over {c.length} tokens",)}
