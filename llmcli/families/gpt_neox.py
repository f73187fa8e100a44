"""GPT-NeoX and Pythia (EleutherAI 2022 and 2023, arXiv 2204.06745, 2304.01373).

Parallel attention and feed-forward, each with a LayerNorm; RoPE on a quarter of each head; q, k and
v of a head are stored together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import Branch, LayerConfig, ModelConfig, sequential
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.fused import fused_qkv
from llmcli.families.read import GGUF_PARALLEL
from llmcli.families.rules import HF_HEAD, Drop, Rename, Rule
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `GPTNeoXConfig` that differ from LlamaConfig's
_DEFAULTS = {
    "max_position_embeddings": 2048, "hidden_act": "gelu", "bos_token_id": 0, "eos_token_id": 2,
    "attention_bias": True,
}  # fmt: skip
_LLAMA_ONLY = {
    "model_type": "llama", "mlp_bias": True, "head_dim": None, "num_key_value_heads": None,
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig. Early files have other names for the RoPE settings."""
    settings = {**_DEFAULTS, **config}
    values = Values(settings)
    settings |= _LLAMA_ONLY
    settings["rms_norm_eps"] = values.number("layer_norm_eps", 1e-5, above=False)
    for old, new in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        if values.has(old):
            settings.setdefault(new, values.number(old))
    model = llama.from_hf(settings, rotated=0.25)
    return _neox(model, parallel=values.flag("use_parallel_residual", True))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig."""
    key = f"gptneox.{GGUF_PARALLEL}"
    rest = {name: value for name, value in metadata.items() if name != key}
    model = llama.from_gguf(rest, tensors, function="gelu")
    parallel, biased = Values(metadata).flag(key, True), "blk.0.attn_qkv.bias" in tensors
    return _neox(model, parallel=parallel, biased=biased)


def _neox(model: ModelConfig, *, parallel: bool, biased: bool | None = None) -> ModelConfig:
    norm = NormConfig(kind="layer", eps=model.final_norm.eps, bias=True)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        mlp = replace(mlp, gated=False)
        if biased is not None:
            attention = replace(attention, qkv_bias=biased)
        if not parallel:
            return sequential(attention, mlp, norm=norm)
        both = tuple(Branch(part=part, pre_norm=norm) for part in (attention, mlp))
        return LayerConfig(sublayers=(both,))

    return llama.rebuilt(model, block, family="gpt_neox", model_type="gpt_neox", final_norm=norm)


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names, with or (in a bare decoder) without the prefix `gpt_neox.`."""
    tied = "tied: the head is `embed.W`"
    rules: list[Rule] = [
        Drop(name, tied) if config.head.tied else Rename(name, "head.W")
        for name in ("embed_out.weight", HF_HEAD)  # in files, and in transformers' own model
    ]
    for prefix in ("gpt_neox.", ""):
        h, b = f"{prefix}layers.{{layer}}", "blocks.{layer}"
        rules.append(Rename(f"{prefix}embed_in.weight", "embed.W"))
        rules += fused_qkv(config, f"{h}.attention.query_key_value", by_head=True)
        for kind, norm, letter in (("weight", "w", "W"), ("bias", "b", "b")):
            rules += [
                Rename(f"{h}.input_layernorm.{kind}", f"{b}.ln1.{norm}"),
                Rename(f"{h}.post_attention_layernorm.{kind}", f"{b}.ln2.{norm}"),
                Rename(f"{prefix}final_layer_norm.{kind}", f"ln_final.{norm}"),
                Rename(f"{h}.attention.dense.{kind}", f"{b}.attn.{letter}_o"),
                Rename(f"{h}.mlp.dense_h_to_4h.{kind}", f"{b}.mlp.{letter}_up"),
                Rename(f"{h}.mlp.dense_4h_to_h.{kind}", f"{b}.mlp.{letter}_down"),
            ]
        for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq"):
            rules.append(Drop(f"{h}.attention.{buffer}", "masks and frequencies are computed"))
    return tuple(rules)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; fused rows are all queries, then keys, then values."""
    return (
        *llama_rules.rules_gguf(config),
        *fused_qkv(config, "blk.{layer}.attn_qkv"),
    )


FAMILIES = (
    Family(
        name="gpt_neox",
        words="attention and feed-forward side by side, LayerNorm and biases, a part of each head "
        "rotated",
        hf_types=("gpt_neox",),
        gguf_archs=("gptneox",),
        gguf_reads=(GGUF_PARALLEL,),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
        feed_forwards=("MLP",),
    ),
)
