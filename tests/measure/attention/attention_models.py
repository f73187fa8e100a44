"""Small models for looking at attention, and their patterns by the definition of softmax."""

import math

import numpy as np
from small_models import random_model
from unfused import attention_of, emitted
from zoo import ATTENTION, RMS, llama

from llmcli.commands.attention.measure.layers import measure_attention
from llmcli.config.attention import AttentionConfig, RopeConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import sequential
from llmcli.inspect.passes import Passes
from llmcli.model import Model

VOCAB = 23
BASE = ATTENTION.changed(
    head_dim=6, value_dim=6, scale=6**-0.5, rope=RopeConfig(theta=100.0, dims=6)
)
MIXERS = {
    "mha": {"kv_heads": 4}, "gqa": {}, "mqa": {"kv_heads": 1}, "window": {"window": 5},
    "window-1": {"window": 1, "kv_heads": 1}, "no-rotation": {"rope": None, "qk_norm": RMS},
    "sinks": {"sinks": True}, "sinks-window": {"sinks": True, "window": 5, "kv_heads": 1},
    "wide-values": {"value_dim": 9, "window": 11, "qkv_bias": True, "out_bias": True},
}


def model_of(
    *mixers: AttentionConfig, dtype="float64", positions=None, width=16, vocab=VOCAB, **more
) -> Model:
    """A model with these mixers, one a layer."""
    ffn = MlpConfig(hidden=24, activation="silu", gated=True)
    config = llama(
        *(sequential(mixer, ffn, norm=RMS) for mixer in mixers), vocab=vocab, width=width,
        context=4096, embedding=EmbeddingConfig(positions=positions), head=HeadConfig(tied=True),
        **more,
    )  # fmt: skip
    return random_model(config, dtype)


def small(kind: str = "gqa", dtype: str = "float64", layers: int = 2) -> Model:
    return model_of(*[BASE.changed(**MIXERS[kind])] * layers, dtype=dtype)


def ids_of(count: int, vocab: int = VOCAB) -> list[int]:
    return [(7 * i * i + 3 * i) % vocab for i in range(count)]


def patterns(model: Model, ids) -> list[np.ndarray]:
    """`[H, T, T]` of every layer in float64, straight from the definition of softmax attention."""
    found = attention_of(model, emitted(model, ids))
    layers = range(len(model.config.layers))
    return [found[f"blocks.{i}.attn.pattern"].numpy() for i in layers]


def looked(model: Model, ids, heads=None, *, generate: int = 0, **options):
    """The report of a look at a sound model."""
    report = measure_attention(Passes(model, ids, generate), heads, **options)
    assert report.ok, report.checks
    return report


def metrics_of(report, layer: int = 0) -> list[dict[str, float]]:
    """Of every head; what heads have not is not in a report."""
    none = dict.fromkeys(("learned_sink", "negative"), math.nan)
    return [none | head.metrics for head in report.layers[layer].heads]
