"""What config.json leaves out means what it means to transformers.

What it says, and the names of tensors, are read of whole checkpoints in `parity`.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import TYPES, variant

from llmcli.errors import UnsupportedModel
from llmcli.families import find
from llmcli.families.rules import parts_to_fill, plan
from llmcli.graph.plan import states, stored_shapes

ROPED = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "bos_token_id": 3, "eos_token_id": [4, 5],
}  # fmt: skip
GPT2 = {"vocab_size": 67, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 96}


def read(model_type, **settings):
    """What we make of such a config.json."""
    return find(model_type, "safetensors").from_hf({"model_type": model_type, **settings})


def changed(model_type, changes):
    """The same of that type's base with changes; None takes a key out."""
    settings = TYPES[model_type].base | changes
    return read(model_type, **{key: one for key, one in settings.items() if one is not None})


HYBRID = {"vocab_size": 67, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 40}  # fmt: skip
CHOOSING = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}


def test_layers_that_predict_further_tokens_are_dropped():
    """In Nemotron-H, whose published files lack them; `test_published` has files with them."""
    config = variant("nemotron_h").config()
    names = ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"]
    found = plan(names, find("nemotron_h", "safetensors").rules_hf(config), config)
    assert [name for name, reason in found.dropped if "multi-token" in reason] == names
    assert not found.unexpected


def test_rotated_halves_are_refused():
    with pytest.raises(UnsupportedModel, match="rope_interleave"):
        read("deepseek_v3", **ROPED, rope_interleave=False)


# of all heads and ids that a type has by default
SIZES = {
    "vocab_size": 300_000, "hidden_size": 4096, "intermediate_size": 40, "num_hidden_layers": 12,
    "num_attention_heads": 32,
}  # fmt: skip
OWN = {  # what some types have no default for, or call otherwise
    "gpt2": {"n_positions": 96}, "opt": {"ffn_dim": 40}, "gemma4_text": {"vocab_size": 262_144},
    "gpt_neo": {"attention_types": [[["global", "local"], 6]]},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 6},
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_keys_that_are_absent_have_transformers_defaults(model_type):
    """Only the sizes are given; what is left out has to mean what it means to transformers."""
    given = SIZES | OWN.get(model_type, {})
    whole = AutoConfig.for_model(model_type, **given).to_dict()
    assert read(model_type, **given) == read(**whole | {"model_type": model_type})


# published sizes of Gemma 4, and the bytes of a token in their caches, in 16 bits
GEMMA4 = {
    "E2B": ({
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    }, 2 * 2 * (12 * 256 + 3 * 512)),
    "E4B": ({
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
        "final_logit_softcapping": 30.0,
    }, 2 * 2 * 2 * (20 * 256 + 4 * 512)),
    "31B": ({
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
    }, 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)),
}  # fmt: skip


@pytest.mark.parametrize("written_by", ["transformers 5", "the first files"])
@pytest.mark.parametrize("size", GEMMA4)
def test_gemma_4s_published_sizes(size, written_by):
    """Shared layers keep nothing; old files hold keys and values of theirs, which are dropped."""
    settings, cached = GEMMA4[size]
    theirs = AutoConfig.for_model("gemma4_text", **settings)
    ours = read(**(theirs.to_dict() if written_by == "transformers 5" else settings) | {
        "model_type": "gemma4_text"
    })  # fmt: skip
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(theirs).state_dict().keys()
    shared, last = settings.get("num_kv_shared_layers", 0), len(ours.layers) - 1
    unused = [
        f"model.layers.{last}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")
    ] * bool(shared)
    found = plan([*names, *unused], find("gemma4_text", "safetensors").rules_hf(ours), ours)
    parts = parts_to_fill(found.loads, stored_shapes(ours))
    assert sorted(load.part for load in found.loads) == sorted(parts)
    assert (found.unexpected, dict(found.dropped).keys()) == ((), {"lm_head.weight", *unused})
    held = states(ours, batch=1, capacity=1, dtype="bfloat16")
    assert sum(spec.bytes for spec in held) == cached
    assert {spec.layer for spec in held} == {*range(len(ours.layers) - shared)}


@pytest.mark.parametrize(("name", "ours"), [
    ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"),
])  # fmt: skip
def test_activations_are_the_functions_that_transformers_has(name, ours):
    from transformers.activations import ACT2FN

    from llmcli.ops.activations import activation

    config = read("llama", **ROPED, hidden_act=name)
    assert config.layers[0].parts[-1].activation == ours
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(activation(ours)(x), ACT2FN[name](x), rtol=0, atol=1e-12)
