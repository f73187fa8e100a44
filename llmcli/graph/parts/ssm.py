"""Mamba-2: projections, convolution, the recurrence's inputs, its map, the skip, gate and norm.

Letters: T tokens, S keys, D width, C channels, L tokens of the convolution's window, H heads, G
groups, N size of B and C per group, dv size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmcli.config.ssm import SsmConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Activate, Gate
from llmcli.graph.parts.delta import RECURRENT_ROWS, convolved, decays, recurrent_kernels, scanned
from llmcli.graph.recurrence import Skip
from llmcli.graph.rows import Rows, sizes_of

_ROWS = """
    gate     Z        H T dv    linear_in  the output gates, before SiLU
    in       Y        T C       linear_in  values, B and C before the convolution
    dt_in    a        T H       linear_in  step sizes before softplus
    act      U        T C       conv       values, B and C side by side
    x        X_ssm    H T dv    scan       values, each a mix of the last tokens
    B        B        G T N     scan       the keys, at which values are written
    C        C_ssm    G T N     scan       the queries, which read the state
    dt       dt       T H       scan wide  step sizes of writes and decays
    pattern  A        H T S     scan wide  the weight of each token's values, of either sign
    state    S        H T N·dv  scan wide tap_only  the state after each token
    z        O        H T dv    scan wide  the state read by C
    skip     O_D      H T dv    scan wide
    gated    O_gated  H T dv    scan wide  the result, gated
    out      O_norm   H T dv    scan       the result, normalized, as it enters the last projection
    b        bias of the convolution
    D        the factor on the token's own values
    b_out    bias of the output
"""


def ssm_graph(c: SsmConfig, site: Site) -> PartGraph:
    """`gate in dt_in`, `conv act x B C dt log_decay`, the map, `z`, `skip`, `gated` and `out`.

    `pattern` and `state` are derived: no kernel stores a map, or the state after each token.
    """
    r = Rows(site.name, _ROWS + RECURRENT_ROWS, "mixers", sizes_of(c), layer=site.layer)
    gate, enters, dt = (
        r.project(
            leaf, site.source, symbol=leaf.removesuffix("_in"), bias=c.bias, fused="gate_in_dt"
        )
        for leaf in ("gate", "in", "dt_in")
    )
    act = convolved(r, enters, c.length, bias=c.conv_bias)
    cuts = zip(("x", "B", "C"), r.cuts(act, c.CHANNELS), strict=True)
    value, key, query = (r.node(leaf, cut, shares=act) for leaf, cut in cuts)
    dt, log_decay = decays(r, dt, least=c.least, most=c.most)
    z = scanned(r, (query, key, value, dt, log_decay), "G N", passes=2, plain=True)
    skip = Skip(source=z, value=value, weight=r.parameter("D", "H", "skip", wide=True))
    words = "the read values plus the token's values times a factor per head"
    z = r.node("skip", skip, words=words)
    gates = r.node("gate_act", Activate(source=gate, function="silu"))
    z = r.node("gated", Gate(act=gates, up=z))
    out = r.normalize(
        "out", z, c.norm, "the norm of the output", prefix="norm.", joined=True, groups=c.groups
    )
    r.output(site, "the Mamba-2 mixer", "leave", out, symbol="out", over="H·dv", bias=c.bias)
    documents = {"dv": "d_v", "H": "h"}
    return r.graph(*recurrent_kernels(r), segments={"C": c.CHANNELS}, documents=documents)


def ssm_facts(c: SsmConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    groups = f"{c.groups} groups" if c.groups > 1 else "1 group"
    details = [f"state of {c.state} in {groups}", f"convolution over {c.length} tokens"]
    if c.least > 0 or c.most < math.inf:
        most = f" to {c.most:g}" if c.most < math.inf else ""
        details.append(f"step sizes from {c.least:g}{most}")
    sizes = {"heads": c.heads, "head_dim": c.head_dim}
    return {"kind": "Mamba-2", **sizes, "details": tuple(details)}
