"""Latent attention: the cache keeps a latent and a rotated key per token (arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import Join, Mix, Normalize, Op, Project, Rotate, Score
from llmcli.parts.attention.graph import fused_kernel, mixed_nodes
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.norm.graph import norm_parameters

_LETTERS = {
    "q_latent": "C_q", "q": "Q", "q_pe": "Q_pe", "kv_latent": "C_kv", "k_pe": "K_pe", "k": "K",
    "v": "V",
}  # fmt: skip
_WORDS = {
    "q_latent": "the latents of queries", "q": "queries for content",
    "q_pe": "queries for positions", "kv_latent": "the latents of keys and values",
    "k_pe": "the key for positions, one for all heads", "k": "keys of content", "v": "values",
}  # fmt: skip
_HEADS = {"q": "dn", "q_pe": "dr", "k": "dn", "v": "dv"}  # separate for each head
_SIZES = {"q_latent": "dq", "kv_latent": "dc", "k_pe": "dr"}
_TOGETHER = (("q", "q_pe"), ("kv_latent", "k_pe"), ("k", "v"))  # computed by one product


def latent_graph(a: LatentConfig, site: Site) -> PartGraph:
    """`q_latent`, `q`, `q_pe`, `kv_latent`, `k_pe`, their norms, rotations, and `q_rot`.

    `k`, `v` and `k_rot` are of the new tokens, for a tap only; they are not cached. `scores`,
    `pattern`, `z` and `result` as in `parts.attention`.
    """
    p = site.name
    rows = [
        _project(a, site, "q_latent", site.source), _norm(a, site, "q_latent"),
    ] if a.query_rank is not None else []  # fmt: skip
    queries = site.source if a.query_rank is None else f"{p}.q_latent_norm"
    rows += [
        _project(a, site, "q", queries), _project(a, site, "q_pe", queries),
        _form(site, "q_pe_rot", ("H", "T", "dr"), Rotate(source=f"{p}.q_pe", rope=a.rope),
              "the queries for positions, rotated by them"),
        _form(site, "q_rot", ("H", "T", "dh"), Join(start=f"{p}.q", end=f"{p}.q_pe_rot"),
              "the queries as they enter the scores"),
        _project(a, site, "kv_latent", site.source), _norm(a, site, "kv_latent"),
        _project(a, site, "k_pe", site.source),
        _form(site, "k_pe_rot", ("T", "dr"), Rotate(source=f"{p}.k_pe", rope=a.rope),
              "the key for positions, rotated by them"),
        *(_project(a, site, leaf, f"{p}.kv_latent_norm") for leaf in "kv"),
        _form(site, "k_rot", ("H", "T", "dh"), Join(start=f"{p}.k", end=f"{p}.k_pe_rot"),
              "the keys as they enter the scores", shown=True),
    ]  # fmt: skip
    score = Score(
        query=f"{p}.q_rot", key=f"{p}.k_rot", scale=a.scale, head_dim=a.head_dim, group=1,
        window=None, root="√d_k",
    )  # fmt: skip
    mix = Mix(
        pattern=f"{p}.pattern", value=f"{p}.v", query=score.query, group=1, window=None, latent=a
    )
    rows += mixed_nodes(site, score, mix, biased=a.bias)
    return PartGraph(
        nodes=tuple(rows),
        parameters=tuple(_parameters(a, site)),
        states=_states(site),
        kernels=(fused_kernel(p),),
        sizes={
            "H": a.heads, "dh": a.head_dim, "dn": a.content, "dr": a.rope.dims, "dv": a.value_dim,
            "dc": a.rank, **({} if a.query_rank is None else {"dq": a.query_rank}),
        },
        documents={"H": "h", "dh": "d_k", "dv": "d_v"},
        absent=tuple(_absent(a, site)),
        entering=("attn.hook_in",),
    )


def latent_facts(a: LatentConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    queries = "" if a.query_rank is None else f", queries of {a.query_rank}"
    details = (
        f"latents of {a.rank}{queries}", f"{a.rope.dims} of {a.head_dim} numbers rotated",
    )  # fmt: skip
    return {
        "kind": "latent attention", "heads": a.heads, "kv_heads": a.heads, "head_dim": a.head_dim,
        "value_dim": a.value_dim, "rotary": True, "qk_norm": False, "details": details,
    }  # fmt: skip


def _project(a: LatentConfig, site: Site, leaf: str, source: str) -> Node:
    p, size = site.name, _HEADS.get(leaf)
    fused = next(("_".join(one) for one in _TOGETHER if leaf in one), "")
    biased = a.bias and size is None
    op = Project(
        source=source, weight=f"{p}.W_{leaf}", bias=f"{p}.b_{leaf}" if biased else None,
        over={"q_latent_norm": "dq", "kv_latent_norm": "dc"}.get(source.rpartition(".")[2], "D"),
        columns=_SIZES[leaf] if size is None else f"H·{size}", heads=0 if size is None else a.heads,
        fused=f"{p}.{fused}" if fused else "",
    )  # fmt: skip
    return Node(
        name=f"{p}.{leaf}", letter=_LETTERS[leaf], op=op, words=_WORDS[leaf], layer=site.layer,
        axes=("T", _SIZES[leaf]) if size is None else ("H", "T", size),
        group="attention" if leaf in "kv" else "qkv",
        wide=leaf in ("q_latent", "kv_latent"), shown=leaf in "kv",
        theirs=("attn.hook_v",) if leaf == "v" else (),
    )  # fmt: skip


def _norm(a: LatentConfig, site: Site, leaf: str) -> Node:
    name = f"{site.name}.{leaf}_norm"
    op = Normalize(source=f"{site.name}.{leaf}", norm=a.norm, weight=f"{name}.w")
    return Node(
        name=name, letter=f"{_LETTERS[leaf]}_norm", axes=("T", _SIZES[leaf]), op=op, group="norm",
        words=f"{_WORDS[leaf]}, normalized", layer=site.layer,
    )  # fmt: skip


def _form(
    site: Site, leaf: str, axes: tuple[str, ...], op: Op, words: str, *, shown: bool = False
) -> Node:
    name, letter = f"{site.name}.{leaf}", f"{leaf[0].upper()}{leaf[1:]}"
    group = "attention" if shown else "rope"
    return Node(
        name=name, letter=letter, axes=axes, op=op, words=words, group=group, layer=site.layer,
        shown=shown,
    )  # fmt: skip


def _parameters(a: LatentConfig, site: Site) -> Iterator[Parameter]:
    """In execution order: `W_q_latent` … `W_o`, and biases of projections not split into heads."""
    p = site.name
    rank = "D" if a.query_rank is None else "dq"
    over = {"q": rank, "q_pe": rank, "k": "dc", "v": "dc"}
    for leaf, words in _WORDS.items():
        if leaf == "q_latent" and a.query_rank is None:
            continue
        size = _HEADS.get(leaf)
        columns = _SIZES[leaf] if size is None else f"H·{size}"
        shares = next(("_".join(one) for one in _TOGETHER if leaf in one), "")
        for kind in "Wb" if a.bias and size is None else "W":
            yield Parameter(
                name=f"{p}.{kind}_{leaf}", makes=f"{p}.{leaf}", kind="attention",
                axes=(over.get(leaf, "D"), columns) if kind == "W" else (columns,),
                words=f"{'projection to' if kind == 'W' else 'bias of'} {words}",
                letter=f"{kind}_{leaf}", layer=site.layer, turned=kind == "W",
                shares=f"{p}.{kind}_{shares}" if shares else None, dense=leaf in "kv",
            )  # fmt: skip
        if leaf in ("q_latent", "kv_latent"):
            name = f"{p}.{leaf}_norm"
            yield from norm_parameters(
                a.norm, name, name, _SIZES[leaf], site.layer, f"the norm of {words}"
            )
    for kind in "Wb" if a.bias else "W":
        yield Parameter(
            name=f"{p}.{kind}_o", makes=site.makes, kind="attention",
            axes=("H·dv", "D") if kind == "W" else ("D",),
            words="projection of all heads' results back to the width" if kind == "W"
            else "bias of the attention's output",
            letter=f"{kind}_o", layer=site.layer, turned=kind == "W",
            theirs=(f"attn.{kind}_O",),
        )  # fmt: skip


def _states(site: Site) -> tuple[State, ...]:
    """`cache.{layer}.latent` `[B, S, dc]` and `.k_pe` `[B, S, dr]`, rotated."""
    kept = (
        ("latent", "dc", "kv_latent_norm", "normalized latents"),
        ("k_pe", "dr", "k_pe_rot", "rotated keys"),
    )  # fmt: skip
    return tuple(
        State(
            name=f"cache.{site.layer}.{leaf}", axes=("S", size), holds=f"{site.name}.{holds}",
            before=f"{site.name}.scores", formula=f"the {what} of every position so far",
            words=f"the cached {what}", layer=site.layer, cached=True,
            shares=f"cache.{site.layer}.latent_k_pe",
        )
        for leaf, size, holds, what in kept
    )  # fmt: skip


def _absent(a: LatentConfig, site: Site) -> Iterator[Absent]:
    yield Absent(names=r"attn\.(sink|gate)\b", why="its attention has neither sinks nor a gate")
    yield Absent(names=r"(linattn|ssm)\b", why="its mixer is softmax attention")
    if not site.learned_positions:
        why = "it has no learned positions, it rotates queries and keys instead"
        yield Absent(names=r"(hook_)?pos_embed\b", why=why)
    why = "it keeps latents and rotated keys, from which keys and values follow"
    yield Absent(names=r"cache\.[kv]\b", why=why)
    yield Absent(names=r"cache\.(state|conv)\b", why="its cache is of latents and rotated keys")
    why = "it normalizes the latents that queries and keys are made of, not these"
    theirs = {f"attn.{part}_norm.hook_out": f"attn.{part}_norm" for part in "qk"}
    theirs |= {f"attn.hook_{part}_normed": f"attn.{part}_norm" for part in "qk"}
    yield Absent(names=r"attn\.[qk]_norm", why=why, theirs=theirs)
    if a.query_rank is None:
        why = "its queries are projections of what enters the attention"
        yield Absent(names=r"attn\.(W_|b_)?q_latent", why=why)
    without = "qkv" if a.bias else "qkvo"
    theirs = {f"attn.b_{part.upper()}": f"attn.b_{part}" for part in without}
    yield Absent(names=r"attn\.b_\w+$", why="it has no such bias", theirs=theirs)
