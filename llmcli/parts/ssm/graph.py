"""Mamba-2: projections, convolution, the recurrence's inputs, its map, the skip, gate and norm.

Letters: T tokens, S keys, D width, C channels, L tokens of the convolution's window, H heads, G
groups, N size of B and C per group, dv size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Activate, Convolve, Gate, Mix, Normalize, Op, Project, axis_sizes
from llmcli.graph.recurrence import (
    Cut,
    LinearMap,
    LogDecay,
    Recurrence,
    Skip,
    StateAfter,
    StepSize,
)
from llmcli.parts.delta.graph import recurrent_absent, recurrent_kernels, recurrent_states
from llmcli.parts.norm.graph import norm_parameters
from llmcli.parts.ssm.config import SsmConfig

_ENTER = {  # projection: letter, words, column axis, result
    "gate": ("Z", "the output gates, before SiLU", "H·dv", "gate"),
    "in": ("Y", "values, B and C before the convolution", "C", "in"),
    "dt": ("a", "step sizes before softplus", "H", "dt_in"),
}


def ssm_graph(c: SsmConfig, site: Site) -> PartGraph:
    """`gate in dt_in`, `conv act x B C dt log_decay`, the map, `z`, `skip`, `gated` and `out`.

    `pattern` and `state` are derived: no kernel stores a map, or the state after each token.
    """
    p = site.name

    def node(leaf: str, letter: str, axes: tuple[str, ...], op: Op, words: str,
             group: str = "scan", *, wide: bool = True, shown: bool = False) -> Node:  # fmt: skip
        return Node(name=f"{p}.{leaf}", letter=letter, axes=axes, op=op, words=words, group=group,
                    layer=site.layer, wide=wide, shown=shown,
                    shares=op.source if isinstance(op, Cut) else None)  # fmt: skip

    def enter(leaf: str, heads: int = 0) -> Node:
        letter, words, columns, makes = _ENTER[leaf]
        axes = ("H", "T", "dv") if heads else ("T", columns)
        op = Project(source=site.source, weight=f"{p}.W_{leaf}", over="D", columns=columns,
                     bias=f"{p}.b_{leaf}" if c.bias else None, heads=heads,
                     fused=f"{p}.gate_in_dt")  # fmt: skip
        return node(makes, letter, axes, op, words, "linear_in", wide=False)

    def cut(first: int, count: int, size: int) -> Cut:
        return Cut(source=f"{p}.act", first=first, heads=count, size=size)

    of_value, of_group, shared = ("H", "T", "dv"), ("G", "T", "N"), c.segments[1]
    recurrence = Recurrence(
        query=f"{p}.C", key=f"{p}.B", step=f"{p}.dt", log_decay=f"{p}.log_decay", heads=c.heads,
        group=c.heads // c.groups, plain=True,
    )  # fmt: skip
    words, theirs = site.output("the Mamba-2 mixer", "hook_attn_out")
    nodes = (
        enter("gate", c.heads), enter("in"), enter("dt"),
        node("conv", "Y_conv", ("T", "C"), Convolve(
            source=f"{p}.in", weight=f"{p}.w", bias=f"{p}.b" if c.conv_bias else None,
            length=c.length,
        ), f"the weighted sum of the last {c.length} tokens", "conv", wide=False),
        node("act", "U", ("T", "C"), Activate(source=f"{p}.conv", function="silu"),
             "values, B and C side by side", "conv", wide=False),
        node("x", "X_ssm", of_value, cut(0, c.heads, c.head_dim),
             "values, each a mix of the last tokens", wide=False),
        node("B", "B", of_group, cut(c.inner, c.groups, c.state),
             "the keys, at which values are written", wide=False),
        node("C", "C_ssm", of_group, cut(c.inner + shared, c.groups, c.state),
             "the queries, which read the state", wide=False),
        node("dt", "dt", ("T", "H"), StepSize(
            source=f"{p}.dt_in", bias=f"{p}.dt_bias", least=c.least, most=c.most,
        ), "step sizes of writes and decays"),
        node("log_decay", "g", ("T", "H"), LogDecay(source=f"{p}.dt", rate=f"{p}.A_log"),
             "log decays of the state"),
        node("pattern", "A", ("H", "T", "S"), LinearMap(of=recurrence),
             "the weight of each token's values, of either sign"),
        node("state", "S", ("H", "T", "N·dv"),
             StateAfter(of=recurrence, value=f"{p}.x", columns=c.head_dim),
             "the state after each token", shown=True),
        node("z", "O", of_value, Mix(
            pattern=f"{p}.pattern", value=f"{p}.x", query=f"{p}.C", group=1, window=None,
            signed=True, state="H·N·dv", passes=2,
        ), "the state read by C"),
        node("skip", "O_D", of_value,
             Skip(source=f"{p}.z", value=f"{p}.x", weight=f"{p}.D"),
             "the read values plus the token's values times a factor per head"),
        node("gate_act", "SiLU(Z)", of_value, Activate(source=f"{p}.gate", function="silu"),
             "the output gates"),
        node("gated", "O_gated", of_value, Gate(act=f"{p}.gate_act", up=f"{p}.skip"),
             "the result, gated"),
        node("out", "O_norm", of_value, Normalize(
            source=f"{p}.gated", norm=c.norm, weight=f"{p}.norm.w", joined=True,
            groups=c.groups,
        ), "the result, normalized, as it enters the last projection", wide=False),
        Node(
            name=site.makes, letter=site.letter, axes=("T", "D"), words=words, group="linear_out",
            op=Project(source=f"{p}.out", weight=f"{p}.W_out", over="H·dv", columns="D",
                       bias=f"{p}.b_out" if c.bias else None),
            layer=site.layer, wide=True, theirs=theirs,
        ),
    )  # fmt: skip
    return PartGraph(
        nodes=nodes, parameters=tuple(_parameters(c, site)), states=recurrent_states(site, "N"),
        kernels=recurrent_kernels(p),
        sizes=axis_sizes(c.AXES, c), segments=c.SEGMENTS,
        documents={"dv": "d_v", "H": "h"},
        absent=(
            *recurrent_absent("a Mamba-2 mixer", "attn|linattn"),
            *(() if c.bias else (Absent(names=r"ssm\.b_", why="it has no such bias"),)),
            *(() if c.conv_bias else (Absent(names=r"ssm\.b$", why="it has no such bias"),)),
        ),
    )  # fmt: skip


def _parameters(c: SsmConfig, site: Site) -> Iterator[Parameter]:
    p = site.name

    def row(leaf: str, axes: tuple[str, ...], makes: str, words: str, *, turned: bool = False,
            wide: bool = False, shares: str | None = None) -> Parameter:  # fmt: skip
        return Parameter(name=f"{p}.{leaf}", axes=axes, makes=makes, words=words, kind="mixers",
                         letter=leaf, layer=site.layer, turned=turned, wide=wide,
                         shares=shares)  # fmt: skip

    for kind in "Wb" if c.bias else "W":
        said = "projection to" if kind == "W" else "bias of"
        for leaf, (_, words, columns, makes) in _ENTER.items():
            axes = ("D", columns) if kind == "W" else (columns,)
            yield row(f"{kind}_{leaf}", axes, f"{p}.{makes}", f"{said} {words}",
                      turned=kind == "W", shares=f"{p}.{kind}_gate_in_dt")  # fmt: skip
    yield row("w", ("C", "L"), f"{p}.conv", "a filter for each channel")
    if c.conv_bias:
        yield row("b", ("C",), f"{p}.conv", "bias of the convolution")
    yield row("dt_bias", ("H",), f"{p}.dt", "bias of the step size", wide=True)
    yield row("A_log", ("H",), f"{p}.log_decay", "logarithm of each head's decay rate", wide=True)
    yield row("D", ("H",), f"{p}.skip", "the factor on the token's own values", wide=True)
    yield from norm_parameters(c.norm, f"{p}.norm", f"{p}.out", "H·dv", site.layer,
                               "the norm of the output")  # fmt: skip
    yield row("W_out", ("H·dv", "D"), site.makes, "projection of all heads back to the width",
              turned=True)  # fmt: skip
    if c.bias:
        yield row("b_out", ("D",), site.makes, "bias of the output")


def ssm_facts(c: SsmConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    groups = f"{c.groups} groups" if c.groups > 1 else "1 group"
    details = [f"state of {c.state} in {groups}", f"convolution over {c.length} tokens"]
    if c.least > 0 or c.most < math.inf:
        most = f" to {c.most:g}" if c.most < math.inf else ""
        details.append(f"step sizes from {c.least:g}{most}")
    return {"kind": "Mamba-2", "heads": c.heads, "head_dim": c.head_dim,
            "details": tuple(details)}  # fmt: skip
