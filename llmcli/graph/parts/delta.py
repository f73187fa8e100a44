"""Gated DeltaNet: projections, convolution, the recurrence's inputs, its map, norm and gate.

Letters: T tokens, S keys, D width, C channels, L tokens of the convolution's window, H value heads,
Hk key heads, dk size of a query and key, dv of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.config.delta import DeltaConfig
from llmcli.graph.node import Kernel, PartGraph, Site
from llmcli.graph.ops import Activate, Gate, Mix
from llmcli.graph.parts.conv import convolution
from llmcli.graph.recurrence import (
    LinearMap,
    LogDecay,
    Recurrence,
    StateAfter,
    StepSize,
    UnitLength,
)
from llmcli.graph.rows import Rows, sizes_of

RECURRENT_ROWS = """
    conv       Y_conv   T C     conv       the weighted sum of the last tokens
    log_decay  g        T H     scan wide  log decays of the state
    gate_act   SiLU(Z)  H T dv  scan wide  the output gates
    leave      T        T D     linear_out
    w          a filter for each channel
    dt_bias    bias of the step size
    A_log      logarithm of each head's decay rate
    W_out      projection of all heads back to the width
"""
_ROWS = """
    in         Y        T C        linear_in  queries, keys and values before the convolution
    gate       Z        H T dv     linear_in  the output gates, before SiLU
    beta_in    B        T H        linear_in  the write strengths, before σ
    decay_in   a        T H        linear_in  the decays, before softplus
    act        U        T C        conv       queries, keys and values side by side
    q          Q        Hk T dk    scan wide  queries of length 1 / √d_k
    k          K        Hk T dk    scan wide  keys of length 1
    v          V        H T dv     scan       values, each a mix of the last tokens
    beta  β  T H  scan wide  write strengths: the replaced share of the value at each key
    dt         dt       T H        scan wide  step sizes of the decay
    pattern    A        H T S      scan wide  the weight of each token's value, of either sign
    state      S        H T dk·dv  scan wide tap_only  the state after each token
    z          O        H T dv     scan wide  the state read by the queries
    z_norm     O_norm   H T dv     scan wide  the read values, normalized
    out        O_gated  H T dv     scan       the result, gated, as it enters the last projection
"""


def delta_graph(c: DeltaConfig, site: Site) -> PartGraph:
    """`in conv act q k v beta log_decay`, the map, `z`, and `out`, the last product's input.

    `pattern` and `state` are derived: no kernel stores a map, or the state after each token.
    """
    r = Rows(site.name, _ROWS + RECURRENT_ROWS, "mixers", sizes_of(c), layer=site.layer)
    enters, gate, beta, decay = (
        r.project(leaf, site.source, symbol=leaf.removesuffix("_in"), fused="in_gate_beta_decay")
        for leaf in ("in", "gate", "beta_in", "decay_in")
    )
    act = convolved(r, enters, c.length)
    queries, keys, values = r.cuts(act, c.CHANNELS)
    q = r.node("q", UnitLength(cut=queries, eps=c.eps, scale=c.key_dim**-0.5))
    k = r.node("k", UnitLength(cut=keys, eps=c.eps))
    v = r.node("v", values, shares=act)
    beta = r.node("beta", Activate(source=beta, function="sigmoid"))
    _, log_decay = decays(r, decay)
    z = scanned(r, (q, k, v, beta, log_decay), "Hk dk", passes=3, tiled=c.tiled)
    z = r.normalize("z_norm", z, c.norm, "the norm of every head's output", prefix="norm.")
    act = r.node("gate_act", Activate(source=gate, function="silu"))
    out = r.node("out", Gate(act=act, up=z))
    r.output(site, "the gated DeltaNet", "leave", out, symbol="out", over="H·dv")
    documents = {"dk": "d_k", "dv": "d_v", "Hk": "h_k", "H": "h"}
    return r.graph(*recurrent_kernels(r), segments={"C": c.CHANNELS}, documents=documents)


def convolved(r: Rows, source: str, length: int, *, bias: bool = False) -> str:
    """`conv` and `act`, with a ring of the last inputs."""
    conv = convolution(r, source, length, bias=bias)
    return r.node("act", Activate(source=conv, function="silu"))


def decays(r: Rows, source: str, **bounds: float) -> tuple[str, str]:
    """`dt`, with `bounds` of `StepSize`, and `log_decay`."""
    bias = r.parameter("dt_bias", "H", "dt", wide=True)
    dt = r.node("dt", StepSize(source=source, bias=bias, **bounds))
    rate = r.parameter("A_log", "H", "log_decay", wide=True)
    return dt, r.node("log_decay", LogDecay(source=dt, rate=rate))


def scanned(
    r: Rows, inputs: tuple[str, str, str, str, str], axes: str, *, passes: int, **kind: bool
) -> str:
    """`pattern`, `state` and `z` of queries, keys, values, step sizes and log decays.

    `axes`: of keys, such as `Hk dk`; each head's state is then `dk·dv`. `kind`: see `Recurrence`.
    """
    query, key, value, step, log_decay = inputs
    (shared, rows), heads = axes.split(), r.sizes["H"]
    given: dict[str, Any] = {"query": query, "key": key, "step": step, "log_decay": log_decay}
    of = Recurrence(heads=heads, group=heads // r.sizes[shared], **given | kind)
    pattern = r.node("pattern", LinearMap(of=of))
    state = r.node("state", StateAfter(of=of, value=value, columns=r.sizes["dv"]))
    formula, words = "S after the last token", "the state of each head"
    r.state("state", f"H {rows}·dv", state, "z", formula, words, wide=True)
    mix = Mix(pattern=pattern, value=value, query=of.query, group=1, window=None, signed=True)
    return r.node("z", replace(mix, state=f"H·{rows}·dv", passes=passes))


def recurrent_kernels(r: Rows) -> tuple[Kernel, ...]:
    """The kernels of `z` with a state: the map is only stored if edited, states never."""
    state = Kernel(fuses=(r.named("state"),))
    return Kernel(fuses=(r.named("pattern"),), optional=True), state


def delta_facts(c: DeltaConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    keys = () if c.key_heads == c.heads else (f"{c.key_heads} heads of queries and keys",)
    details = (*keys, f"convolution over {c.length} tokens")
    sizes = {"heads": c.heads, "head_dim": c.key_dim, "value_dim": c.value_dim}
    return {"kind": "gated DeltaNet", **sizes, "details": details}
