"""Small models of every variant that the formulas have, with random weights."""

from __future__ import annotations

import dataclasses

import torch
from blocks import two_norms
from decoder_parameters import parameters_of
from small_models import as_model
from tiny_checkpoints import (
    llama_tensors,
    write_llama,
    write_mistral,
    write_qwen3,
    write_small_gpt2,
)

from llmcli.commands.explain.measure.derive import explain
from llmcli.commands.explain.measure.index import names
from llmcli.config import ModelConfig
from llmcli.loading.load import load
from llmcli.model import Model
from llmcli.nn.decoder import Decoder
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

IDS = (5, 17, 3, 17, 42, 8, 30)
TEXTS = tuple(f"t{id}" for id in IDS)


def _biased_tensors():
    g = torch.Generator().manual_seed(4)
    sizes = {
        "self_attn.q_proj": 32, "self_attn.k_proj": 16, "self_attn.v_proj": 16,
        "self_attn.o_proj": 32, "mlp.gate_proj": 48, "mlp.up_proj": 48, "mlp.down_proj": 32,
    }  # fmt: skip
    biases = {
        f"model.layers.{i}.{part}.bias": torch.randn(size, generator=g)
        for i in range(2)
        for part, size in sizes.items()
    }
    return llama_tensors() | biases


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

WRITERS = {
    "gpt2": write_small_gpt2,
    "gpt2-gelu-unscaled": lambda path: write_small_gpt2(
        path, activation_function="gelu", scale_attn_weights=False
    ),
    "llama-grouped": write_llama,
    "llama-biases-relu": lambda path: write_llama(
        path, _biased_tensors(), attention_bias=True, mlp_bias=True, hidden_act="relu"
    ),
    "llama-stretched": lambda path: write_llama(path, rope_scaling=LLAMA3),
    "mistral-window": write_mistral,
    "qwen3-qk-norm": write_qwen3,
}
NAMES = (*WRITERS, "odd")


def odd_model(dtype: torch.dtype) -> Model:
    """What no family of today has: partial rotation, wide values, layers that differ, no rotation
    but normalized queries, a head with a bias.
    """
    rms, layer_norm = (
        NormConfig(kind="rms", eps=1e-6), NormConfig(kind="layer", eps=1e-5, bias=True)
    )  # fmt: skip
    mixer = AttentionConfig(
        heads=4, kv_heads=2, head_dim=8, value_dim=6, scale=0.3,
        rope=RopeConfig(theta=500.0, dims=4), window=4, out_bias=True,
    )  # fmt: skip
    gated = MlpConfig(hidden=20, activation="gelu_tanh", gated=True)
    plain = MlpConfig(hidden=12, activation="silu", gated=False, bias=True)
    first = two_norms(mixer, gated, rms, layer_norm)
    unrotated = dataclasses.replace(mixer, rope=None, qk_norm=rms, window=None, kv_heads=1)
    second = two_norms(unrotated, plain, layer_norm, rms)
    config = ModelConfig(
        family="test", model_type="test", vocab=61, width=10, context=64, layers=(first, second),
        embedding=EmbeddingConfig(), final_norm=layer_norm, head=HeadConfig(tied=False, bias=True),
    )  # fmt: skip
    return _drawn(config, dtype, 0.4)


def deep_model(layers: int) -> Model:
    """So many small layers."""
    config = odd_model(torch.float64).config
    config = dataclasses.replace(config, layers=config.layers[:1] * layers)
    return _drawn(config, torch.float64, 0.1)


def _drawn(config: ModelConfig, dtype: torch.dtype, deviation: float) -> Model:
    decoder = Decoder(config, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for slot in parameters_of(decoder).values():
        slot.copy_(torch.randn(slot.shape, generator=generator) * deviation)
    return as_model(decoder)


def make(name: str, folder, dtype: str) -> Model:
    """The model of that name; written into `folder` where a checkpoint has to be.

    `packed`: what has rows of whole blocks is in 8 bits. Not of `odd`.
    """
    if name == "odd":
        return odd_model(getattr(torch, dtype))
    path = folder / name
    if not path.exists():
        WRITERS[name](path)
    if dtype == "packed":
        return load(str(path), quantize="int8")
    return load(str(path), dtype=dtype)


def explained(model: Model, name: str, index, depth=None):
    """The explanation of one number of `IDS`."""
    axes = names(model.config, len(IDS))[name]
    return explain(model, IDS, TEXTS, axes, tuple(index), depth=depth)
