"""Tensor names of latent attention in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmcli.config import ModelConfig
from llmcli.families.names import QWEN
from llmcli.families.rules import (
    PerExpert,
    Rename,
    Reshape,
    Rows,
    Rule,
    Transpose,
    UnpairRows,
)
from llmcli.parts.latent.config import LatentConfig

_NAMES = QWEN.but(predicts=True)


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `model.`."""
    a = _attention(config)
    rules = _others(_NAMES.hf(config))
    for prefix in ("model.", ""):
        layers = f"{prefix}layers.{{layer}}"
        names = ("q_a_proj", "q_a_layernorm", "q_proj" if a.query_rank is None else "q_b_proj",
                 "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")  # fmt: skip
        rules += _rules(a, [f"{layers}.self_attn.{name}" for name in names])
    return tuple(rules)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; `attn_k_b` is transposed per head; old files: `attn_kv_b`."""
    a, layer, b = _attention(config), "blk.{layer}", "blocks.{layer}.attn"
    names = ("attn_q_a", "attn_q_a_norm", "attn_q" if a.query_rank is None else "attn_q_b",
             "attn_kv_a_mqa", "attn_kv_a_norm", "attn_kv_b")  # fmt: skip
    keys = (PerExpert(Transpose(), of="head"), Reshape((a.heads * a.content, a.rank)))
    return (
        *_others(_NAMES.gguf(config)), *_rules(a, [f"{layer}.{name}" for name in names]),
        Rename(f"{layer}.attn_k_b.weight", f"{b}.W_k", *keys),
        Rename(f"{layer}.attn_v_b.weight", f"{b}.W_v", Reshape((a.heads * a.value_dim, a.rank))),
    )  # fmt: skip


def _rules(a: LatentConfig, names: Sequence[str]) -> Iterator[Rule]:
    """Rules for rows stored per head, content dimensions first; RoPE pairs are adjacent rows."""
    b, r = "blocks.{layer}.attn", a.rope.dims
    q_a, q_norm, q_b, kv_a, kv_norm, kv_b = names
    heads, content, both = a.heads, a.content, a.content + a.value_dim
    for kind, letter in (("weight", "W"), ("bias", "b")):
        yield Rename(f"{q_a}.{kind}", f"{b}.{letter}_q_latent")
        yield Rename(f"{kv_a}.{kind}", f"{b}.{letter}_kv_latent", Rows(0, a.rank))
        yield Rename(f"{kv_a}.{kind}", f"{b}.{letter}_k_pe", Rows(a.rank, a.kept), UnpairRows(1, r))
    yield Rename(f"{q_norm}.weight", f"{b}.q_latent_norm.w")
    yield Rename(f"{kv_norm}.weight", f"{b}.kv_latent_norm.w")
    yield Rename(f"{q_b}.weight", f"{b}.W_q", Rows(0, content, heads))
    rotated = (Rows(content, a.head_dim, heads), UnpairRows(heads, r))
    yield Rename(f"{q_b}.weight", f"{b}.W_q_pe", *rotated)
    yield Rename(f"{kv_b}.weight", f"{b}.W_k", Rows(0, content, heads))
    yield Rename(f"{kv_b}.weight", f"{b}.W_v", Rows(content, both, heads))


def _others(rules: Iterable[Rule]) -> list[Rule]:
    """The rules other than those of q, k, v projections and their norms."""
    return [
        rule for rule in rules
        if not isinstance(rule, Rename) or ".attn." not in rule.target or rule.target.endswith("_o")
    ]  # fmt: skip


def _attention(config: ModelConfig) -> LatentConfig:
    found = config.layers[0].parts[0]
    assert isinstance(found, LatentConfig)
    return found
