"""Tensor names of Gemma 4, as transformers and as llama.cpp write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmcli.config import ModelConfig
from llmcli.families import llama_rules
from llmcli.families.gemma import NORMS_HF
from llmcli.families.rules import Drop, Rename, Rule

_WHOLE = (  # transformers' names, llama.cpp's, ours
    ("embed_tokens_per_layer", "per_layer_token_embd", "ple.embed.W"),
    ("per_layer_model_projection", "per_layer_model_proj", "ple.W_proj"),
    ("per_layer_projection_norm", "per_layer_proj_norm", "ple.proj_norm.w"),
)
_BLOCK = (
    ("per_layer_input_gate.weight", "inp_gate.weight", "ple.W_gate"),
    ("per_layer_projection.weight", "proj.weight", "ple.W_out"),
    ("post_per_layer_input_norm.weight", "post_norm.weight", "ln3_post.w"),
    ("layer_scalar", "layer_output_scale.weight", "out_scale.w"),
)
_KEPT = ("attn.W_k", "attn.W_v", "attn.b_k", "attn.b_v", "attn.k_norm.w")


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """transformers' names, with `model.` before them or (a bare decoder) without."""
    rules = _of_own(llama_rules.rules_hf(config, norms=NORMS_HF), config)
    own = (_own(0, prefix, f"{prefix}layers.{{layer}}") for prefix in ("model.", ""))
    return (*rules, *(rule for some in own for rule in some))


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """llama.cpp's names; rows of queries and keys lie as we rotate them."""
    norms = (*llama_rules.NORMS_GGUF, *llama_rules.NORMS_AFTER_GGUF)
    rules = _of_own(llama_rules.rules_gguf(config, norms=norms), config)
    return (*rules, *_own(1, "", "blk.{layer}"))


def _own(theirs: int, prefix: str, block: str) -> Iterator[Rule]:
    for row in _WHOLE:
        yield Rename(f"{prefix}{row[theirs]}.weight", row[2])
    for row in _BLOCK:
        yield Rename(f"{block}.{row[theirs]}", f"blocks.{{layer}}.{row[2]}")


def _of_own(rules: Iterable[Rule], config: ModelConfig) -> Iterator[Rule]:
    """Keys and values of those layers that have their own; files may hold the others, too."""
    first = sum(
        layer.attention is not None and layer.attention.kv.layer is None for layer in config.layers
    )
    own, others = range(first), range(first, len(config.layers))
    for rule in rules:
        if isinstance(rule, Rename) and rule.target.endswith(_KEPT):
            yield Rename(rule.source, rule.target, *rule.ops, within={"layer": own})
            reason = "its layer reads the keys and values of another"
            yield Drop(rule.source, reason, within={"layer": others})
        else:
            yield rule
