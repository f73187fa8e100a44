"""The checkpoint names of a model's parameters, from the rules of its family."""

from __future__ import annotations

from collections.abc import Sequence

from llmcli.config import ModelConfig
from llmcli.families.family import families
from llmcli.families.rules import Rename, Rule


def sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Checkpoint tensor → the parameters that it fills, as transformers and llama.cpp name them.

    Both kinds of files, whichever the model came from, since people type either name. Empty for a
    model of no family. A fused tensor fills several parameters.
    """
    found: dict[str, tuple[str, ...]] = {}
    for family in families():
        if family.name == config.family:
            for rules in (family.rules_hf(config), family.rules_gguf(config)):
                found |= sources_of(rules, config)
    return found


def sources_of(rules: Sequence[Rule], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The same from given rules: every name that they would take, for every layer."""
    found: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        if not isinstance(rule, Rename):
            continue
        layers = len(config.layers) if "{layer}" in rule.source else 1
        for i in range(layers):
            source, target = (
                name.replace("{layer}", str(i)) for name in (rule.source, rule.target)
            )
            found[source] = (*found.get(source, ()), target)
    return found
