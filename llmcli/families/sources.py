"""The checkpoint names of a model's parameters, from the rules of its family."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.config.model import ModelConfig
from llmcli.families.family import families
from llmcli.families.rules import Rename, Rule, every_name


def sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Checkpoint tensor → the parameters that it fills, for transformers' and llama.cpp's names.

    Both are accepted for every model, since users type either. Empty for a model without a family.
    A fused tensor fills several parameters.
    """
    found: dict[str, tuple[str, ...]] = {}
    for family in families():
        if family.name == config.family:
            for rules in (family.rules_hf(config), family.rules_gguf(config)):
                found |= sources_of(rules, config)
    return found


def sources_of(rules: Sequence[Rule], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Checkpoint tensor → parameters, for every name that the rules match."""
    found: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        if isinstance(rule, Rename):
            for source, target in every_name(rule, config):
                found[source] = (*found.get(source, ()), target)
    return found
