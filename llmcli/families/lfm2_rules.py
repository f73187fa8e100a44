"""Tensor names of LFM2 in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from llmcli.config import ModelConfig
from llmcli.families import mixture
from llmcli.families.read import hf_head
from llmcli.families.rules import Rename, Reshape, Rows, Rule
from llmcli.parts.conv.config import ShortConvConfig

_NAMES = (  # transformers', llama.cpp's, ours
    ("operator_norm", "attn_norm", "ln1.w"),
    ("ffn_norm", "ffn_norm", "ln2.w"),
    *((f"self_attn.{one}_layernorm", f"attn_{one}_norm", f"attn.{one}_norm.w") for one in "qk"),
    *((f"self_attn.{one}_proj", f"attn_{one}", f"attn.W_{one}") for one in "qkv"),
    ("self_attn.out_proj", "attn_output", "attn.W_o"),
    *((f"feed_forward.w{n}", f"ffn_{one}", f"mlp.W_{one}")
      for n, one in ((1, "gate"), (3, "up"), (2, "down"))),
    ("conv.out_proj", "shortconv.out_proj", "conv.W_out"),
)


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `model.`."""
    names = ("embed_tokens", "embedding_norm", "layers.{layer}.", "conv")
    both = (_rules(config, 0, prefix, names) for prefix in ("model.", ""))
    experts = mixture.rules_hf(config, "feed_forward", ("w1", "w3", "w2"))
    corrections = (
        Rename(f"{layers}.{{layer}}.feed_forward.expert_bias", "blocks.{layer}.moe.b_choice")
        for layers in ("model.layers", "layers")
    )
    return (hf_head(config), *chain.from_iterable(both), *experts, *corrections)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    head = () if config.head.tied else (Rename("output.weight", "head.W"),)
    names = ("token_embd", "token_embd_norm", "blk.{layer}.", "shortconv")
    return (*head, *_rules(config, 1, "", names), *mixture.rules_gguf(config))


def _rules(
    config: ModelConfig, theirs: int, prefix: str, names: tuple[str, str, str, str]
) -> Iterator[Rule]:
    table, last, layer, conv = names
    h = prefix + layer
    b, d = "blocks.{layer}", config.width
    yield Rename(f"{prefix}{table}.weight", "embed.W")
    yield Rename(f"{prefix}{last}.weight", "ln_final.w")
    for row in _NAMES:
        yield Rename(f"{h}{row[theirs]}.weight", f"{b}.{row[2]}")
        if "W_" in row[2]:
            yield Rename(f"{h}{row[theirs]}.bias", f"{b}.{row[2].replace('W_', 'b_')}")
    for at, part in enumerate(("B", "gate", "x")):
        rows = Rows(at * d, (at + 1) * d)
        yield Rename(f"{h}{conv}.in_proj.weight", f"{b}.conv.W_{part}", rows)
        yield Rename(f"{h}{conv}.in_proj.bias", f"{b}.conv.b_{part}", rows)
    parts = (part for layer in config.layers for part in layer.parts)
    for taps in {part.length for part in parts if isinstance(part, ShortConvConfig)}:
        yield Rename(f"{h}{conv}.conv.weight", f"{b}.conv.w", Reshape((d, taps)))
    yield Rename(f"{h}{conv}.conv.bias", f"{b}.conv.b")
