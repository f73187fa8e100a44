"""Tensor names of Llama's relatives, as transformers and as llama.cpp write them."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.config import ModelConfig
from llmcli.families.read import hf_head
from llmcli.families.rope import GGUF_FACTORS
from llmcli.families.rules import AddConstant, Drop, Rename, Rule, UnpairRows

Norms = Sequence[tuple[str, str]]  # of a block: theirs, and our name

NORMS_HF: Norms = (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))
NORMS_GGUF: Norms = (("attn_norm", "ln1"), ("ffn_norm", "ln2"))


def rules_hf(config: ModelConfig, *, norms: Norms = NORMS_HF) -> tuple[Rule, ...]:
    """transformers' names, with `model.` before them or (a bare decoder) without."""
    rules: list[Rule] = [hf_head(config)]
    computed = "frequencies of the rotation, which are computed"
    for prefix in ("model.", ""):
        h, b = f"{prefix}layers.{{layer}}", "blocks.{layer}"
        rules += [
            Rename(f"{prefix}embed_tokens.weight", "embed.W"),
            Rename(f"{h}.self_attn.q_norm.weight", f"{b}.attn.q_norm.w"),
            Rename(f"{h}.self_attn.k_norm.weight", f"{b}.attn.k_norm.w"),
            *(Rename(f"{h}.{theirs}.weight", f"{b}.{ours}.w") for theirs, ours in norms),
            Rename(f"{prefix}norm.weight", "ln_final.w"),
            Drop(f"{h}.self_attn.rotary_emb.inv_freq", computed),
            Drop(f"{prefix}rotary_emb.inv_freq", computed),
        ]
        for symbol in "qkvo":
            rules += _linear(f"{h}.self_attn.{symbol}_proj", f"{b}.attn", symbol)
        for symbol in ("gate", "up", "down"):
            rules += _linear(f"{h}.mlp.{symbol}_proj", f"{b}.mlp", symbol)
    return tuple(rules)


def rules_gguf(config: ModelConfig, *, norms: Norms = NORMS_GGUF) -> tuple[Rule, ...]:
    """llama.cpp's names where rows of queries and keys lie as we rotate them (`qwen2`, `qwen3`)."""
    g, b = "blk.{layer}", "blocks.{layer}"
    return (
        *_gguf_shared(config, norms),
        *_linear(f"{g}.attn_q", f"{b}.attn", "q"),
        *_linear(f"{g}.attn_k", f"{b}.attn", "k"),
    )


def rules_gguf_paired(config: ModelConfig) -> tuple[Rule, ...]:
    """The same for architecture `llama`, whose files have neighbouring rows rotated together.

    The order of rows depends on a layer's own heads, so that each layer has its own rules.
    """
    rules = _gguf_shared(config, NORMS_GGUF)
    for index, layer in enumerate(config.layers):
        mixer = layer.attention
        assert mixer is not None
        dims = mixer.rope.dims if mixer.rope is not None else 0
        for symbol, heads in (("q", mixer.heads), ("k", mixer.kv_heads)):
            source, target = f"blk.{index}.attn_{symbol}", f"blocks.{index}.attn"
            rules += _linear(source, target, symbol, UnpairRows(heads, dims))
    return tuple(rules)


def _gguf_shared(config: ModelConfig, norms: Norms) -> list[Rule]:
    g, b = "blk.{layer}", "blocks.{layer}"
    offset = config.final_norm.offset
    # files have what the norms multiply by, the offset included
    ops = (AddConstant(-offset),) if offset else ()
    rules: list[Rule] = [
        Rename("token_embd.weight", "embed.W"),
        *(Rename(f"{g}.{theirs}.weight", f"{b}.{ours}.w", *ops) for theirs, ours in norms),
        *_linear(f"{g}.attn_v", f"{b}.attn", "v"),
        Rename(f"{g}.attn_q_norm.weight", f"{b}.attn.q_norm.w", *ops),
        Rename(f"{g}.attn_k_norm.weight", f"{b}.attn.k_norm.w", *ops),
        *_linear(f"{g}.attn_output", f"{b}.attn", "o"),
        *_linear(f"{g}.ffn_gate", f"{b}.mlp", "gate"),
        *_linear(f"{g}.ffn_up", f"{b}.mlp", "up"),
        *_linear(f"{g}.ffn_down", f"{b}.mlp", "down"),
        Rename("output_norm.weight", "ln_final.w", *ops),
        Drop(GGUF_FACTORS, "read into the configuration as the rotation's frequency factors"),
        Drop(f"{g}.attn_rot_embd.weight", "frequencies of the rotation, which are computed"),
    ]
    if not config.head.tied:
        rules.append(Rename("output.weight", "head.W"))
    return rules


def _linear(source: str, target: str, symbol: str, *ops: UnpairRows) -> list[Rename]:
    return [
        Rename(f"{source}.weight", f"{target}.W_{symbol}", *ops),
        Rename(f"{source}.bias", f"{target}.b_{symbol}", *ops),
    ]
