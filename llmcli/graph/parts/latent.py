"""Latent attention: the cache keeps a latent and a rotated key per token (arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.config.latent import LatentConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Join, Mix, Rotate, Score
from llmcli.graph.parts.attention import MIXED_ROWS, fused_kernel, mixed_rows
from llmcli.graph.rows import Rows, fields_of, sizes_of

_ROWS = """
    q_latent        C_q         T dq    qkv wide         the latents of queries
    q_latent_norm   C_q_norm    T dq    norm             the latents of queries, normalized
    q               Q           H T dn  qkv              queries for content
    q_pe            Q_pe        H T dr  qkv              queries for positions
    q_pe_rot        Q_pe_rot    H T dr  rope             the queries for positions, rotated by them
    q_rot           Q_rot       H T dh  rope             the queries as they enter the scores
    kv_latent       C_kv        T dc    qkv wide         the latents of keys and values
    kv_latent_norm  C_kv_norm   T dc    norm             the latents of keys and values, normalized
    k_pe            K_pe        T dr    qkv              the key for positions, one for all heads
    k_pe_rot        K_pe_rot    T dr    rope             the key for positions, rotated by them
    k               K           H T dn  attention tap_only  keys of content
    v               V           H T dv  attention tap_only  values
    k_rot           K_rot       H T dh  attention tap_only  the keys as they enter the scores
"""


def latent_graph(a: LatentConfig, site: Site) -> PartGraph:
    """`q_latent`, `q`, `q_pe`, `kv_latent`, `k_pe`, their norms, rotations, and `q_rot`.

    `k`, `v` and `k_rot` are of the new tokens, for a tap only; they are not cached. `scores`,
    `pattern`, `z` and `result` as in `parts.attention`.
    """
    r = Rows(site.name, _ROWS + MIXED_ROWS, "attention", sizes_of(a), layer=site.layer)
    queries, over = site.source, "D"
    if a.query_rank is not None:
        queries, over = r.project("q_latent", site.source, bias=a.bias), "dq"
        queries = r.normalize(
            "q_latent_norm", queries, a.norm, "the norm of the latents of queries"
        )
    q = r.project("q", queries, over=over, fused="q_q_pe")
    q_pe = r.project("q_pe", queries, over=over, fused="q_q_pe")
    q_pe = r.node("q_pe_rot", Rotate(source=q_pe, rope=a.rope))
    query = r.node("q_rot", Join(start=q, end=q_pe))
    latent = r.project("kv_latent", site.source, bias=a.bias, fused="kv_latent_k_pe")
    latent = r.normalize(
        "kv_latent_norm", latent, a.norm, "the norm of the latents of keys and values"
    )
    k_pe = r.project("k_pe", site.source, bias=a.bias, fused="kv_latent_k_pe")
    k_pe = r.node("k_pe_rot", Rotate(source=k_pe, rope=a.rope))
    k, v = (r.project(x, latent, over="dc", fused="k_v", dense=True) for x in "kv")
    key = r.node("k_rot", Join(start=k, end=k_pe))
    both = f"cache.{site.layer}.latent_k_pe"
    r.cache("latent", "S dc", latent, "normalized latents", shares=both)
    r.cache("k_pe", "S dr", k_pe, "rotated keys", shares=both)
    score = Score(query=query, key=key, config=a.scores, head_dim=a.head_dim, group=1, root="√d_k")
    mix = Mix(pattern=r.named("pattern"), value=v, query=query, group=1, window=None, latent=a)
    mixed_rows(r, site, score, mix, bias=a.bias)
    return r.graph(fused_kernel(site.name), documents={"H": "h", "dh": "d_k", "dv": "d_v"})


def latent_facts(a: LatentConfig) -> Mapping[str, Any]:
    """Facts for `info`."""
    queries = "" if a.query_rank is None else f", queries of {a.query_rank}"
    rotated = f"{a.rope.dims} of {a.head_dim} numbers rotated"
    details = (f"latents of {a.rank}{queries}", rotated)
    found = {"kind": "latent attention", "rotary": True, "qk_norm": False, "details": details}
    return found | fields_of(a, "heads kv_heads head_dim value_dim")
