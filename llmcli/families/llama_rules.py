"""Tensor names of Llama-like models in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.config import ModelConfig
from llmcli.families import mixture
from llmcli.families.fused import fused_gate_up
from llmcli.families.read import hf_head
from llmcli.families.rope import GGUF_FACTORS, GGUF_LONGROPE
from llmcli.families.rules import AddConstant, Drop, Rename, Rows, Rule, UnpairRows

Norms = Sequence[tuple[str, str]]  # of a block: (their name, our name)

NORMS_HF: Norms = (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))
NORMS_GGUF: Norms = (("attn_norm", "ln1"), ("ffn_norm", "ln2"))
NORMS_AFTER_GGUF: Norms = (("post_attention_norm", "ln1_post"), ("post_ffw_norm", "ln2_post"))


def rules_hf(
    config: ModelConfig, *, norms: Norms = NORMS_HF, paired: bool = False
) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `model.`.

    `paired`: RoPE pairs adjacent dimensions of a head.
    """
    rules: list[Rule] = [hf_head(config)]
    computed = "RoPE frequencies, which are computed"
    for prefix in ("model.", ""):
        h, b = f"{prefix}layers.{{layer}}", "blocks.{layer}"
        rules += [
            Rename(f"{prefix}embed_tokens.weight", "embed.W"),
            *_norms([(f"self_attn.{one}_norm", f"attn.{one}_norm") for one in "qk"], h, b),
            *_norms(norms, h, b),
            *_norms([("norm", "ln_final")], prefix.rstrip("."), ""),
            Drop(f"{h}.self_attn.rotary_emb.inv_freq", computed),
            Drop(f"{prefix}rotary_emb.inv_freq", computed),
        ]
        if paired:
            source = prefix + "layers.{layer}.self_attn.{symbol}_proj"
            rules += _unpaired(config, source, everywhere=False)
        if not paired:
            rules += _queries(config, f"{h}.self_attn.q_proj")
        for symbol in "vo" if paired else "kvo":
            rules += _linear(f"{h}.self_attn.{symbol}_proj", f"{b}.attn", symbol)
        for symbol in ("gate", "up", "down"):
            rules += _linear(f"{h}.mlp.{symbol}_proj", f"{b}.mlp", symbol)
    return tuple(rules)


def rules_gguf(
    config: ModelConfig, *, norms: Norms = NORMS_GGUF, paired: bool = False,
    everywhere: bool = True, fused_up: bool = False,
) -> tuple[Rule, ...]:  # fmt: skip
    """Rules for llama.cpp's names; query and key rows are in our rotation order (`qwen2`, `qwen3`).

    `paired`: RoPE pairs adjacent rows, as in architecture `llama`; `everywhere`: layers without
    RoPE have that row order too. `fused_up`: gate and up are one tensor.
    """
    g, b = "blk.{layer}", "blocks.{layer}"
    offset = config.final_norm.offset
    # files store the norms' factors, offset included
    ops = (AddConstant(-offset),) if offset else ()
    rules: list[Rule] = [
        Rename("token_embd.weight", "embed.W"),
        *_norms(norms, g, b, ops),
        *_norms([(f"attn_{one}_norm", f"attn.{one}_norm") for one in "qk"], g, b, ops),
        *_norms([("output_norm", "ln_final")], "", "", ops),
        *_linear(f"{g}.attn_v", f"{b}.attn", "v"),
        *_linear(f"{g}.attn_output", f"{b}.attn", "o"),
        *_linear(f"{g}.ffn_down", f"{b}.mlp", "down"),
        *mixture.rules_gguf(config),
        *(
            Drop(name, "read into the configuration as the rotation's frequency factors")
            for name in (GGUF_FACTORS, *GGUF_LONGROPE)
        ),
        Drop(f"{g}.attn_rot_embd.weight", "RoPE frequencies, which are computed"),
    ]
    if fused_up:
        rules += fused_gate_up(config, f"{g}.ffn_up")
    else:
        rules += _linear(f"{g}.ffn_gate", f"{b}.mlp", "gate")
        rules += _linear(f"{g}.ffn_up", f"{b}.mlp", "up")
    if paired:
        rules += _unpaired(config, "blk.{layer}.attn_{symbol}", everywhere=everywhere)
    else:
        rules += _queries(config, f"{g}.attn_q") + _linear(f"{g}.attn_k", f"{b}.attn", "k")
    if not config.head.tied:
        rules.append(Rename("output.weight", "head.W"))
    return tuple(rules)


def _norms(norms: Norms, theirs: str, ours: str, ops: tuple[AddConstant, ...] = ()) -> list[Rename]:
    """Rules for the weights and biases of norms, under the prefixes `theirs` and `ours`."""
    return [
        Rename(".".join(filter(None, (theirs, one, kind))),
               ".".join(filter(None, (ours, other, letter))), *(ops if letter == "w" else ()))
        for one, other in norms
        for kind, letter in (("weight", "w"), ("bias", "b"))
    ]  # fmt: skip


def _queries(config: ModelConfig, source: str) -> list[Rename]:
    """Rules for the query rows of all heads; with gated attention, each head's gate rows follow."""
    found = (layer.attention for layer in config.layers)
    a = next((one for one in found if one is not None and one.gated), None)
    if a is None:
        return _linear(source, "blocks.{layer}.attn", "q")
    queries = Rows(0, a.head_dim, a.heads)
    gates = Rows(a.head_dim, a.head_dim + a.value_dim, a.heads)
    return [
        *_linear(source, "blocks.{layer}.attn", "q", queries),
        *_linear(source, "blocks.{layer}.attn", "gate", gates),
    ]


def _unpaired(config: ModelConfig, source: str, *, everywhere: bool) -> list[Rename]:
    """Rules for query and key rows of a file in which RoPE pairs adjacent rows.

    `everywhere`: rows of layers without RoPE are in that order too.
    """
    rules = []
    for index, layer in enumerate(config.layers):
        if (mixer := layer.attention) is None:
            continue
        dims = mixer.head_dim if everywhere else 0
        dims = mixer.rope.dims if mixer.rope is not None else dims
        for symbol, heads in (("q", mixer.heads), ("k", mixer.kv_heads)):
            stored = source.format(layer=index, symbol=symbol)
            rules += _linear(stored, f"blocks.{index}.attn", symbol, UnpairRows(heads, dims))
    return rules


def _linear(source: str, target: str, symbol: str, *ops: Rows | UnpairRows) -> list[Rename]:
    return [
        Rename(f"{source}.weight", f"{target}.W_{symbol}", *ops),
        Rename(f"{source}.bias", f"{target}.b_{symbol}", *ops),
    ]
