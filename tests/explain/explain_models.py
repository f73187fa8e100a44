"""Small models of every variant that the formulas have, with random weights."""

from __future__ import annotations

import dataclasses

import torch
from blocks import two_norms
from small_models import random_model
from unfused import attention_of
from zoo import ATTENTION, GATED, RMS, gpt2, in_blocks, layer, llama

from llmcli.commands.explain.measure import explain
from llmcli.commands.explain.options import names
from llmcli.config.attention import Llama3Scaling, RopeConfig
from llmcli.config.embedding import HeadConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig
from llmcli.config.norm import NormConfig
from llmcli.model import Model
from llmcli.records.text import Token

IDS = (5, 17, 3, 17, 42, 8, 30)
TOKENS = tuple(Token(id=id, text=f"t{id}") for id in IDS)
TEXTS = tuple(token.text for token in TOKENS)
RELU = MlpConfig(hidden=30, activation="relu", gated=True, bias=True)
LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
LLAMA3 = Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=16)


def rotated(mlp=GATED, scaling=None, **attention):
    """Two layers."""
    rope = RopeConfig(theta=10000.0, dims=8, scaling=scaling)
    return llama(*(layer(mlp, rope=rope, **attention),) * 2)


# what no family of today has: partial rotation, wide values, layers that differ, no rotation but
# normalized queries, a head with a bias
MIXER = ATTENTION.changed(
    value_dim=6, scale=0.3, rope=RopeConfig(theta=500.0, dims=4), window=4, out_bias=True
)
UNROTATED = MIXER.changed(rope=None, qk_norm=RMS, window=None, kv_heads=1)
ODD = dataclasses.replace(
    llama(
        two_norms(MIXER, MlpConfig(hidden=20, activation="gelu_tanh", gated=True), RMS, LAYER),
        two_norms(
            UNROTATED, MlpConfig(hidden=12, activation="silu", gated=False, bias=True), LAYER, RMS
        ),
        final_norm=LAYER, head=HeadConfig(tied=False, bias=True),
    ),
    width=10,
)  # fmt: skip
MODELS = {
    "gpt2": gpt2(heads=2, kv_heads=2),
    "gpt2-gelu-unscaled": gpt2("gelu", heads=2, kv_heads=2, scale=1.0),
    "llama-grouped": rotated(),
    "llama-biases-relu": rotated(RELU, qkv_bias=True, out_bias=True),
    "llama-stretched": rotated(scaling=LLAMA3),
    "qwen3-qk-norm": rotated(qk_norm=NormConfig(kind="rms", eps=1e-5)),
    "mistral-window": rotated(window=3),
}
NAMES = (*MODELS, "odd")


def config_of(name: str) -> ModelConfig:
    """As wide as its heads are together; gpt2 has one block."""
    if name == "odd":
        return ODD
    layers = MODELS[name].layers[: 1 if "gpt2" in name else 2]
    mixer = layers[0].attention
    return dataclasses.replace(MODELS[name], width=mixer.heads * mixer.head_dim, layers=layers)


def deep_model(layers: int) -> Model:
    """So many small layers."""
    return random_model(dataclasses.replace(ODD, layers=ODD.layers[:1] * layers))


def make(name: str, dtype: str = "float64") -> Model:
    """A fresh model of that name. `packed`: its matrices in 8 bits; not of `odd`."""
    if dtype == "packed":
        config, formats = in_blocks(config_of(name), "Q8_0", size=32)
        return random_model(config, formats=formats)
    return random_model(config_of(name), getattr(torch, dtype))


def explained(model: Model, name: str, index, depth=None, tokens=TOKENS):
    """The explanation of one number."""
    specs = names(model.config, len(tokens))
    return explain(model, tokens, specs, (name, tuple(index)), depth=depth)


def emitted(model: Model):
    """What one pass shows to a tap, and what the fused attention never writes, by its own means."""
    seen = {}
    ids = torch.tensor([IDS])
    model.decoder(ids, tap=lambda name, tensor: seen.__setitem__(name, tensor[0].double()))
    return seen | attention_of(model, seen)
