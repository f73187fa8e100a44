"""Mamba-2, Granite 4 and Nemotron-H: layers for further tokens; settings of `table.txt`."""


from zoo import TYPES, variant

from llmcli.families import find
from llmcli.families.rules import plan


def read(model_type, **changes):
    """Our configuration of that type's base with changes; None takes a key out."""
    settings = {"model_type": model_type, **TYPES[model_type].base} | changes
    found = {key: value for key, value in settings.items() if value is not None}
    return find(model_type, "safetensors").from_hf(found)


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
