"""Small models of every kind that a configuration can express: for names, `selftest`, and tests.

A row each: who adds a part adds rows here. They have no weights and no tokenizer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llmcli.config.attention import (
    AttentionConfig,
    Chunk,
    DynamicScaling,
    FrequencyFactors,
    KeysValues,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryGrowth,
    RopeConfig,
    ScoreConfig,
    YarnScaling,
)
from llmcli.config.conv import ShortConvConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig, LayerEmbeddingConfig
from llmcli.config.experts import ExpertGroups, ExpertsConfig, RoutingConfig, SharedConfig
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import GateClamp, MlpConfig
from llmcli.config.model import Branch, LayerConfig, ModelConfig, sequential
from llmcli.config.norm import HeadNorm, JoinedNorm, NormConfig
from llmcli.config.ple import PleConfig
from llmcli.config.ssm import SsmConfig

VOCAB = 43
RMS = NormConfig(kind="rms", eps=1e-6)
OFFSET = NormConfig(kind="rms", eps=1e-6, offset=1.0)
LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
ROPE = RopeConfig(theta=100.0, dims=8)
PLAIN = MlpConfig(hidden=20, activation="gelu", gated=False)
GATED = MlpConfig(hidden=30, activation="silu", gated=True)
CLAMPED = dataclasses.replace(
    GATED, activation="quick_gelu", bias=True, clamp=GateClamp(limit=0.7, offset=1.0)
)


def layer(mlp: Any = GATED, norm: NormConfig = RMS, **attention: Any) -> LayerConfig:
    """Attention of two heads that share each key head, and a feed-forward part."""
    own: Any = dict(heads=4, kv_heads=2, head_dim=8, value_dim=8, rope=ROPE)
    plain = AttentionConfig(scores=ScoreConfig(scale=8**-0.5), **own)
    return sequential(plain.changed(**attention), mlp, norm=norm)


def llama(*layers: LayerConfig, **model: Any) -> ModelConfig:
    """A model of those layers, twice the default one where none are given."""
    own: Any = dict(family="test", model_type="test", vocab=VOCAB, width=16, context=64)
    own |= dict(embedding=EmbeddingConfig(), final_norm=RMS, head=HeadConfig(tied=False))
    return ModelConfig(layers=layers or (layer(),) * 2, **(own | model))


def twice(one: LayerConfig, **model: Any) -> ModelConfig:
    """A model of two equal layers."""
    return llama(one, one, **model)


def gpt2(activation: Any = "gelu_tanh", **attention: Any) -> ModelConfig:
    """Learned positions, LayerNorm and biases everywhere, a plain feed-forward, a tied head."""
    mlp = MlpConfig(hidden=30, activation=activation, gated=False, bias=True)
    own: Any = dict(rope=None, heads=3, kv_heads=3, qkv_bias=True, out_bias=True)
    ends: Any = dict(embedding=EmbeddingConfig(positions=64), head=HeadConfig(tied=True))
    return twice(layer(mlp, LAYER, **(own | attention)), final_norm=LAYER, **ends)


def mixture(
    count: int = 5, hidden: int = 12, activation: Any = "silu", own: Any = None, **routing: Any
) -> ExpertsConfig:
    """A mixture of experts, two chosen for each token; `own`: its other fields."""
    chosen = RoutingConfig(**({"chosen": 2} | routing))
    sizes: Any = dict(experts=count, hidden=hidden, activation=activation)
    return ExpertsConfig(routing=chosen, **sizes, **(own or {}))


def stretched(scaling: Any, dims: int = 8) -> ModelConfig:
    """Rotations of other frequencies than trained ones."""
    return twice(layer(rope=RopeConfig(theta=100.0, dims=dims, scaling=scaling)))


ATTENTION = layer().attention
WEIGHTLESS = NormConfig(kind="rms", eps=1e-6, weights=False)
NORMED = KeysValues(norm=WEIGHTLESS)
PLE = PleConfig(size=6, activation="gelu_tanh")


def block(*sublayers: Any, **more: Any) -> LayerConfig:
    """A block of sublayers, each a branch or several: dicts of `Branch`."""
    every = [one if isinstance(one, list) else [one] for one in sublayers]
    return LayerConfig(
        sublayers=tuple(tuple(Branch(**branch) for branch in one) for one in every), **more
    )


def branch(part: Any, before: Any = RMS, after: Any = None, **more: Any) -> dict[str, Any]:
    """The fields of a `Branch`."""
    return {"part": part, "pre_norm": before, "post_norm": after} | more


def latent(ffn: Any = GATED, **changes: Any) -> LayerConfig:
    """Heads of 6 and 4 numbers, values of 5, latents of 7."""
    own: Any = dict(heads=3, content=6, value_dim=5, rank=7, query_rank=9, scale=0.3, norm=RMS)
    own |= dict(rope=RopeConfig(theta=100.0, dims=4))
    return sequential(LatentConfig(**(own | changes)), ffn, norm=RMS)


def delta(**changes: Any) -> DeltaConfig:
    """Two value heads for each of two key heads; sizes of keys and values differ."""
    own: Any = dict(heads=4, key_heads=2, key_dim=6, value_dim=5, length=4, norm=RMS)
    return DeltaConfig(**(own | changes))


def ssm(**changes: Any) -> SsmConfig:
    """Two heads for each of two groups."""
    own: Any = dict(heads=4, head_dim=8, groups=2, state=6, length=4, norm=RMS)
    return SsmConfig(**(own | changes))


CONFIGS: dict[str, ModelConfig] = {
    "gpt2": gpt2(),
    "gpt2, scale of its own": gpt2(scale=1.0),
    "gpt2 with gelu and shared keys": gpt2("gelu", heads=6),
    "gpt2 with relu and a window": gpt2("relu", window=3),
    "llama": llama(),
    "one layer": llama(layer()),
    "one key head": twice(layer(kv_heads=1)),
    "keys of their own": twice(layer(kv_heads=4)),
    "qk norm": twice(layer(qk_norm=NormConfig(kind="rms", eps=1e-5))),
    "qk layer norm": twice(layer(qk_norm=NormConfig(kind="layer", eps=1e-5))),
    "window": twice(layer(window=4)),
    "window of one": llama(layer(), layer(window=1)),
    "biases and relu": twice(
        layer(MlpConfig(hidden=30, activation="relu", gated=True, bias=True), qkv_bias=True)
    ),
    "wide values": twice(layer(value_dim=12)),
    "partial rotation": twice(layer(rope=RopeConfig(theta=100.0, dims=4))),
    "linear": stretched(LinearScaling(factor=4.0)),
    "llama 3": stretched(Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=32)),
    "yarn": stretched(YarnScaling(factor=4.0, original=8, attention_factor=1.2)),
    "longrope": stretched(
        LongRopeScaling(
            short=(1.0, 1.1, 1.2, 1.3), long=(1.0, 2.0, 3.0, 4.0), original=4, attention_factor=1.1
        )
    ),
    "frequency factors": stretched(
        FrequencyFactors(source="rope_freqs.weight", factors=(1.0, 1.5, 2.0, 4.0))
    ),
    "dynamic, within its length": stretched(DynamicScaling(factor=2.0, original=64)),
    "head with a bias": dataclasses.replace(llama(), head=HeadConfig(tied=True, bias=True)),
    "layers that differ": llama(
        layer(window=2, qk_norm=RMS),
        layer(
            MlpConfig(hidden=17, activation="gelu", gated=False, bias=True),
            NormConfig(kind="layer", eps=1e-5),
            rope=None,
            heads=4,
            kv_heads=4,
            out_bias=True,
        ),
        layer(heads=2, kv_heads=1, head_dim=10, value_dim=6, scale=0.4),
        embedding=EmbeddingConfig(positions=64),
    ),
}

# other blocks
BLOCKS: dict[str, ModelConfig] = {
    "norms after": twice(block(branch(ATTENTION, None, RMS), branch(GATED, None, RMS))),
    "norms before and after": twice(block(
        branch(ATTENTION, RMS, RMS), branch(GATED, LAYER, LAYER),
    )),
    "post-norm, narrow embeddings": llama(
        block(branch(ATTENTION, None), branch(PLAIN, LAYER), normed_residual=True),
        block(
            branch(ATTENTION), [branch(GATED), branch(mixture(norm=RMS))], sum_norm=RMS,
            normed_residual=True,
        ),
        block([branch(ATTENTION), branch(GATED, None, shares_norm=True)], normed_residual=True),
        embedding=EmbeddingConfig(size=10, norm=LAYER), head=HeadConfig(tied=True),
    ),
    "parallel with one norm": twice(block(
        [branch(ATTENTION), branch(GATED, None, shares_norm=True)],
    )),
    "parallel with two norms": twice(block([branch(ATTENTION), branch(GATED, LAYER)])),
    "multipliers": twice(block(
        branch(ATTENTION, multiplier=0.22), branch(GATED, None, LAYER, multiplier=-3.0), scale=0.5,
    )),
    "one and three sublayers": llama(
        block(branch(ATTENTION)), block(branch(GATED)),
        block(
            branch(ATTENTION, None), branch(GATED),
            branch(dataclasses.replace(PLAIN, hidden=GATED.hidden), None, RMS),
        ),
    ),
    "short convolutions": llama(
        sequential(ShortConvConfig(length=3), GATED, norm=RMS), layer(),
        sequential(ShortConvConfig(length=4, bias=True), GATED, norm=RMS),
    ),
    "gated deltanet": llama(
        sequential(delta(), GATED, norm=RMS), layer(),
        sequential(delta(heads=3, key_heads=3, length=2, value_dim=4), GATED, norm=RMS),
        block(branch(delta(tiled=True, eps=0.3), RMS, RMS), branch(GATED)),
    ),
    "mamba-2": llama(
        sequential(ssm(groups=1), norm=RMS),
        sequential(ssm(bias=True, conv_bias=False), norm=RMS), layer(),
        block(branch(ssm(least=0.4, most=0.9, length=3), multiplier=0.5), branch(GATED)),
    ),
    "mamba-2 alone": twice(
        sequential(ssm(least=0.4, most=0.9), norm=RMS), head=HeadConfig(tied=True)
    ),
    "mixers side by side": twice(block(
        [branch(ATTENTION),
         branch(ShortConvConfig(length=3), None, shares_norm=True, multiplier=0.5)],
        branch(GATED),
    )),
    "latent attention": llama(
        latent(), layer(window=4), latent(query_rank=None, bias=True, scale=10**-0.5),
        latent(bias=True),
    ),
    "offset norms": twice(
        layer(norm=OFFSET, qk_norm=OFFSET), final_norm=OFFSET,
        embedding=EmbeddingConfig(scale=3.5, rounded_scale=True),
    ),
    "caps": llama(layer(cap=1.5), layer(cap=0.7, window=3), head=HeadConfig(tied=True, cap=2.0)),
    "chunks": llama(
        layer(window=Chunk(size=3)), layer(window=Chunk(size=5), qk_norm=WEIGHTLESS, kv_heads=1),
        layer(rope=None, growth=QueryGrowth(beta=0.5, original=3, first=1)),
    ),
    "weighted inputs of experts": llama(
        layer(mixture(
            chosen=1, scores="sigmoid", by_logits=True, weighs_input=True,
            own={"shared": SharedConfig(hidden=14)},
        )),
        layer(mixture(scores="sigmoid", weighs_input=True)),
    ),
    "growing queries": llama(
        layer(growth=QueryGrowth(beta=0.5, original=3)),
        layer(growth=QueryGrowth(beta=0.2, original=2), window=4),
    ),
    "scores lowered by distance": llama(
        layer(rope=None, slopes=(0.5, 0.25, 0.125, 0.7), qkv_bias=True),
        layer(rope=None, slopes=(0.5, 0.1, 0.125, 0.7), kv_heads=1),
        embedding=EmbeddingConfig(norm=NormConfig(kind="layer", eps=1e-5, bias=True)),
    ),
    "clipped projections": llama(*(layer(
        clip=0.3, qkv_bias=True, gated=True, norm=NormConfig(kind="layer", eps=1e-5, weights=False),
    ), layer(clip=0.2, qk_norm=RMS, kv=KeysValues(norm=WEIGHTLESS)), layer(
        clip=0.2, gated=True, qk_norm=HeadNorm(kind="layer", eps=1e-5),
    ))),
    "sinks": llama(layer(sinks=True), layer(sinks=True, window=3)),
    "gated attention": llama(
        layer(gated=True), layer(gated=True, qk_norm=RMS, qkv_bias=True, value_dim=6),
        layer(gated=True, rope=None, kv_heads=1), layer(gated=True, window=3),
        layer(gated=True, window=3, kv=KeysValues(layer=3)),
    ),
    "clamped gates": twice(layer(CLAMPED)),
    "scaled ends": llama(
        embedding=EmbeddingConfig(scale=12.0), head=HeadConfig(tied=False, scale=0.25),
    ),
    "values that are normalized keys": twice(layer(qk_norm=RMS, kv=KeysValues(
        norm=WEIGHTLESS, equal=True,
    ))),
    "values that are keys": twice(layer(kv=KeysValues(equal=True))),
    "keys and values of another layer": llama(
        layer(window=4, qk_norm=RMS, kv=NORMED), layer(qk_norm=RMS, kv=NORMED),
        *(layer(window=window, qk_norm=RMS, kv=KeysValues(norm=WEIGHTLESS, layer=of))
          for window, of in ((4, 0), (None, 1), (4, 0))),
    ),
    "keys of another layer, as they are": llama(
        layer(rope=None), layer(rope=None, kv=KeysValues(layer=0)),
    ),
    "some pairs of whole heads rotated": twice(layer(
        rope=RopeConfig(theta=100.0, dims=8, scaling=ProportionalScaling(pairs=1)),
    )),
    "embeddings for each layer": llama(
        *(block(branch(ATTENTION, RMS, RMS), branch(GATED, RMS, RMS), branch(PLE, None, RMS)),) * 2,
        block(
            branch(ATTENTION), [branch(GATED, RMS, RMS), branch(mixture(), RMS, RMS)],
            branch(PLE, None, RMS),
        ),
        embedding=EmbeddingConfig(
            scale=4.0, rounded_scale=True,
            per_layer=LayerEmbeddingConfig(
                vocab=VOCAB + 2, layers=3, size=6, scale=6**0.5, norm=RMS
            ),
        ),
    ),
    "blocks scaled by a parameter": llama(
        *(dataclasses.replace(layer(), scaled=True),) * 2, dataclasses.replace(layer(), scale=0.5),
    ),
    "qk norm over the width": twice(layer(qk_norm=JoinedNorm(kind="rms", eps=1e-5))),
    "experts": twice(layer(mixture(renormalized=True))),
    "experts beside dense layers": llama(
        layer(), layer(mixture(chosen=3, own={"shared": SharedConfig(hidden=9, weighed=True)})),
        layer(mixture(activation="gelu", chosen=1)),
    ),
    "experts by groups": twice(layer(mixture(
        8, scores="sigmoid", renormalized=True, correction=True, chosen=3,
        groups=ExpertGroups(count=4, kept=2), scale=1.75, own={"shared": SharedConfig(hidden=14)},
    ))),
    "experts by the best of a group": twice(layer(mixture(
        8, groups=ExpertGroups(count=4, kept=2, best=1), chosen=3, scale=1.75,
    ))),
    "experts after the choice": twice(block(
        branch(ATTENTION),
        branch(mixture(scores="softmax of the chosen", bias=True), RMS, RMS, multiplier=0.5),
    )),
    "experts beside the feed-forward": twice(block(
        branch(ATTENTION, RMS, RMS),
        [branch(GATED, RMS, RMS),
         branch(mixture(norm=RMS, factors=True, renormalized=True), RMS, LAYER)],
        sum_norm=RMS, scaled=True,
    )),
    "a sum without norms of its parts": twice(block(
        branch(ATTENTION), [branch(PLAIN, None), branch(mixture(factors=True))],
        sum_norm=LAYER,
    )),
    "experts with biases and clamped gates": twice(layer(mixture(
        activation="quick_gelu", scores="softmax of the chosen",
        own={"bias": True, "clamp": GateClamp(limit=0.3, offset=1.0)},
    ))),
    "experts without gates, alone in their blocks": llama(
        block(branch(ATTENTION)),
        block(branch(MlpConfig(hidden=20, activation="relu2", gated=False))), block(branch(mixture(
            7, activation="relu2", scores="sigmoid", renormalized=True, correction=True, scale=2.5,
            chosen=3, own={"gated": False, "shared": SharedConfig(hidden=9)},
        ))),
        block(branch(mixture(activation="relu2", own={"gated": False, "bias": True}))),
    ),
    "all experts": twice(layer(mixture(3, chosen=3, scale=0.5))),
}  # fmt: skip
MODELS = CONFIGS | BLOCKS
