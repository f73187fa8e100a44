"""Small models of every kind that the configuration can express, with weights of a trained size."""

import dataclasses

import torch
from decoder_parameters import parameters_of

from llmcli.config import Branch, LayerConfig, ModelConfig, sequential
from llmcli.ladder.weights import Weights
from llmcli.nn.decoder import Decoder
from llmcli.parts.attention.config import (
    AttentionConfig,
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from llmcli.parts.conv.config import ShortConvConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

VOCAB = 43
RMS = NormConfig(kind="rms", eps=1e-6)
LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
ROPE = RopeConfig(theta=100.0, dims=8)
PLAIN = MlpConfig(hidden=20, activation="gelu", gated=False)
GATED = MlpConfig(hidden=30, activation="silu", gated=True)


def layer(mlp=GATED, norm=RMS, **attention):
    mixer = {
        "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "scale": 8**-0.5, "rope": ROPE,
    }  # fmt: skip
    mixer = AttentionConfig(**(mixer | attention))
    return sequential(mixer, mlp, norm=norm)


def llama(*layers, **model):
    """A model of those layers, twice the default one where none are given."""
    layers = layers or (layer(),) * 2
    defaults = {"embedding": EmbeddingConfig(), "final_norm": RMS, "head": HeadConfig(tied=False)}
    return ModelConfig(
        family="test", model_type="test", vocab=VOCAB, width=16, context=64, layers=layers,
        **(defaults | model),
    )  # fmt: skip


def gpt2(activation="gelu_tanh", **attention):
    """Learned positions, LayerNorm and biases everywhere, a plain feed-forward, a tied head."""
    mlp = MlpConfig(hidden=30, activation=activation, gated=False, bias=True)
    parts = {"rope": None, "heads": 3, "kv_heads": 3, "qkv_bias": True, "out_bias": True}
    return llama(
        *(layer(mlp, LAYER, **(parts | attention)),) * 2,
        embedding=EmbeddingConfig(positions=64), final_norm=LAYER, head=HeadConfig(tied=True),
    )  # fmt: skip


def stretched(scaling, dims=8):
    return llama(*(layer(rope=RopeConfig(theta=100.0, dims=dims, scaling=scaling)),) * 2)


ATTENTION = layer().attention


def block(*sublayers, scale=1.0):
    """A block of sublayers, each a branch or several: dicts of `Branch`."""
    every = [one if isinstance(one, list) else [one] for one in sublayers]
    return LayerConfig(
        sublayers=tuple(tuple(Branch(**branch) for branch in one) for one in every), scale=scale
    )


def branch(part, before=RMS, after=None, **more):
    return {"part": part, "pre_norm": before, "post_norm": after} | more


CONFIGS = {
    "gpt2": gpt2(),
    "gpt2, scale of its own": gpt2(scale=1.0),
    "gpt2 with gelu and shared keys": gpt2("gelu", heads=6),
    "gpt2 with relu and a window": gpt2("relu", window=3),
    "llama": llama(),
    "one layer": llama(layer()),
    "one key head": llama(*(layer(kv_heads=1),) * 2),
    "keys of their own": llama(*(layer(kv_heads=4),) * 2),
    "qk norm": llama(*(layer(qk_norm=NormConfig(kind="rms", eps=1e-5)),) * 2),
    "qk layer norm": llama(*(layer(qk_norm=NormConfig(kind="layer", eps=1e-5)),) * 2),
    "window": llama(*(layer(window=4),) * 2),
    "window of one": llama(layer(), layer(window=1)),
    "biases and relu": llama(
        *(layer(MlpConfig(hidden=30, activation="relu", gated=True, bias=True), qkv_bias=True),)
        * 2
    ),
    "wide values": llama(*(layer(value_dim=12),) * 2),
    "partial rotation": llama(*(layer(rope=RopeConfig(theta=100.0, dims=4)),) * 2),
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
            rope=None, heads=4, kv_heads=4, out_bias=True,
        ),
        layer(heads=2, kv_heads=1, head_dim=10, value_dim=6, scale=0.4),
        embedding=EmbeddingConfig(positions=64),
    ),
}  # fmt: skip

# other blocks, which the ladder has no rungs for
BLOCKS = {
    "norms after": llama(*(block(
        branch(ATTENTION, None, RMS), branch(GATED, None, RMS),
    ),) * 2),
    "norms before and after": llama(*(block(
        branch(ATTENTION, RMS, RMS), branch(GATED, LAYER, LAYER),
    ),) * 2),
    "parallel with one norm": llama(*(block(
        [branch(ATTENTION), branch(GATED, None, shares_norm=True)],
    ),) * 2),
    "parallel with two norms": llama(*(block([branch(ATTENTION), branch(GATED, LAYER)]),) * 2),
    "multipliers": llama(*(block(
        branch(ATTENTION, multiplier=0.22), branch(GATED, None, LAYER, multiplier=-3.0), scale=0.5,
    ),) * 2),
    "one and three sublayers": llama(
        block(branch(ATTENTION)), block(branch(GATED)),
        block(branch(ATTENTION, None), branch(GATED), branch(PLAIN, None, RMS)),
    ),
    "short convolutions": llama(
        sequential(ShortConvConfig(length=3), GATED, norm=RMS), layer(),
        sequential(ShortConvConfig(length=4, bias=True), GATED, norm=RMS),
    ),
    "mixers side by side": llama(*(block(
        [branch(ATTENTION), branch(ShortConvConfig(length=3), None, shares_norm=True)],
        branch(GATED),
    ),) * 2),
    "qk norm over the width": llama(
        *(layer(qk_norm=NormConfig(kind="rms", eps=1e-5), qk_norm_wide=True),) * 2
    ),
}  # fmt: skip
MODELS = CONFIGS | BLOCKS


def random_decoder(config, dtype=torch.float64, seed=3):
    """Matrices that keep the size of a row, norm weights about 1, biases about 0.3."""
    decoder = Decoder(config, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, slot in parameters_of(decoder).items():
        values = torch.randn(slot.shape, generator=generator, dtype=torch.float64)
        last = name.rpartition(".")[2]
        if last == "w":
            values = 1 + 0.3 * values
        elif last.startswith("b"):
            values = 0.3 * values
        elif "embed" not in name:
            values = 1.5 * values / slot.shape[1] ** 0.5
        slot.copy_(values)
    return decoder


def weights(config, dtype=torch.float64, seed=3):
    """The same as the ladder has it."""
    return Weights.of(random_decoder(config, dtype, seed))


def ids(rows, tokens, seed=0):
    """Random prompts `[rows, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, tokens), generator=generator)


def read(rung, tokens, prompt):
    """Logits `[b, n, V]` of `[b, n]` tokens, those after the prompt read one by one."""
    if not rung.batched:
        return torch.stack([_read(rung, row, prompt) for row in tokens])
    return _read(rung, tokens, prompt)


def _read(rung, tokens, prompt):
    first = rung.start(tokens[..., :prompt])
    rest = [rung.extend(id).unsqueeze(-2) for id in tokens[..., prompt:].unbind(-1)]
    return torch.cat([first, *rest], -2)
