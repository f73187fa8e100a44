"""The gated short convolution: `B gate x`, then `in`, `conv`, `out`, and the output.

Letters: T tokens, D width, C channels, L tokens of the convolution's window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import Convolve, Gate, Op, Project
from llmcli.parts.conv.config import ShortConvConfig

_ENTER = {  # letters and words of the projections
    "B": ("B", "the input gates"), "gate": ("C", "the output gates"),
    "x": ("U", "the values that the input gates multiply"),
}  # fmt: skip


def conv_graph(c: ShortConvConfig, site: Site) -> PartGraph:
    """All `[B, T, C]`, the output `[B, T, D]`; the state holds the last L rows of `in`."""
    p = site.name

    def bias(leaf: str) -> str | None:
        return f"{p}.b{leaf}" if c.bias else None

    def node(leaf: str, letter: str, op: Op, words: str, group: str) -> Node:
        return Node(
            name=f"{p}.{leaf}", letter=letter, axes=("T", "C"), op=op, words=words, group=group,
            layer=site.layer,
        )  # fmt: skip

    def project(source: str, leaf: str, over: str, columns: str, fused: str = "") -> Project:
        return Project(
            source=source, weight=f"{p}.W_{leaf}", bias=bias(f"_{leaf}"), over=over,
            columns=columns, fused=fused,
        )  # fmt: skip

    words, theirs = site.output("the short convolution", "hook_attn_out")
    nodes = (
        *(
            node(leaf, letter, project(site.source, leaf, "D", "C", f"{p}.B_gate_x"), said,
                 "conv_in")
            for leaf, (letter, said) in _ENTER.items()
        ),
        node("in", "Y", Gate(act=f"{p}.B", up=f"{p}.x"), "the input of the convolution", "conv"),
        node("conv", "Z", Convolve(
            source=f"{p}.in", weight=f"{p}.w", bias=bias(""), length=c.length,
        ), f"the weighted sum of the last {c.length} tokens", "conv"),
        node("out", "O", Gate(act=f"{p}.gate", up=f"{p}.conv"),
             "the result, gated, as it enters the last projection", "conv"),
        Node(
            name=site.makes, letter=site.letter, axes=("T", "D"),
            op=project(f"{p}.out", "out", "C", "D"), words=words, group="conv_out",
            layer=site.layer, wide=True, theirs=theirs,
        ),
    )  # fmt: skip
    state = State(
        name=f"cache.{site.layer}.conv", axes=("L", "C"), holds=f"{p}.in", before=f"{p}.conv",
        formula="the last L rows of Y, that of position p in row p mod L",
        words="the last inputs of the convolution", layer=site.layer, ring=True,
    )  # fmt: skip
    return PartGraph(
        nodes=nodes, parameters=tuple(_parameters(c, site)), states=(state,),
        sizes={"L": c.length, "C": c.channels or site.width},
        documents={"C": "d"} if c.channels is None else {},
        absent=(Absent(names=rf"{p.rpartition('.')[2]}\.b", why="it has no such bias"),),
    )  # fmt: skip


def _parameters(c: ShortConvConfig, site: Site) -> list[Parameter]:
    """`W_B`, `W_gate`, `W_x` `[D, C]`, `W_out` `[C, D]`, the filter `w` `[C, L]`, and biases."""
    p, found = site.name, []
    made = {leaf: f"{p}.{leaf}" for leaf in _ENTER} | {"out": site.makes}
    for kind in "Wb" if c.bias else "W":
        for leaf, makes in made.items():
            axes: tuple[str, ...] = ("C", "D") if leaf == "out" else ("D", "C")
            found.append(Parameter(
                name=f"{p}.{kind}_{leaf}", axes=axes if kind == "W" else axes[1:], makes=makes,
                words=f"{'projection to' if kind == 'W' else 'bias of'} "
                      f"{_ENTER[leaf][1] if leaf in _ENTER else 'the output'}",
                kind="mixers", letter=f"{kind}_{leaf}", layer=site.layer, turned=kind == "W",
                shares=f"{p}.{kind}_B_gate_x" if leaf in _ENTER else None,
            ))  # fmt: skip
    for leaf, axes, words in (("w", ("C", "L"), "a filter for each dimension"),
                              ("b", ("C",), "bias of the convolution"))[: 1 + c.bias]:  # fmt: skip
        found.append(Parameter(
            name=f"{p}.{leaf}", axes=axes, makes=f"{p}.conv", words=words, kind="mixers",
            letter=leaf, layer=site.layer,
        ))  # fmt: skip
    return found


def conv_facts(c: ShortConvConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    return {"kind": "short convolution", "details": (f"over {c.length} tokens",)}
