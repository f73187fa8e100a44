"""The blocks that the rungs have formulas for: attention and a feed-forward, each after a norm."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.config import LayerConfig, ModelConfig
from llmcli.errors import UnsupportedModel
from llmcli.parts.attention.config import AttentionConfig, KeysValues
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig


@dataclass(frozen=True, kw_only=True)
class PlainBlock:
    """`x + mixer(ln1(x))`, then `x + ffn(ln2(x))`."""

    mixer: AttentionConfig
    ffn: MlpConfig
    ln1: NormConfig
    ln2: NormConfig


def plain_blocks(config: ModelConfig) -> tuple[PlainBlock, ...]:
    """Those of a model. Raises UnsupportedModel where one is built otherwise."""
    ends = (config.embedding.scale, config.head.scale, config.head.cap)
    if ends != (1.0, 1.0, None) or config.final_norm.offset:
        raise UnsupportedModel(
            "the ladder climbs models whose embeddings and logits are neither scaled nor capped, "
            "and whose norms multiply by their weights; this one's are not so",
            hint="try the ladder with `-m smollm2`",
        )
    return tuple(_plain(layer, number) for number, layer in enumerate(config.layers))


def _special(mixer: AttentionConfig) -> bool:
    """Whether its scores are made, or its results gated, as no rung does it."""
    scored = mixer.cap is not None or mixer.growth is not None or mixer.sinks
    return mixer.qk_norm_wide or scored or mixer.gated or mixer.kv != KeysValues()


def _plainly_added(layer: LayerConfig) -> bool:
    return len(layer.sublayers) == 2 and layer.scale == 1


def _plain(layer: LayerConfig, number: int) -> PlainBlock:
    match [(one.part, one.pre_norm, one.post_norm, one.multiplier) for one in layer.branches]:
        case [
            (AttentionConfig() as mixer, NormConfig() as ln1, None, 1.0),
            (MlpConfig() as ffn, NormConfig() as ln2, None, 1.0),
        ] if _plainly_added(layer) and not _special(mixer) and ffn.clamp is None:
            return PlainBlock(mixer=mixer, ffn=ffn, ln1=ln1, ln2=ln2)
    raise UnsupportedModel(
        f"the ladder climbs blocks of a norm and attention, then a norm and a feed-forward; "
        f"block {number} of this model is built otherwise",
        hint="`llmcli shapes` shows how; try the ladder with `-m smollm2`",
    )
