"""Tensor names of Qwen3-Next and Qwen 3.5 in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.config import ModelConfig
from llmcli.families import mixture
from llmcli.families.names import POST_NORM_2
from llmcli.families.rules import CollectRows, Drop, LogNeg, Rename, Reshape, Rows, Rule
from llmcli.parts.delta.config import DeltaConfig

_NEXT = ("qwen3_next", "qwen3next")  # rows grouped by key head in one tensor
_DELTA_HF = (
    ("in_proj_qkv.weight", "W_in"), ("in_proj_z.weight", "W_gate"), ("in_proj_b.weight", "W_beta"),
    ("in_proj_a.weight", "W_decay"), ("A_log", "A_log"), ("dt_bias", "dt_bias"),
    ("norm.weight", "norm.w"), ("out_proj.weight", "W_out"),
)  # fmt: skip
_DELTA_GGUF = (
    ("attn_qkv.weight", "W_in"), ("attn_gate.weight", "W_gate"), ("ssm_beta.weight", "W_beta"),
    ("ssm_alpha.weight", "W_decay"), ("ssm_dt.bias", "dt_bias"), ("ssm_norm.weight", "norm.w"),
    ("ssm_out.weight", "W_out"),
)  # fmt: skip


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `model.`."""
    rules: list[Rule] = [*POST_NORM_2.hf(config)]
    for prefix in ("model.", ""):
        h, b = f"{prefix}layers.{{layer}}.linear_attn", "blocks.{layer}.linattn"
        apart = [Rename(f"{h}.{theirs}", f"{b}.{ours}") for theirs, ours in _DELTA_HF]
        together = _by_key_head(config, f"{h}.in_proj_qkvz.weight", f"{h}.in_proj_ba.weight")
        rules += [*together, *apart] if config.model_type in _NEXT else [*apart, *together]
        rules += _filter(config, f"{h}.conv1d.weight")
        rules.append(Drop(f"{prefix}mtp.*", mixture.MTP))
    return tuple(rules)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; early `qwen3next` files have rows in transformers' order."""
    g, b = "blk.{layer}", "blocks.{layer}.linattn"
    apart = [Rename(f"{g}.{theirs}", f"{b}.{ours}") for theirs, ours in _DELTA_GGUF]
    together = _by_key_head(config, f"{g}.ssm_in.weight", f"{g}.ssm_ba.weight")
    return (
        *POST_NORM_2.gguf(config),
        *((*together, *apart) if config.model_type in _NEXT else (*apart, *together)),
        Rename(f"{g}.ssm_a", f"{b}.A_log", LogNeg()),
        *_filter(config, f"{g}.ssm_conv1d.weight"),
        *_fused(config),
        mixture.later_layers("blk.{later}.*", config),
    )


def _by_key_head(config: ModelConfig, qkvz: str, ba: str) -> Iterator[Rename]:
    """Rules for tensors whose rows are grouped by key head, values included."""
    delta, b = _first(config), "blocks.{layer}.linattn"
    if delta is None:
        return
    count, each = delta.key_heads, delta.heads // delta.key_heads
    values = each * delta.value_dim
    sizes = (delta.key_dim, delta.key_dim, values)
    entering = Rows(0, sum(sizes), count)
    yield Rename(qkvz, f"{b}.W_in", entering, CollectRows(count, sizes))
    yield Rename(qkvz, f"{b}.W_gate", Rows(entering.stop, entering.stop + values, count))
    yield Rename(ba, f"{b}.W_beta", Rows(0, each, count))
    yield Rename(ba, f"{b}.W_decay", Rows(each, 2 * each, count))


def _filter(config: ModelConfig, source: str) -> Iterator[Rename]:
    if (delta := _first(config)) is not None:
        shape = Reshape((delta.channels, delta.length))
        yield Rename(source, "blocks.{layer}.linattn.w", shape)


def _fused(config: ModelConfig) -> Iterator[Rename]:
    """Rules for attention's queries, gates, keys and values in one tensor (`--fuse-qkv`)."""
    for layer, attention in enumerate(one.attention for one in config.layers):
        if attention is None:
            continue
        h, size = attention.heads, attention.head_dim
        b, source = f"blocks.{layer}.attn", f"blk.{layer}.attn_qkv.weight"
        q, k = h * (size + attention.value_dim), attention.kv_heads * size
        both, v = Rows(0, q), attention.kv_heads * attention.value_dim
        yield Rename(source, f"{b}.W_q", both, Rows(0, size, h))
        yield Rename(source, f"{b}.W_gate", both, Rows(size, size + attention.value_dim, h))
        yield Rename(source, f"{b}.W_k", Rows(q, q + k))
        yield Rename(source, f"{b}.W_v", Rows(q + k, q + k + v))


def _first(config: ModelConfig) -> DeltaConfig | None:
    """The first DeltaNet; all of a model are equal."""
    parts = (part for layer in config.layers for part in layer.parts)
    return next((part for part in parts if isinstance(part, DeltaConfig)), None)
