"""Rules for fused tensors, which stack the rows of q, k and v, or of gate and up."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.config import ModelConfig
from llmcli.families.rules import Rename, Rows
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig


def fused_qkv(config: ModelConfig, source: str, *, by_head: bool = False) -> Iterator[Rename]:
    """Rules for one tensor of all query, key and value rows, or (`by_head`) q, k, v per head.

    `source` is the tensor's name in a layer, without `.weight`: `blk.{layer}.attn_qkv`.
    """
    a = config.layers[0].attention
    assert isinstance(a, AttentionConfig)
    groups = a.heads if by_head else 1
    sizes = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim)
    first = 0
    for symbol, size in zip("qkv", sizes, strict=True):
        rows = Rows(first, first + size // groups, groups)
        first = rows.stop
        yield Rename(f"{source}.weight", f"blocks.{{layer}}.attn.W_{symbol}", rows)
        yield Rename(f"{source}.bias", f"blocks.{{layer}}.attn.b_{symbol}", rows)


def fused_gate_up(config: ModelConfig, source: str) -> Iterator[Rename]:
    """Rules for one tensor of all gate rows, then all up rows."""
    mlp = config.layers[0].parts[-1]
    assert isinstance(mlp, MlpConfig)
    for at, symbol in enumerate(("gate", "up")):
        rows = Rows(at * mlp.hidden, (at + 1) * mlp.hidden)
        yield Rename(f"{source}.weight", f"blocks.{{layer}}.mlp.W_{symbol}", rows)
