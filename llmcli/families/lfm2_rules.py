"""Tensor names of LFM2 in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.config import ModelConfig
from llmcli.families.names import QWEN
from llmcli.families.rules import Rename, Reshape, Rule
from llmcli.parts.conv.config import ShortConvConfig

_NAMES = QWEN.but("""
    ln_final                 embedding_norm         token_embd_norm
    ln1                      operator_norm          attn_norm
    ln2                      ffn_norm               ffn_norm
    attn.q_norm              self_attn.q_layernorm  attn_q_norm
    attn.k_norm              self_attn.k_layernorm  attn_k_norm
    attn.o                   self_attn.out_proj     attn_output
    mlp.gate                 feed_forward.w1        ffn_gate
    mlp.up                   feed_forward.w3        ffn_up
    mlp.down                 feed_forward.w2        ffn_down
    conv.B+conv.gate+conv.x  conv.in_proj           shortconv.in_proj
    conv.out                 conv.out_proj          shortconv.out_proj
""", experts=("feed_forward", ("w1", "w3", "w2")))


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `model.`."""
    rules = [*_NAMES.hf(config)]
    for layers in ("model.layers", "layers"):
        h, bias = f"{layers}.{{layer}}", "feed_forward.expert_bias"
        rules += _filter(config, f"{h}.conv.conv")
        rules.append(Rename(f"{h}.{bias}", "blocks.{layer}.moe.b_choice"))
    return tuple(rules)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    return (*_NAMES.gguf(config), *_filter(config, "blk.{layer}.shortconv.conv"))


def _filter(config: ModelConfig, source: str) -> Iterator[Rename]:
    parts = (part for layer in config.layers for part in layer.parts)
    for taps in {part.length for part in parts if isinstance(part, ShortConvConfig)}:
        shape = Reshape((config.width, taps))
        yield Rename(f"{source}.weight", "blocks.{layer}.conv.w", shape)
    yield Rename(f"{source}.bias", "blocks.{layer}.conv.b")
