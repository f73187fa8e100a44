"""Small models of every variant that the formulas have, with random weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import unfused
from blocks import two_norms
from small_models import random_model
from zoo import ATTENTION, MODELS, RMS, llama

from llmcli.commands.explain.measure import derive
from llmcli.config.attention import RopeConfig
from llmcli.config.embedding import HeadConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig
from llmcli.config.norm import NormConfig
from llmcli.graph.graph import Graph
from llmcli.graph.ops import Mix, Score, Softmax
from llmcli.inspect.numbers import names
from llmcli.model import Model
from llmcli.records.text import Token

IDS = (5, 17, 3, 17, 42, 8, 30)
TOKENS = tuple(Token(id=id, text=f"t{id}") for id in IDS)
TEXTS = tuple(token.text for token in TOKENS)
LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
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
NAMES = (
    "gpt2", "gpt2 with gelu and shared keys", "llama", "biases and relu", "llama 3", "qk norm",
    "window", "odd",
)  # fmt: skip


def deep_model(layers: int) -> Model:
    """So many small layers."""
    return random_model(dataclasses.replace(ODD, layers=ODD.layers[:1] * layers))


def config_of(name: str) -> ModelConfig:
    """gpt2 has one block."""
    config = ODD if name == "odd" else MODELS[name]
    return dataclasses.replace(config, layers=config.layers[: 1 if "gpt2" in name else 2])


def make(name: str, dtype: str = "float64") -> Model:
    """A fresh model of that name."""
    return random_model(config_of(name), dtype)


def firsts(models: Mapping[str, ModelConfig]) -> Iterator[tuple[str, list[str]]]:
    """(model, the activations with an op that neither a model before it nor a layer before has).

    Of attention with the ops that it reads: its rules look at their windows, and what they show.
    """
    seen = set()
    for name, config in models.items():
        new, nodes = [], Graph(config).nodes
        for tensor, node in nodes.items():
            reads = node.op.inputs if isinstance(node.op, Score | Softmax | Mix) else ()
            ops = [node.op, *(nodes[one].op for one in reads)]
            op = re.sub(r"blocks\.\d+", "", repr(ops))
            if op not in seen:
                new.append(tensor)
            seen.add(op)
        yield name, new


FIRST = list(firsts({name: config_of(name) for name in NAMES}))


def explained(model: Model, name: str, index, depth=None, tokens=TOKENS):
    """The explanation of one number."""
    specs = names(model.config, len(tokens))
    return derive(model, tokens, specs, (name, tuple(index)), depth=depth)


def emitted(model: Model):
    """What one pass shows to a tap, and what the fused attention never writes, by its own means."""
    seen = unfused.emitted(model, IDS)
    return seen | unfused.attention_of(model, seen)
