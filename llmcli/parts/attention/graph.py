"""Softmax attention: H query heads over Hk key/value heads (Vaswani et al. 2017; GQA 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.graph.node import Absent, Kernel, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import (
    Activate,
    Add,
    Gate,
    HeadShare,
    Mix,
    Normalize,
    Op,
    Project,
    Rotate,
    Score,
    Softmax,
)
from llmcli.parts.attention.config import AttentionConfig, ProportionalScaling
from llmcli.parts.norm.graph import norm_parameters

_OF = {"q": "queries", "k": "keys", "v": "values", "gate": "gates"}
_ONE = {"q": "query", "k": "key", "v": "value"}


def attention_graph(a: AttentionConfig, site: Site) -> PartGraph:
    """`q k v`, then optional `q_norm k_norm` and `q_rot k_rot`, then `z` and `attn_out`.

    `scores` and `pattern` before `z` are derived, since the fused kernel does not store them, and
    so is `result` after it, the heads' shares of `attn_out`. With gates: `gate` after the values,
    and `gate_act gated` after `z`.
    """
    p = site.name
    heads = {"q": ("H", "dh"), "k": ("Hk", "dh"), "v": ("Hk", "dv")}
    own = "qkv" if a.kv.layer is None else "q"
    fused = "" if len(a.entering) == 1 else "qkv_gate" if a.gated else "qkv"
    of = p if a.kv.layer is None else of_layer(p, a.kv.layer)  # the part with the keys and values
    last = {"q": f"{p}.q", "k": f"{of}.k", "v": f"{of}.v"}  # the form used by the attention
    letters = {part: part.upper() for part in "qkv"}
    nodes, parameters = [], []
    for part in own:
        head, number = heads[part]
        if part not in a.projections:
            nodes.append(Node(
                name=last[part], letter="V", axes=(head, "T", number),
                op=Add(parts=(last["k"],), before=()), words="the keys, not normalized or rotated",
                group="qkv", layer=site.layer, wide=a.kv.norm is not None, shares=last["k"],
                theirs=("attn.hook_v", "attn.v.hook_out"),
            ))  # fmt: skip
            continue
        bias = f"{p}.b_{part}" if a.qkv_bias else None
        few = head == "Hk" and a.kv_heads != a.heads
        project = Project(
            source=site.source, weight=f"{p}.W_{part}", bias=bias, over="D",
            columns=f"{head}·{number}", heads=a.heads if head == "H" else a.kv_heads,
            head="kv head" if few else "head", fused=fused and f"{p}.{fused}", clip=a.clip,
        )  # fmt: skip
        nodes.append(Node(
            name=last[part], letter=letters[part], axes=(head, "T", number), op=project,
            words=f"a {_ONE[part]} for each token and {'' if head == 'H' else 'kv '}head",
            # inputs of norms have at least float32
            group="qkv", layer=site.layer,
            wide=(a.qk_norm if part != "v" else a.kv.norm) is not None,
            theirs=(f"attn.hook_{part}", f"attn.{part}.hook_out"),
        ))  # fmt: skip
        whose = "all heads" if head == "H" else "all kv heads"
        parameters += _projection(
            site, part, ("D", f"{head}·{number}"), last[part], bias is not None,
            (f"projection to the {_OF[part]} of {whose}", f"bias of the {_OF[part]}"), fused,
        )  # fmt: skip
    if a.kv.norm is not None and "v" in own:
        name = f"{last['v']}_norm"
        weights = f"{name}.w" if a.kv.norm.weights else None
        nodes.append(_form(
            site, "v", name, "V_norm", heads["v"],
            Normalize(source=last["v"], norm=a.kv.norm, weight=weights), "normalized", "norm", (),
            together=False,
        ))  # fmt: skip
        parameters += norm_parameters(
            a.kv.norm, name, name, "dv", site.layer, "the norm of every value"
        )
        last["v"] = name
    if a.gated:
        gate = f"{p}.gate"
        bias = f"{p}.b_gate" if a.qkv_bias else None
        project = Project(
            source=site.source, weight=f"{p}.W_gate", bias=bias, over="D", columns="H·dv",
            heads=a.heads, fused=f"{p}.{fused}", clip=a.clip,
        )  # fmt: skip
        nodes.append(Node(
            name=gate, letter="G_o", axes=("H", "T", "dv"), op=project,
            words="the gates of each head's result, before their sigmoid", group="qkv",
            layer=site.layer,
        ))  # fmt: skip
        words = ("projection to the gates of all heads' results", "bias of the gates")
        parameters += _projection(
            site, "gate", ("D", "H·dv"), gate, bias is not None, words, fused, known=False
        )
    if a.qk_norm is not None:
        normed = {part: f"every {_ONE[part]}" for part in "qk"}
        if a.qk_norm_wide:
            normed = {part: f"all {_OF[part]} of a token" for part in "qk"}
        for part in own[:2]:
            name = f"{last[part]}_norm"
            normalize = Normalize(
                source=last[part], norm=a.qk_norm, weight=f"{name}.w",
                bias=f"{name}.b" if a.qk_norm.bias else None, joined=a.qk_norm_wide,
            )  # fmt: skip
            nodes.append(_form(
                site, part, name, f"{letters[part]}_norm", heads[part], normalize, "normalized",
                "norm", (f"attn.{part}_norm.hook_out", f"attn.hook_{part}_normed"), together=False,
            ))  # fmt: skip
            parameters += norm_parameters(
                a.qk_norm, name, name, f"{heads[part][0]}·dh" if a.qk_norm_wide else "dh",
                site.layer, f"the norm of {normed[part]}",
            )
            last[part], letters[part] = name, f"{letters[part]}_norm"
    if a.rope is not None:
        for part in own[:2]:
            name = f"{p}.{part}_rot"
            rotate = Rotate(source=last[part], rope=a.rope)
            nodes.append(_form(
                site, part, name, f"{part.upper()}_rot", heads[part], rotate,
                "rotated by their positions", "rope", (f"attn.hook_rot_{part}",),
                together=a.qk_norm is None and len(own) > 1,
            ))  # fmt: skip
            last[part] = name
    if a.kv.layer is not None:
        last["k"] += "_rot" if a.rope is not None else "_norm" * (a.qk_norm is not None)
        last["v"] += "_norm" * (a.kv.norm is not None)
    group = a.heads // a.kv_heads
    score = Score(
        query=last["q"], key=last["k"], scale=a.scale, head_dim=a.head_dim, group=group,
        window=a.window, root="√(d/h)" if a.divides(site.width) else "√d_k", cap=a.cap,
        growth=a.growth, slopes=a.slopes,
    )  # fmt: skip
    mix = Mix(
        pattern=f"{p}.pattern", value=last["v"], query=last["q"], group=group, window=a.window
    )
    nodes += mixed_nodes(site, score, mix, biased=a.out_bias, sinks=a.sinks, gated=a.gated)
    parameters += _projection(
        site, "o", ("H·dv", "D"), site.makes, a.out_bias,
        ("projection of all heads' results back to the width", "bias of the attention's output"),
    )  # fmt: skip
    if a.sinks:
        parameters.append(Parameter(
            name=f"{p}.sink", axes=("H",), makes=f"{p}.pattern", letter="sink", wide=True,
            words="a learned score per head, added to the softmax's denominator",
            kind="attention", layer=site.layer,
        ))  # fmt: skip
    return PartGraph(
        nodes=tuple(nodes),
        parameters=tuple(parameters),
        states=_states(a, site, p, last) if a.kv.layer is None else (),
        kernels=(fused_kernel(p),),
        sizes={"H": a.heads, "Hk": a.kv_heads, "dh": a.head_dim, "dv": a.value_dim},
        documents={
            "H": "h",
            "Hk": "h" if a.kv_heads == a.heads else "h_kv",
            "dh": "d/h" if a.divides(site.width) else "d_k",
            "dv": ("d/h" if a.divides(site.width) else "d_k")
            if a.value_dim == a.head_dim
            else "d_v",
        },
        absent=tuple(_absent(a, site)),
        entering=("attn.hook_in", *(f"attn.{part}.hook_in" for part in a.entering)),
        similar=(
            (r"(attn|self_attn|attention)\.(weights|probs)", (f"{p}.pattern",)),
            (r"(attn|self_attn|attention)\.(out|output|context)", (site.makes, f"{p}.z")),
            (r"([qkv])_proj", (rf"{p}.\1", rf"{p}.W_\1")),
            (r"o_proj", (site.makes, f"{p}.W_o")),
            (r"([qkvo])_proj\.weight", (rf"{p}.W_\1",)),
            (r"attn_([qkv])(\.weight)?", (rf"{p}.W_\1",)),
        ),
    )


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
    if a.slopes:
        details = (*details, "scores lowered by the keys' distance (ALiBi)")
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


def _absent(a: AttentionConfig, site: Site) -> Iterator[Absent]:
    if not a.gated:
        yield Absent(names=r"attn\.(gate(_act|d)?|[Wb]_gate)\b", why="its attention has no gate")
    if not a.sinks:
        yield Absent(names=r"attn\.sink\b", why="its attention has no sinks")
    yield Absent(names=r"(linattn|ssm)\b", why="its mixer is softmax attention")
    why = "its cache is of keys and values only"
    yield Absent(names=r"cache\.(state|conv|latent|k_pe)\b", why=why)
    why = "its queries and keys are projections of what enters the attention, not of latents"
    yield Absent(names=r"attn\.([Wb]_)?(q_latent|kv_latent|[qk]_pe)", why=why)
    if a.rope is not None and not site.learned_positions:
        why = "it has no learned positions, it rotates queries and keys instead"
        yield Absent(names=r"(hook_)?pos_embed\b", why=why)
    if a.rope is None:
        learned = ", it has learned positions" if site.learned_positions else ""
        theirs = {f"attn.hook_rot_{part}": f"attn.{part}_rot" for part in "qk"}
        yield Absent(names=r"attn\.[qk]_rot$", why=f"no rotation{learned}", theirs=theirs)
    if a.kv.layer is not None:
        why = f"its keys and values are those of block {a.kv.layer}"
        theirs = {f"attn.{one}": f"attn.{part}" for part in "kv"
                  for one in (f"hook_{part}", f"{part}.hook_out", f"{part}.hook_in")}
        theirs |= {"attn.hook_rot_k": "attn.k_rot", "attn.k_norm.hook_out": "attn.k_norm"}
        theirs |= {f"attn.W_{part.upper()}": f"attn.W_{part}" for part in "kv"}
        yield Absent(names=r"(attn\.([kv](_norm|_rot)?|[Wb]_[kv])|cache\.[kv])\b", why=why,
                     theirs=theirs)  # fmt: skip
    elif a.kv.equal:
        why = "its values are its keys before norm and rotation"
        yield Absent(names=r"attn\.[Wb]_v\b", why=why, theirs={"attn.W_V": "attn.W_v"})
    if a.kv.norm is None:
        yield Absent(names=r"attn\.v_norm", why="it does not normalize values")
    if a.qk_norm is None:
        theirs = {f"attn.{part}_norm.hook_out": f"attn.{part}_norm" for part in "qk"}
        theirs |= {f"attn.hook_{part}_normed": f"attn.{part}_norm" for part in "qk"}
        why = "it does not normalize queries and keys"
        yield Absent(names=r"attn\.[qk]_norm", why=why, theirs=theirs)
    without = ("" if a.qkv_bias else "qkv") + ("" if a.out_bias else "o")
    theirs = {f"attn.b_{part.upper()}": f"attn.b_{part}" for part in without}
    yield Absent(names=r"attn\.b_\w+$", why="it has no such bias", theirs=theirs)


def _projection(
    site: Site,
    symbol: str,
    axes: tuple[str, str],
    makes: str,
    biased: bool,
    words: tuple[str, str],
    fused: str = "",
    *,
    known: bool = True,
) -> list[Parameter]:
    """`W_<symbol>` and, with a bias, `b_<symbol>`; `known`: TransformerLens has them too."""
    p = site.name
    return [
        Parameter(
            name=f"{p}.{kind}_{symbol}", axes=axes if kind == "W" else axes[1:], makes=makes,
            words=said, kind="attention", letter=f"{kind}_{symbol}", layer=site.layer,
            turned=kind == "W", shares=f"{p}.{kind}_{fused}" if fused else None,
            theirs=(f"attn.{kind}_{symbol.upper()}",) if known else (),
        )
        for kind, said in zip("Wb" if biased else "W", words, strict=False)
    ]  # fmt: skip


def _form(
    site: Site,
    part: str,
    name: str,
    letter: str,
    axes: tuple[str, str],
    op: Normalize | Rotate,
    words: str,
    group: str,
    theirs: tuple[str, ...],
    *,
    together: bool,
) -> Node:
    """Another form of queries or keys; `together`: both are parts of one tensor."""
    both = f"{site.name}.qk_{name.rpartition('_')[2]}" if together else None
    return Node(
        name=name, letter=letter, axes=(axes[0], "T", axes[1]), op=op,
        words=f"the {_OF[part]}, {words}", group=group, layer=site.layer, shares=both,
        theirs=theirs,
    )  # fmt: skip


def mixed_nodes(
    site: Site, score: Score, mix: Mix, *, biased: bool, sinks: bool = False, gated: bool = False
) -> list[Node]:
    """`scores pattern z result`, of which the kernel only stores `z`, and the output.

    `gated`: the last projection reads `gated`, `z` times `gate_act`.
    """
    p, bias = site.name, f"{site.name}.b_o" if biased else None
    words, theirs = site.output("attention", "hook_attn_out", "attn.o.hook_out", "attn.hook_out")
    enters = mixed(p, gated=gated)
    share = HeadShare(source=enters, weight=f"{p}.W_o", whole=site.makes, bias=bias)
    out = Project(source=enters, weight=f"{p}.W_o", bias=bias, over="H·dv", columns="D")

    def derived(
        leaf: str, letter: str, axes: tuple[str, ...], op: Op, words: str, theirs: str
    ) -> Node:
        return Node(
            name=f"{p}.{leaf}", letter=letter, axes=axes, op=op, words=words, group="attention",
            layer=site.layer, wide=True, theirs=(theirs,),
        )  # fmt: skip

    gates: list[Node] = []
    if gated:
        rows = (
            ("gate_act", "Activation(G_o)", Activate(source=f"{p}.gate", function="sigmoid"),
             "the gates after their sigmoid, from 0 to 1", ()),
            ("gated", "C_gated", Gate(act=f"{p}.gate_act", up=f"{p}.z"),
             "for each head the mixed values times its gates", ("attn.o.hook_in",)),
        )  # fmt: skip
        gates = [
            Node(
                name=f"{p}.{leaf}", letter=letter, axes=("H", "T", "dv"), op=op, words=said,
                group="attention", layer=site.layer, theirs=names,
            )
            for leaf, letter, op, said, names in rows
        ]  # fmt: skip
    return [
        derived("scores", "S", ("H", "T", "S"), score,
                f"query times key, scaled{'' if score.cap is None else ', capped'}, −∞ where the"
                " mask hides the key",
                "attn.hook_attn_scores"),
        derived("pattern", "A", ("H", "T", "S"),
                Softmax(source=f"{p}.scores", sink=f"{p}.sink" if sinks else None),
                "attention weights: the softmax of the scores, rows that sum to 1"
                + (" minus the sink's weight" if sinks else ""),
                "attn.hook_pattern"),
        Node(
            name=f"{p}.z", letter="C", axes=("H", "T", "dv"), op=mix,
            words="for each head the values, mixed by its attention weights",
            group="attention", layer=site.layer,
            theirs=("attn.hook_z",) if gated else ("attn.hook_z", "attn.o.hook_in"),
        ),
        *gates,
        derived("result", "R", ("H", "T", "D"), share,
                "the contribution of each head to the residual stream", "attn.hook_result"),
        Node(
            name=site.makes, letter=site.letter, axes=("T", "D"), op=out, words=words,
            group="out", layer=site.layer, wide=True, theirs=theirs,
        ),
    ]  # fmt: skip


def _states(a: AttentionConfig, site: Site, p: str, last: dict[str, str]) -> tuple[State, ...]:
    """`cache.{layer}.k` `[B, Hk, S, dh]` (after norm and rotation) and `.v` `[B, Hk, S, dv]`."""
    kept = (("k", "dh", f"{'rotated ' if a.rope else ''}keys"), ("v", "dv", "values"))
    return tuple(
        State(
            name=f"cache.{site.layer}.{part}", axes=("Hk", "S", number), holds=last[part],
            before=f"{p}.scores", formula=f"the {what} of every position so far",
            words=f"the cached {_OF[part]}", layer=site.layer, cached=True,
        )
        for part, number, what in kept
    )  # fmt: skip
