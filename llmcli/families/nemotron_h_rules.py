"""Tensor names of Nemotron-H in transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

from llmcli.config import ModelConfig
from llmcli.families import mamba2_rules, mixture
from llmcli.families.names import LLAMA
from llmcli.families.read import hf_head
from llmcli.families.rules import Drop, Rename, Rule


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for transformers' names (`model.`) and those of published files (`backbone.`)."""

    def found() -> Iterator[Rule]:
        for prefix in ("model.", "backbone.", ""):
            h, b = f"{prefix}layers.{{layer}}", "blocks.{layer}"
            yield Rename(f"{prefix}embeddings.weight", "embed.W")
            yield Rename(f"{prefix}norm_f.weight", "ln_final.w")
            yield Rename(f"{h}.norm.weight", f"{b}.ln1.w")
            for one in "qkvo":
                yield Rename(f"{h}.mixer.{one}_proj.weight", f"{b}.attn.W_{one}")
            for leaf in ("up", "down"):
                yield Rename(f"{h}.mixer.{leaf}_proj.weight", f"{b}.mlp.W_{leaf}")
                yield Rename(f"{h}.mixer.{leaf}_proj.bias", f"{b}.mlp.b_{leaf}")
            yield from mamba2_rules.rules_hf(config, f"{h}.mixer")
            yield from _experts_hf(config, f"{h}.mixer")
        yield Drop("mtp.*", mixture.MTP)

    return (hf_head(config), *found())


def _experts_hf(config: ModelConfig, mixer: str) -> Iterator[Rule]:
    """Rules for experts: one tensor each, as published, or stacked as in transformers."""
    if (experts := mixture.found_in(config)) is None:
        return
    moe = "blocks.{layer}.moe"
    within = {"layer": range(len(config.layers)), "expert": range(experts.experts)}
    yield Rename(f"{mixer}.gate.weight", f"{moe}.W_router")
    yield Rename(f"{mixer}.gate.e_score_correction_bias", f"{moe}.b_choice")
    for leaf in ("up", "down"):
        each = f"{mixer}.experts.{{expert}}.{leaf}_proj.weight"
        yield Rename(each, f"{moe}.W_{leaf}[{{expert}}]", within=within)
        yield Rename(f"{mixer}.experts.{leaf}_proj", f"{moe}.W_{leaf}")
        yield Rename(f"{mixer}.shared_experts.{leaf}_proj.weight", f"{moe}.shared.W_{leaf}")


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for llama.cpp's names; query and key rows are interleaved although RoPE is not used."""
    return (
        *LLAMA.but(without="ln2").gguf(config),
        *mamba2_rules.rules_gguf(config), mixture.later_layers("blk.{later}.*", config),
    )  # fmt: skip
