"""Softmax attention: H query heads over Hk key/value heads (Vaswani et al. 2017; GQA 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.graph.node import Kernel, PartGraph, Site
from llmcli.graph.ops import Activate, Add, Gate, HeadShare, Mix, Rotate, Score, Softmax
from llmcli.graph.rows import Rows, sizes_of
from llmcli.parts.attention.config import AXES, AttentionConfig, ProportionalScaling

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
MIXED_NAMES = """
    scores   attn.hook_attn_scores
    pattern  attn.hook_pattern
    gated    attn.o.hook_in
    result   attn.hook_result
    W_o      attn.W_O
    b_o      attn.b_O
"""
_NAMES = """
    q       attn.hook_q attn.q.hook_out
    k       attn.hook_k attn.k.hook_out
    v       attn.hook_v attn.v.hook_out
    q_norm  attn.q_norm.hook_out attn.hook_q_normed
    k_norm  attn.k_norm.hook_out attn.hook_k_normed
    q_rot   attn.hook_rot_q
    k_rot   attn.hook_rot_k
    W_q     attn.W_Q
    W_k     attn.W_K
    W_v     attn.W_V
    b_q     attn.b_Q
    b_k     attn.b_K
    b_v     attn.b_V
"""
_OF = {"q": ("query", "queries"), "k": ("key", "keys")}


def attention_graph(a: AttentionConfig, site: Site) -> PartGraph:
    """`q k v`, then optional `q_norm k_norm` and `q_rot k_rot`, then `z` and `attn_out`.

    `scores` and `pattern` before `z` are derived, since the fused kernel does not store them, and
    so is `result` after it, the heads' shares of `attn_out`. With gates: `gate` after the values,
    and `gate_act gated` after `z`.
    """
    r = Rows(
        site.name, _ROWS + MIXED_ROWS, layer=site.layer, kind="attention",
        sizes=sizes_of(a, AXES), theirs=_NAMES + MIXED_NAMES,
    )  # fmt: skip
    own = "qkv" if a.kv.layer is None else "q"
    fused = "" if len(a.entering) == 1 else "qkv_gate" if a.gated else "qkv"
    last: dict[str, str] = {}  # the form used by the attention
    for x in a.projections:
        # inputs of norms have at least float32
        wide = (a.kv.norm if x == "v" else a.qk_norm) is not None
        head = "head" if x == "q" or a.kv_heads == a.heads else "kv head"
        last[x] = r.project(
            x, site.source, bias=a.qkv_bias, fused=fused, head=head, clip=a.clip, wide=wide
        )
    if a.kv.equal and own == "qkv":
        last["v"] = r.node(
            "v", Add(parts=(last["k"],), before=()), shares=last["k"], wide=a.kv.norm is not None,
            words="the keys, not normalized or rotated",
        )  # fmt: skip
    if a.kv.norm is not None and own == "qkv":
        last["v"] = r.normalize("v_norm", last["v"], a.kv.norm, "the norm of every value")
    if a.gated:
        r.project("gate", site.source, bias=a.qkv_bias, fused=fused, clip=a.clip)
    if a.qk_norm is not None:
        for x in own[:2]:
            one, several = _OF[x]
            which = f"all {several} of a token" if a.qk_norm_wide else f"every {one}"
            last[x] = r.normalize(
                f"{x}_norm", last[x], a.qk_norm, f"the norm of {which}", joined=a.qk_norm_wide
            )
    if a.rope is not None:
        both = r.named("qk_rot") if a.qk_norm is None and own == "qkv" else None
        for x in own[:2]:
            last[x] = r.node(f"{x}_rot", Rotate(source=last[x], rope=a.rope), shares=both)
    if a.kv.layer is None:
        for x, size, what in (("k", "dh", "keys"), ("v", "dv", "values")):
            rotated = "rotated " if x == "k" and a.rope is not None else ""
            r.state(
                x, f"Hk S {size}", last[x], "scores", cached=True, words=f"the cached {what}",
                formula=f"the {rotated}{what} of every position so far",
            )  # fmt: skip
    else:
        lender = of_layer(site.name, a.kv.layer)
        last["k"] = f"{lender}.k{'_rot' if a.rope else '_norm' if a.qk_norm else ''}"
        last["v"] = f"{lender}.v{'_norm' if a.kv.norm else ''}"
    divides, group = a.divides(site.width), a.heads // a.kv_heads
    score = Score(
        query=last["q"], key=last["k"], scale=a.scale, head_dim=a.head_dim, group=group,
        window=a.window, root="√(d/h)" if divides else "√d_k", cap=a.cap, growth=a.growth,
    )  # fmt: skip
    mix = Mix(
        pattern=r.named("pattern"), value=last["v"], query=last["q"], group=group, window=a.window
    )
    mixed_rows(r, site, score, mix, bias=a.out_bias, sinks=a.sinks, gated=a.gated)
    _absent(r, a, site)
    number = "d/h" if divides else "d_k"
    p = site.name
    return r.graph(
        fused_kernel(p),
        documents={
            "H": "h", "Hk": "h" if a.kv_heads == a.heads else "h_kv", "dh": number,
            "dv": number if a.value_dim == a.head_dim else "d_v",
        },
        entering=("attn.hook_in", *(f"attn.{part}.hook_in" for part in a.entering)),
        similar=(
            (r"(attn|self_attn|attention)\.(weights|probs)", (f"{p}.pattern",)),
            (r"(attn|self_attn|attention)\.(out|output|context)", (site.makes, f"{p}.z")),
            (r"([qkv])_proj", (rf"{p}.\1", rf"{p}.W_\1")),
            (r"o_proj", (site.makes, f"{p}.W_o")),
            (r"([qkvo])_proj\.weight", (rf"{p}.W_\1",)),
            (r"attn_([qkv])(\.weight)?", (rf"{p}.W_\1",)),
        ),
    )  # fmt: skip


def mixed_rows(
    r: Rows, site: Site, score: Score, mix: Mix, *, bias: bool, sinks: bool = False,
    gated: bool = False,
) -> None:  # fmt: skip
    """`scores pattern z result`, of which the kernel only stores `z`, and the output.

    `gated`: the last projection reads `gated`, `z` times `gate_act`.
    """
    capped = "" if score.cap is None else ", capped"
    scores = r.node(
        "scores", score, words=f"query times key, scaled{capped}, −∞ where the mask hides the key"
    )
    minus = " minus the sink's weight" if sinks else ""
    r.node(
        "pattern", Softmax(source=scores, sink=r.named("sink") if sinks else None),
        words=f"attention weights: the softmax of the scores, rows that sum to 1{minus}",
    )  # fmt: skip
    enters = r.node("z", mix, theirs=("attn.hook_z", "attn.o.hook_in")[: 2 - gated])
    if gated:
        act = r.node("gate_act", Activate(source=r.named("gate"), function="sigmoid"))
        enters = r.node("gated", Gate(act=act, up=enters))
    biased = r.named("b_o") if bias else None
    r.node("result", HeadShare(source=enters, weight=r.named("W_o"), whole=site.makes, bias=biased))
    names = ("hook_attn_out", "attn.o.hook_out", "attn.hook_out")
    r.output(site, "attention", "o", enters, *names, over="H·dv", bias=bias)
    if sinks:
        r.parameter("sink", "H", "pattern", wide=True)


def fused_kernel(name: str) -> Kernel:
    """`softmax(Q Kᵀ) V` of the part `name`: a block of scores at a time, in registers."""
    return Kernel(covers=(f"{name}.scores", f"{name}.pattern"), optional=True)


def of_layer(name: str, layer: int) -> str:
    """The same part in block `layer`: `blocks.20.attn` → `blocks.13.attn`."""
    blocks, _, part = name.split(".", 2)
    return f"{blocks}.{layer}.{part}"


def mixed(name: str, *, gated: bool) -> str:
    """The input of the last projection of the part `name`."""
    return f"{name}.gated" if gated else f"{name}.z"


def attention_facts(a: AttentionConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    details = () if a.cap is None else (f"scores capped at {a.cap:g}",)
    if a.clip is not None:
        details = (*details, f"queries, keys and values clipped at {a.clip:g}")
    if a.sinks:
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
    return {
        "kind": "full attention" if a.window is None else "sliding window",
        "window": a.window, "heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim,
        "value_dim": a.value_dim, "rotary": a.rope is not None, "qk_norm": a.qk_norm is not None,
        "details": details,
    }  # fmt: skip


def _absent(r: Rows, a: AttentionConfig, site: Site) -> None:
    if not a.gated:
        r.absent(r"attn\.(gate(_act|d)?|[Wb]_gate)\b", "its attention has no gate")
    if not a.sinks:
        r.absent(r"attn\.sink\b", "its attention has no sinks")
    r.absent(r"(linattn|ssm)\b", "its mixer is softmax attention")
    r.absent(r"cache\.(state|conv|latent|k_pe)\b", "its cache is of keys and values only")
    why = "its queries and keys are projections of what enters the attention, not of latents"
    r.absent(r"attn\.([Wb]_)?(q_latent|kv_latent|[qk]_pe)", why)
    if a.rope is not None:
        absent_positions(r, site)
    else:
        learned = ", it has learned positions" if site.learned_positions else ""
        theirs = {f"attn.hook_rot_{x}": f"attn.{x}_rot" for x in "qk"}
        r.absent(r"attn\.[qk]_rot$", f"no rotation{learned}", theirs)
    if a.kv.layer is not None:
        theirs = {f"attn.{one}": f"attn.{x}" for x in "kv"
                  for one in (f"hook_{x}", f"{x}.hook_out", f"{x}.hook_in")}  # fmt: skip
        theirs |= {"attn.hook_rot_k": "attn.k_rot", "attn.k_norm.hook_out": "attn.k_norm"}
        theirs |= {f"attn.W_{x.upper()}": f"attn.W_{x}" for x in "kv"}
        why = f"its keys and values are those of block {a.kv.layer}"
        r.absent(r"(attn\.([kv](_norm|_rot)?|[Wb]_[kv])|cache\.[kv])\b", why, theirs)
    elif a.kv.equal:
        why = "its values are its keys before norm and rotation"
        r.absent(r"attn\.[Wb]_v\b", why, {"attn.W_V": "attn.W_v"})
    if a.kv.norm is None:
        r.absent(r"attn\.v_norm", "it does not normalize values")
    if a.qk_norm is None:
        absent_norms(r, "it does not normalize queries and keys")
    absent_biases(r, ("" if a.qkv_bias else "qkv") + ("" if a.out_bias else "o"))


def absent_positions(r: Rows, site: Site) -> None:
    """Learned positions, of attention with rotation."""
    if not site.learned_positions:
        why = "it has no learned positions, it rotates queries and keys instead"
        r.absent(r"(hook_)?pos_embed\b", why)


def absent_norms(r: Rows, why: str) -> None:
    """Norms of queries and keys."""
    theirs = {f"attn.{x}_norm.hook_out": f"attn.{x}_norm" for x in "qk"}
    theirs |= {f"attn.hook_{x}_normed": f"attn.{x}_norm" for x in "qk"}
    r.absent(r"attn\.[qk]_norm", why, theirs)


def absent_biases(r: Rows, letters: str) -> None:
    """Biases; those of `letters` are missing."""
    theirs = {f"attn.b_{x.upper()}": f"attn.b_{x}" for x in letters}
    r.absent(r"attn\.b_\w+$", "it has no such bias", theirs)
