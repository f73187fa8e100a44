"""Gated DeltaNet: projections, convolution, the recurrence's inputs, its map, norm and gate.

Letters: T tokens, S keys, D width, C channels, L tokens of the convolution's window, H value heads,
Hk key heads, dk size of a query and key, dv of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.graph.node import Absent, Kernel, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import Activate, Convolve, Gate, Mix, Normalize, Op, Project, axis_sizes
from llmcli.graph.recurrence import (
    Cut,
    LinearMap,
    LogDecay,
    Recurrence,
    StateAfter,
    StepSize,
    UnitLength,
)
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.norm.graph import norm_parameters

_ENTER = {  # projection: its letter, words, and resulting activation
    "in": ("Y", "queries, keys and values before the convolution", "in"),
    "gate": ("Z", "the output gates, before SiLU", "gate"),
    "beta": ("B", "the write strengths, before σ", "beta_in"),
    "decay": ("a", "the decays, before softplus", "decay_in"),
}


def delta_graph(c: DeltaConfig, site: Site) -> PartGraph:
    """`in conv act q k v beta log_decay`, the map, `z`, and `out`, the last product's input.

    `pattern` and `state` are derived: no kernel stores a map, or the state after each token.
    """
    p, (keys, _, _) = site.name, c.segments

    def node(leaf: str, letter: str, axes: tuple[str, ...], op: Op, words: str,
             group: str = "scan", *, wide: bool = True, shown: bool = False) -> Node:  # fmt: skip
        return Node(name=f"{p}.{leaf}", letter=letter, axes=axes, op=op, words=words, group=group,
                    layer=site.layer, wide=wide, shown=shown,
                    shares=op.source if isinstance(op, Cut) else None)  # fmt: skip

    def enter(leaf: str, axes: tuple[str, ...], columns: str, heads: int = 0) -> Node:
        letter, words, makes = _ENTER[leaf]
        op = Project(source=site.source, weight=f"{p}.W_{leaf}", over="D", columns=columns,
                     heads=heads, fused=f"{p}.in_gate_beta_decay")  # fmt: skip
        return node(makes, letter, axes, op, words, "linear_in", wide=False)

    def cut(first: int, count: int, size: int) -> Cut:
        return Cut(source=f"{p}.act", first=first, heads=count, size=size)

    of_key, of_value = ("Hk", "T", "dk"), ("H", "T", "dv")
    recurrence = Recurrence(
        query=f"{p}.q", key=f"{p}.k", step=f"{p}.beta", log_decay=f"{p}.log_decay",
        heads=c.heads, group=c.heads // c.key_heads, tiled=c.tiled,
    )  # fmt: skip
    words, theirs = site.output("the gated DeltaNet", "hook_attn_out")
    nodes = (
        enter("in", ("T", "C"), "C"),
        enter("gate", of_value, "H·dv", c.heads),
        enter("beta", ("T", "H"), "H"),
        enter("decay", ("T", "H"), "H"),
        node("conv", "Y_conv", ("T", "C"), Convolve(
            source=f"{p}.in", weight=f"{p}.w", bias=None, length=c.length,
        ), f"the weighted sum of the last {c.length} tokens", "conv", wide=False),
        node("act", "U", ("T", "C"), Activate(source=f"{p}.conv", function="silu"),
             "queries, keys and values side by side", "conv", wide=False),
        node("q", "Q", of_key, UnitLength(
            cut=cut(0, c.key_heads, c.key_dim), eps=c.eps, scale=c.key_dim**-0.5,
        ), "queries of length 1 / √d_k"),
        node("k", "K", of_key, UnitLength(
            cut=cut(keys, c.key_heads, c.key_dim), eps=c.eps,
        ),
             "keys of length 1"),
        node("v", "V", of_value, cut(2 * keys, c.heads, c.value_dim),
             "values, each a mix of the last tokens", wide=False),
        node("beta", "β", ("T", "H"), Activate(source=f"{p}.beta_in", function="sigmoid"),
             "write strengths: the replaced share of the value at each key"),
        node("dt", "dt", ("T", "H"), StepSize(source=f"{p}.decay_in", bias=f"{p}.dt_bias"),
             "step sizes of the decay"),
        node("log_decay", "g", ("T", "H"), LogDecay(source=f"{p}.dt", rate=f"{p}.A_log"),
             "log decays of the state"),
        node("pattern", "A", ("H", "T", "S"), LinearMap(of=recurrence),
             "the weight of each token's value, of either sign"),
        node("state", "S", ("H", "T", "dk·dv"), StateAfter(
            of=recurrence, value=f"{p}.v", columns=c.value_dim,
        ), "the state after each token", shown=True),
        node("z", "O", of_value, Mix(
            pattern=f"{p}.pattern", value=f"{p}.v", query=f"{p}.q", group=1, window=None,
            signed=True, state="H·dk·dv", passes=3,
        ), "the state read by the queries"),
        node("z_norm", "O_norm", of_value, Normalize(
            source=f"{p}.z", norm=c.norm, weight=f"{p}.norm.w",
        ), "the read values, normalized"),
        node("gate_act", "SiLU(Z)", of_value, Activate(source=f"{p}.gate", function="silu"),
             "the output gates"),
        node("out", "O_gated", of_value, Gate(act=f"{p}.gate_act", up=f"{p}.z_norm"),
             "the result, gated, as it enters the last projection", wide=False),
        Node(
            name=site.makes, letter=site.letter, axes=("T", "D"), words=words, group="linear_out",
            op=Project(source=f"{p}.out", weight=f"{p}.W_out", over="H·dv", columns="D"),
            layer=site.layer, wide=True, theirs=theirs,
        ),
    )  # fmt: skip
    return PartGraph(
        nodes=nodes, parameters=tuple(_parameters(c, site)), states=recurrent_states(site, "dk"),
        kernels=recurrent_kernels(p),
        sizes=axis_sizes(c.AXES, c), segments=c.SEGMENTS,
        documents={"dk": "d_k", "dv": "d_v", "Hk": "h_k", "H": "h"},
        absent=tuple(recurrent_absent("a gated DeltaNet", "attn|ssm")),
    )  # fmt: skip


def recurrent_states(site: Site, rows: str) -> tuple[State, ...]:
    """The ring of the convolution, and each head's state with the axis `rows`."""
    p = site.name
    return (
        State(name=f"cache.{site.layer}.conv", axes=("L", "C"), holds=f"{p}.in",
              before=f"{p}.conv", formula="the last L rows of Y, that of position p in row p mod L",
              words="the last inputs of the convolution", layer=site.layer, ring=True),
        State(name=f"cache.{site.layer}.state", axes=("H", f"{rows}·dv"), holds=f"{p}.state",
              before=f"{p}.z", formula="S after the last token", words="the state of each head",
              layer=site.layer, wide=True),
    )  # fmt: skip


def recurrent_kernels(name: str) -> tuple[Kernel, ...]:
    """The kernels of `z` with a state: the map is only stored if edited, states never."""
    return Kernel(covers=(f"{name}.pattern",), optional=True), Kernel(covers=(f"{name}.state",))


def recurrent_absent(mixer: str, others: str) -> Iterator[Absent]:
    """Tensors of softmax attention, and of `others` (a pattern of prefixes), that are missing."""
    yield Absent(names=r"\w+\.scores", why=f"{mixer} has no scores: its map is no softmax")
    yield Absent(names=rf"({others})\b", why=f"its mixer is {mixer}")
    yield Absent(names=r"cache\.[kv]\b", why=f"{mixer} keeps a state and no keys and values")


def _parameters(c: DeltaConfig, site: Site) -> Iterator[Parameter]:
    p, shared = site.name, f"{site.name}.W_in_gate_beta_decay"

    def row(leaf: str, axes: tuple[str, ...], makes: str, words: str, *, turned: bool = False,
            wide: bool = False, shares: str | None = None) -> Parameter:  # fmt: skip
        return Parameter(name=f"{p}.{leaf}", axes=axes, makes=makes, words=words, kind="mixers",
                         letter=leaf, layer=site.layer, turned=turned, wide=wide,
                         shares=shares)  # fmt: skip

    for leaf, columns in (("in", "C"), ("gate", "H·dv"), ("beta", "H"), ("decay", "H")):
        words, makes = f"projection to {_ENTER[leaf][1]}", f"{p}.{_ENTER[leaf][2]}"
        yield row(f"W_{leaf}", ("D", columns), makes, words, turned=True, shares=shared)
    yield row("w", ("C", "L"), f"{p}.conv", "a filter for each channel")
    yield row("dt_bias", ("H",), f"{p}.dt", "bias of the step size", wide=True)
    yield row("A_log", ("H",), f"{p}.log_decay", "logarithm of each head's decay rate", wide=True)
    yield from norm_parameters(c.norm, f"{p}.norm", f"{p}.z_norm", "dv", site.layer,
                               "the norm of every head's output")  # fmt: skip
    yield row("W_out", ("H·dv", "D"), site.makes, "projection of all heads back to the width",
              turned=True)  # fmt: skip


def delta_facts(c: DeltaConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    keys = () if c.key_heads == c.heads else (f"{c.key_heads} heads of queries and keys",)
    return {
        "kind": "gated DeltaNet", "heads": c.heads, "head_dim": c.key_dim,
        "value_dim": c.value_dim, "details": (*keys, f"convolution over {c.length} tokens"),
    }  # fmt: skip
