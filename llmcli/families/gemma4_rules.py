"""Tensor names of Gemma 4 in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmcli.config import ModelConfig
from llmcli.families.gemma import NAMES
from llmcli.families.mixture import found_in, halves
from llmcli.families.names import Names
from llmcli.families.rules import Drop, Multiply, Rename, Rule

_WHOLE = (  # transformers' names, llama.cpp's, ours
    ("embed_tokens_per_layer", "per_layer_token_embd", "ple.embed.W"),
    ("per_layer_model_projection", "per_layer_model_proj", "ple.W_proj"),
    ("per_layer_projection_norm", "per_layer_proj_norm", "ple.proj_norm.w"),
)
_BLOCK = (
    ("per_layer_input_gate.weight", "inp_gate.weight", "ple.W_gate"),
    ("per_layer_projection.weight", "proj.weight", "ple.W_out"),
    ("layer_scalar", "layer_output_scale.weight", "out_scale.w"),
)
_PLE_NORM = ("post_per_layer_input_norm.weight", "post_norm.weight")
_NAMES = NAMES.but(experts=None)
_WITH_EXPERTS = _NAMES.but("""
    ln3        pre_feedforward_layernorm_2   pre_ffw_norm_2
    ln2_post   post_feedforward_layernorm_1  post_ffw_norm_1
    ln3_post   post_feedforward_layernorm_2  post_ffw_norm_2
    sum_norm   post_feedforward_layernorm    post_ffw_norm
""")
_EXPERTS_HF = (("router.proj.weight", "W_router"), ("experts.down_proj", "W_down"))
_FACTORS = ("router.per_expert_scale", "ffn_down_exps.scale")
_ROUTER_NORM = ("router.scale", "ffn_gate_inp.scale")
_KEPT = ("attn.W_k", "attn.W_v", "attn.b_k", "attn.b_v", "attn.k_norm.w")


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `model.`."""
    rules = _of_own(_names(config).hf(config), config)
    own = (_own(config, 0, prefix, f"{prefix}layers.{{layer}}") for prefix in ("model.", ""))
    return (*rules, *(rule for some in own for rule in some))


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are already in our rotation order."""
    rules = _of_own(_names(config).gguf(config), config)
    return (*rules, *_own(config, 1, "", "blk.{layer}"))


def _names(config: ModelConfig) -> Names:
    return _NAMES if found_in(config) is None else _WITH_EXPERTS


def _own(config: ModelConfig, theirs: int, prefix: str, block: str) -> Iterator[Rule]:
    for row in _WHOLE:
        yield Rename(f"{prefix}{row[theirs]}.weight", row[2])
    for row in _BLOCK:
        yield Rename(f"{block}.{row[theirs]}", f"blocks.{{layer}}.{row[2]}")
    mixture, ours = found_in(config), "blocks.{layer}"
    number = 3 if mixture is None else 4  # the branch of the per-layer embedding
    yield Rename(f"{block}.{_PLE_NORM[theirs]}", f"{ours}.ln{number}_post.w")
    if mixture is None:
        return
    times = Multiply(config.width**-0.5)
    yield Rename(f"{block}.{_ROUTER_NORM[theirs]}", f"{ours}.moe.router_norm.w", times)
    yield Rename(f"{block}.{_FACTORS[theirs]}", f"{ours}.moe.expert_factor")
    if theirs == 0:  # GGUF names are the same as for other mixtures
        for name, leaf in _EXPERTS_HF:
            yield Rename(f"{block}.{name}", f"{ours}.moe.{leaf}")
        for rows, leaf in zip(halves(mixture), ("gate", "up"), strict=True):
            yield Rename(f"{block}.experts.gate_up_proj", f"{ours}.moe.W_{leaf}", rows)


def _of_own(rules: Iterable[Rule], config: ModelConfig) -> Iterator[Rule]:
    """Keep rules for keys and values only in layers that compute them; drop the others' tensors."""
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
