"""The blocks of Gemma 4, shared by the readers of both formats."""

from __future__ import annotations

from dataclasses import replace

from llmcli.config import Branch, LayerConfig, ModelConfig, sequential
from llmcli.errors import CheckpointError
from llmcli.families import llama
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, LayerEmbeddingConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig
from llmcli.parts.ple.config import PleConfig


def gemma4(
    model: ModelConfig, experts: ExpertsConfig | None, *, shared: int, size: int, rows: int,
    rounded: bool = False,
) -> ModelConfig:  # fmt: skip
    """Replace a Llama's blocks with Gemma 4's.

    `shared`: how many of the last layers use keys and values of earlier ones. `size`: width of the
    per-layer embeddings, with `rows` tokens. `rounded`: round √D to the weights' dtype. `experts`
    run in parallel to each dense feed-forward. Raises CheckpointError.
    """
    norm, width, count = model.final_norm, model.width, len(model.layers)
    windows, first = [layer.window for layer in model.layers], count - shared

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        kv = replace(attention.kv, norm=replace(norm, weights=False))
        if number >= first:
            alike = [n for n in range(first) if windows[n] == windows[number]]
            if not alike:
                raise CheckpointError(f"no layer has keys and values for layer {number} to share")
            kv = replace(kv, equal=False, layer=alike[-1])
        layer = sequential(
            replace(attention, scale=1.0, qk_norm=norm, kv=kv), mlp, norm=norm, after=norm
        )
        layer = replace(layer, scaled=model.layers[number].scaled)
        if experts is not None:
            layer = _beside(layer, experts, norm)
        ple = Branch(part=PleConfig(size=size, activation=mlp.activation), post_norm=norm)
        return replace(layer, sublayers=(*layer.sublayers, (ple,))) if size else layer

    if size and rows < model.vocab:
        raise CheckpointError(f"embeddings for each layer of {rows} tokens, not {model.vocab}")
    embedding = EmbeddingConfig(scale=width**0.5, rounded_scale=rounded)
    if size:
        # normalizing a projection scaled by width^-½ equals normalizing it with a larger ε
        embedding = replace(embedding, per_layer=LayerEmbeddingConfig(
            vocab=rows, layers=count, size=size, scale=size**0.5,
            norm=replace(norm, eps=norm.eps * width),
        ))  # fmt: skip
    return llama.rebuilt(model, block, family="gemma4", embedding=embedding)


def _beside(layer: LayerConfig, experts: ExpertsConfig, norm: NormConfig) -> LayerConfig:
    """Add experts in parallel to the feed-forward, each with pre- and post-norm; norm their sum.

    The router's norm multiplies by a vector and D^-½, which is folded into the loaded weights.
    """
    attention, (mlp,) = layer.sublayers
    routing = replace(experts.routing, renormalized=True, norm=norm, factors=True)
    own = replace(mlp, part=replace(experts, routing=routing))
    return replace(layer, sublayers=(attention, (mlp, own)), sum_norm=norm)
