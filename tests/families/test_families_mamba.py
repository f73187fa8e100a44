"""Mamba-2, Granite 4 and Nemotron-H: spellings of their configurations, and what is refused."""

import math

import pytest
from zoo import TYPES, variant

from llmcli.families import find, plan
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.ssm.config import SsmConfig


def read(model_type, **changes):
    """Our configuration of that type's base with changes; None takes a key out."""
    settings = {"model_type": model_type, **TYPES[model_type].base} | changes
    found = {key: value for key, value in settings.items() if value is not None}
    return find(model_type, "safetensors").from_hf(found)


def kinds(model):
    """What each block consists of."""
    words = {SsmConfig: "M", AttentionConfig: "*", MlpConfig: "-", ExpertsConfig: "E"}
    return ["".join(words[type(part)] for part in layer.parts) for layer in model.layers]


def test_blocks_by_letters_and_by_types():
    types = ["mamba", "full_attention", "mlp", "moe", "linear_attention", "attention"]
    listed = read("nemotron_h", layers_block_type=types)
    assert kinds(listed) == [*"M*-EM*"]
    lettered = read("nemotron_h", layers_block_type=None, hybrid_override_pattern="M*-EM*")
    assert lettered == listed
    both = read("nemotron_h", layers_block_type=types, hybrid_override_pattern="MM")
    assert both == listed
    assert read("nemotron_h", layers_block_type=None, layer_types=types) == listed
    assert kinds(read("nemotron_h", layers_block_type=None)) == [*"ME*-"]


def test_first_names_of_nemotrons_mixer_win():
    one = {"n_groups": 1, "conv_kernel": 2, "time_step_min": 0.5, "use_conv_bias": False}
    first = {"mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_dt_min": 0.5, "mamba_conv_bias": False}
    assert read("nemotron_h", **first) == read("nemotron_h", **one) != read("nemotron_h")


def test_granites_layers_in_either_spelling():
    first = read("granitemoehybrid", layer_types=["mamba", "attention", "mamba"])
    assert first == read("granitemoehybrid")
    assert kinds(first) == ["ME", "*E", "ME"]
    listed = ["mamba", "full_attention", "linear_attention"]
    assert read("granitemoehybrid", layer_types=None, layers_block_type=listed) == first
    assert kinds(read("granitemoehybrid", layer_types=None)) == ["ME"] * 3
    assert kinds(read("granitemoehybrid", num_local_experts=0)) == ["M-", "*-", "M-"]


@pytest.mark.parametrize(("written", "rotates"), [("rope", True), ("nope", False), (None, False)])
def test_granite_rotates_where_it_says_so(written, rotates):
    attention = read("granitemoehybrid", position_embedding_type=written).layers[1].attention
    assert (attention.rope is not None) == rotates


@pytest.mark.parametrize("size", [16, "auto", None])
def test_the_size_of_a_head_follows_from_the_inner_size(size):
    assert read("granitemoehybrid", mamba_d_head=size) == read("granitemoehybrid")


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_limits_of_dt(infinity):
    limits = {"time_step_limit": [0.25, infinity]}
    for model in (read("mamba2", **limits), read("granitemoehybrid", **limits)):
        assert (model.layers[0].parts[0].least, model.layers[0].parts[0].most) == (0.25, math.inf)
    # of these transformers reads another key
    ssm = read("nemotron_h", **limits, time_step_min=0.125).layers[0].parts[0]
    assert (ssm.least, ssm.most) == (0.125, math.inf)


def test_what_predicts_further_tokens_is_dropped():
    config = variant("nemotron_h").config()
    names = ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"]
    found = plan(names, find("nemotron_h", "safetensors").rules_hf(config), config)
    assert [name for name, _ in found.dropped] == names
    assert not found.unexpected


NEMOTRON = {
    "general.architecture": "nemotron_h_moe", "block_count": 4, "context_length": 64,
    "embedding_length": 48, "vocab_size": 211, "attention.head_count": 6,
    "attention.head_count_kv": [0, 2, 0, 2], "attention.key_length": 8,
    "attention.value_length": 8, "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": [0, 0, 24, 24], "rope.dimension_count": 20, "ssm.conv_kernel": 4,
    "ssm.inner_size": 96, "ssm.state_size": 8, "ssm.time_step_rank": 6, "ssm.group_count": 2,
    "expert_count": 5, "expert_used_count": 2, "nextn_predict_layers": 1,
}  # fmt: skip
TENSORS = ("blk.2.ffn_gate_inp.weight", "blk.2.exp_probs_b.bias", "blk.3.ffn_gate_inp.weight")


def from_gguf(metadata):
    arch = metadata["general.architecture"]
    keys = {key if "general" in key else f"{arch}.{key}": one for key, one in metadata.items()}
    return find(arch, "gguf").from_gguf(keys, dict.fromkeys(TENSORS))


def test_blocks_of_a_file_by_heads_and_neurons():
    """The last one predicts further tokens."""
    model = from_gguf(NEMOTRON)
    assert kinds(model) == [*"M*E"]
    assert model.layers[1].attention.rope is None
    ssm, _, experts = (layer.parts[0] for layer in model.layers)
    assert (ssm.heads, ssm.head_dim, ssm.groups, ssm.least) == (6, 16, 2, 0.0)
    assert (experts.gated, experts.activation, experts.hidden) == (False, "relu2", 24)
    routing = experts.routing
    assert (routing.scores, routing.renormalized, routing.correction) == ("sigmoid", True, True)


def test_heads_of_a_file_by_layer():
    """As Ollama's converter lists them."""
    listed = {"attention.head_count": [0, 6, 0, 6]}
    assert from_gguf(NEMOTRON | listed) == from_gguf(NEMOTRON)
