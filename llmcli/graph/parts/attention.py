"""Softmax attention: H query heads over Hk key/value heads (Vaswani et al. 2017; GQA 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.config.attention import AttentionConfig, Chunk, ProportionalScaling, most_keys
from llmcli.config.norm import JoinedNorm
from llmcli.graph.node import Kernel, PartGraph, Site
from llmcli.graph.ops import Activate, Add, Gate, HeadShare, Mix, Rotate, Score, Softmax
from llmcli.graph.rows import Rows, fields_of, sizes_of

MIXED_ROWS = """
    scores    S  H T S   attention wide  query times key, scaled
    pattern   A  H T S   attention wide  attention weights: the softmax of the scores
    z         C  H T dv  attention       for each head the values, mixed by its attention weights
    gate_act  Activation(G_o)  H T dv  attention  the gates after their sigmoid, from 0 to 1
    gated     C_gated  H T dv  attention  for each head the mixed values times its gates
    result    R  H T D   attention wide  the contribution of each head to the residual stream
    o         T  T D     out
    W_o       projection of all heads' results back to the width
    b_o       bias of the attention's output
"""
_ROWS = """
    q       Q       H T dh   qkv   a query for each token and head
    k       K       Hk T dh  qkv   a key for each token and kv head
    v       V       Hk T dv  qkv   a value for each token and kv head
    k_as_v  V       Hk T dv  qkv   the keys, not normalized or rotated
    gate    G_o     H T dv   qkv   the gates of each head's result, before their sigmoid
    q_norm  Q_norm  H T dh   norm  the queries, normalized
    k_norm  K_norm  Hk T dh  norm  the keys, normalized
    v_norm  V_norm  Hk T dv  norm  the values, normalized
    q_rot   Q_rot   H T dh   rope  the queries, rotated by their positions
    k_rot   K_rot   Hk T dh  rope  the keys, rotated by their positions
    W_q     projection to the queries of all heads
    W_k     projection to the keys of all kv heads
    W_v     projection to the values of all kv heads
    W_gate  projection to the gates of all heads' results
    b_q     bias of the queries
    b_k     bias of the keys
    b_v     bias of the values
    b_gate  bias of the gates
    sink    a learned score per head, added to the softmax's denominator
"""
_OF = {"q": ("query", "queries"), "k": ("key", "keys")}


def attention_graph(a: AttentionConfig, site: Site) -> PartGraph:
    """`q k v`, then optional `q_norm k_norm` and `q_rot k_rot`, then `z` and `attn_out`.

    `scores` and `pattern` before `z` are derived, since the fused kernel does not store them, and
    so is `result` after it, the heads' shares of `attn_out`. With gates: `gate` after the values,
    and `gate_act gated` after `z`.
    """
    r = Rows(site.name, _ROWS + MIXED_ROWS, "attention", sizes_of(a), layer=site.layer)
    own = "qkv" if a.kv.layer is None else "q"
    fused = "" if len(a.entering) == 1 else "qkv_gate" if a.gated else "qkv"
    query, key, value = entering(a, site.name)
    last: dict[str, str] = {}  # the last form so far
    for x in a.projections:
        # inputs of norms have at least float32
        wide = (a.kv.norm if x == "v" else a.qk_norm) is not None
        clip = None if wide else a.clip
        head = "head" if x == "q" or a.kv_heads == a.heads else "kv head"
        last[x] = r.project(
            x, site.source, bias=a.qkv_bias, fused=fused, head=head, clip=clip, wide=wide
        )
    if a.kv.equal and own == "qkv":
        same, wide = Add(parts=(last["k"],), before=()), a.kv.norm is not None
        last["v"] = r.node("k_as_v", same, name="v", shares=last["k"], wide=wide)
    if a.kv.norm is not None and own == "qkv":
        which = "the norm of every value"
        last["v"] = r.normalize("v_norm", last["v"], a.kv.norm, which, clip=a.clip)
    if a.gated:
        r.project("gate", site.source, bias=a.qkv_bias, fused=fused, clip=a.clip)
    if a.qk_norm is not None:
        for x in own[:2]:
            one, several = _OF[x]
            joined = isinstance(a.qk_norm, JoinedNorm)
            which = f"all {several} of a token" if joined else f"every {one}"
            last[x] = r.normalize(
                f"{x}_norm", last[x], a.qk_norm, f"the norm of {which}", joined=joined, clip=a.clip
            )
    if a.rope is not None:
        both = r.named("qk_rot") if a.qk_norm is None and own == "qkv" else None
        for x in own[:2]:
            last[x] = r.node(f"{x}_rot", Rotate(source=last[x], rope=a.rope), shares=both)
    if a.kv.layer is None:
        rotated = "rotated " if a.rope is not None else ""
        r.cache("k", "Hk S dh", key, f"{rotated}keys", "keys")
        r.cache("v", "Hk S dv", value, "values")
    divides, group, scored = a.divides(site.width), a.heads // a.kv_heads, a.scores
    root = "√(d/h)" if divides else "√d_k"
    own_query: dict[str, Any] = {"query": query, "group": group}
    score = Score(key=key, config=scored, head_dim=a.head_dim, root=root, **own_query)
    mix = Mix(pattern=r.named("pattern"), value=value, window=scored.window, **own_query)
    mixed_rows(r, site, score, mix, bias=a.out_bias, gated=a.gated)
    number = "d/h" if divides else "d_k"
    documents = {"H": "h", "Hk": "h" if a.kv_heads == a.heads else "h_kv", "dh": number}
    documents["dv"] = number if a.value_dim == a.head_dim else "d_v"
    return r.graph(fused_kernel(site.name), documents=documents)


def entering(a: AttentionConfig, name: str) -> tuple[str, str, str]:
    """The queries, keys and values of the part `name` that enter its scores and map.

    Rotated, normalized or plain; keys and values may be of another layer.
    """
    blocks, layer, part = name.split(".", 2)
    own = f"{blocks}.{layer if a.kv.layer is None else a.kv.layer}.{part}"
    last = "_rot" if a.rope is not None else "_norm" if a.qk_norm is not None else ""
    return f"{name}.q{last}", f"{own}.k{last}", f"{own}.v{'_norm' if a.kv.norm else ''}"


def mixed_rows(
    r: Rows,
    site: Site,
    score: Score,
    mix: Mix,
    *,
    bias: bool,
    gated: bool = False,
) -> None:
    """`scores pattern z result`, of which the kernel only stores `z`, and the output.

    `gated`: the last projection reads `gated`, `z` times `gate_act`.
    """
    capped, sinks = "" if score.config.cap is None else ", capped", score.config.sinks
    words = f"query times key, scaled{capped}, −∞ where the mask hides the key"
    scores = r.node("scores", score, words=words)
    minus = " minus the sink's weight" if sinks else ""
    words = f"attention weights: the softmax of the scores, rows that sum to 1{minus}"
    softmax = Softmax(source=scores, sink=r.named("sink") if sinks else None)
    r.node("pattern", softmax, words=words)
    enters = r.node("z", mix)
    if gated:
        act = r.node("gate_act", Activate(source=r.named("gate"), function="sigmoid"))
        enters = r.node("gated", Gate(act=act, up=enters))
    b = r.named("b_o") if bias else None
    r.node("result", HeadShare(source=enters, weight=r.named("W_o"), whole=site.output, bias=b))
    r.output(site, "attention", "o", enters, over="H·dv", bias=bias)
    if sinks:
        r.parameter("sink", "H", "pattern", wide=True)


def fused_kernel(name: str) -> Kernel:
    """`softmax(Q Kᵀ) V` of the part `name`: a block of scores at a time, in registers."""
    return Kernel(fuses=(f"{name}.scores", f"{name}.pattern"), optional=True)


def mixed(name: str, *, gated: bool) -> str:
    """The input of the last projection of the part `name`."""
    return f"{name}.gated" if gated else f"{name}.z"


def attention_facts(a: AttentionConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    own = a.scores
    details = () if own.cap is None else (f"scores capped at {own.cap:g}",)
    if a.clip is not None:
        details = (*details, f"queries, keys and values clipped at {a.clip:g}")
    if own.slopes:
        details = (*details, "scores lowered by the keys' distance (ALiBi)")
    if own.sinks:
        details = (*details, "a learned sink in each head")
    if a.gated:
        details = (*details, "results gated")
    if a.rope is not None and a.rope.dims < a.head_dim:
        details = (f"{a.rope.dims} of {a.head_dim} numbers rotated", *details)
    if a.rope is not None and isinstance(a.rope.scaling, ProportionalScaling):
        rotated = 2 * a.rope.scaling.pairs
        details = (f"{rotated} of {a.head_dim} numbers rotated", *details)
    if a.kv.layer is not None:
        details = (*details, f"keys and values of block {a.kv.layer}")
    elif a.kv.equal:
        details = (*details, "values are the keys' projection")
    if a.kv.norm is not None:
        details = (*details, "values normalized")
    kind = "full attention" if own.window is None else "sliding window"
    kind = "chunked attention" if isinstance(own.window, Chunk) else kind
    found = {"kind": kind, "window": most_keys(own.window), "details": details}
    found |= {"rotary": a.rope is not None, "qk_norm": a.qk_norm is not None}
    return found | fields_of(a, "heads kv_heads head_dim value_dim")
