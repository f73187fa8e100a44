"""Rotary settings give the frequencies and factors that transformers computes from them."""

import copy

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmcli.config.attention import RopeConfig
from llmcli.families.rope import rope_from_gguf, rope_from_hf
from llmcli.families.values import ConfigReader
from llmcli.ops.rope import frequencies

HEAD, CONTEXT = 16, 128
SIZES = {
    "vocab_size": 67, "hidden_size": 4 * HEAD, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
KINDS = {
    "default": {"rope_type": "default"},
    "nothing": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "llama3 without original": LLAMA3,
    "yarn": YARN | {"original_max_position_embeddings": 32},
    "yarn without original": YARN,
    "yarn, factor from the lengths": YARN
    | {"factor": None, "original_max_position_embeddings": 32},
    "yarn, own factor": YARN | {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, mscale alone": YARN | {"mscale": 0.7},
    "yarn, zero betas": YARN | {"beta_fast": 0, "beta_slow": 0},
    "yarn, whole range": YARN | {"truncate": False, "original_max_position_embeddings": 32},
    "yarn, a long original": YARN | {"original_max_position_embeddings": 1 << 17},
    "yarn, no stretch": YARN | {"factor": 1.0},
    "longrope": LONG | {"original_max_position_embeddings": 32},
    "longrope, factor": LONG | {"original_max_position_embeddings": 32, "factor": 2.0},
    "longrope, own factor": LONG | {"attention_factor": 1.5},
    "longrope, no stretch": LONG,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.35},
    "proportional, factor": {"rope_type": "proportional", "factor": 4.0},
}


def reference(raw, length):
    """Frequencies and factor as a fresh transformers model has them at that length."""
    config = LlamaConfig(**copy.deepcopy(raw))
    rotary = LlamaRotaryEmbedding(config)
    if rotary.rope_type == "default":
        return rotary.inv_freq, rotary.attention_scaling
    return ROPE_INIT_FUNCTIONS[rotary.rope_type](config, "cpu", seq_len=length)


@pytest.mark.parametrize("length", [8, CONTEXT, 3 * CONTEXT])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "legacy type"])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind, form, length):
    settings = dict(KINDS[kind])
    raw = dict(SIZES)
    if form == "rope_parameters":
        raw["rope_parameters"] = settings | {"rope_theta": 500.0}
    else:
        if form == "legacy type" and "rope_type" in settings:
            settings["type"] = settings.pop("rope_type")
        raw |= {"rope_scaling": settings or None, "rope_theta": 500.0}
    ours = rope_from_hf(ConfigReader(copy.deepcopy(raw)), head_dim=HEAD, context=CONTEXT)
    found, factor = frequencies(ours, length)
    expected, expected_factor = reference(raw, length)
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def rope(settings, **raw):
    raw = {"rope_parameters": settings} | raw
    return rope_from_hf(ConfigReader(raw), head_dim=HEAD, context=CONTEXT)


def test_a_length_beside_the_settings_wins_over_the_one_inside_as_in_transformers():
    raw = SIZES | {"rope_parameters": dict(KINDS["yarn"]), "original_max_position_embeddings": 64}
    ours = rope_from_hf(ConfigReader(copy.deepcopy(raw)), head_dim=HEAD, context=CONTEXT)
    assert ours.scaling.original == 64
    expected, _ = reference(raw, None)
    torch.testing.assert_close(frequencies(ours, 8)[0].float(), expected, rtol=2e-6, atol=0)


def test_the_default_kind_rotates_whole_heads_and_the_others_a_fraction_of_them():
    """In these families transformers reads the fraction in every kind but the default."""
    raw = SIZES | {"head_dim": HEAD, "partial_rotary_factor": 0.5, "rope_theta": 500.0}
    del raw["hidden_size"]
    inverse = LlamaRotaryEmbedding(Qwen3Config(hidden_size=64, **raw)).inv_freq
    assert rope(None, partial_rotary_factor=0.5).dims == 2 * len(inverse) == HEAD
    assert rope(KINDS["linear"], partial_rotary_factor=0.5).dims == HEAD // 2
    assert rope(KINDS["linear"] | {"partial_rotary_factor": 0.25}).dims == HEAD // 4


def gguf(tensors=(), **keys):
    metadata = {f"a.{key.replace('__', '.')}": value for key, value in keys.items()}
    values = ConfigReader(metadata, prefix="a.")
    return rope_from_gguf(values, tensors, head_dim=HEAD, context=CONTEXT)


def test_gguf_without_scaling():
    assert gguf() == rope(None) == RopeConfig(theta=10000.0, dims=HEAD)
