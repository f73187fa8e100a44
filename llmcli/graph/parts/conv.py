"""The gated short convolution: `B gate x`, then `in`, `conv`, `out`, and the output.

Letters: T tokens, D width, C channels, L tokens of the convolution's window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.config.conv import ShortConvConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Convolve, Gate
from llmcli.graph.rows import Rows, sizes_of

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
    sizes = {"C": site.width, **sizes_of(c)}
    r = Rows(site.name, _ROWS, "mixers", sizes, layer=site.layer)
    b, gate, x = (
        r.project(leaf, site.source, bias=c.bias, fused="B_gate_x") for leaf in ("B", "gate", "x")
    )
    enters = r.node("in", Gate(act=b, up=x))
    conv = convolution(r, enters, c.length, bias=c.bias)
    out = r.node("out", Gate(act=gate, up=conv))
    r.output(site, "the short convolution", "leave", out, symbol="out", over="C", bias=c.bias)
    return r.graph(documents={"C": "d"} if c.channels is None else {})


def convolution(r: Rows, source: str, length: int, *, bias: bool) -> str:
    """`conv`, with the last inputs in a ring."""
    w, b = r.parameter("w", "C L", "conv"), r.parameter("b", "C", "conv") if bias else None
    formula = "the last L rows of Y, that of position p in row p mod L"
    words = "the last inputs of the convolution"
    r.state("conv", "L C", source, "conv", formula, words, ring=True)
    op = Convolve(source=source, weight=w, bias=b, length=length)
    return r.node("conv", op, words=f"the weighted sum of the last {length} tokens")


def conv_facts(c: ShortConvConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    return {"kind": "short convolution", "details": (f"over {c.length} tokens",)}
