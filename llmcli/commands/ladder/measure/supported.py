"""Which models the ladder takes: dense ones whose layers have keys and values of their own."""

from __future__ import annotations

from llmcli.config import ModelConfig
from llmcli.errors import UnsupportedModel
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.ple.config import PleConfig
from llmcli.parts.registry import part_of


def require_supported(config: ModelConfig) -> None:
    """Raises UnsupportedModel for what the rungs have no formulas for."""
    dense = "the ladder takes dense models, for example `-m smollm2`"
    for number, layer in enumerate(config.layers):
        for part in layer.parts:
            if (exotic := _exotic(part)) is not None:
                raise UnsupportedModel(
                    f"the ladder has no rungs for {exotic}, which block {number} has",
                    hint="`llmcli shapes` and `llmcli explain` show this model's formulas",
                )
            if not isinstance(part, AttentionConfig | MlpConfig):
                noun = part_of(part).noun
                noun = f"latent {noun}" if isinstance(part, LatentConfig) else noun
                raise UnsupportedModel(
                    f"the ladder has no rungs for {noun}, which block {number} has", hint=dense
                )
    if all(layer.attention is None for layer in config.layers):
        raise UnsupportedModel("the ladder has no rungs for a model without attention", hint=dense)


def _exotic(part: object) -> str | None:
    """What only a part of Gemma 4 and its like has."""
    match part:
        case PleConfig():
            return "per-layer embeddings"
        case AttentionConfig() if part.kv.layer is not None:
            return f"the keys and values of block {part.kv.layer}"
        case AttentionConfig() if part.kv.equal:
            return "values that are the keys"
    return None
