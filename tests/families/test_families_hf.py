"""What config.json leaves out means what it means to transformers.

What it says, and the names of tensors, are read of whole checkpoints in `parity`.
"""

from operator import attrgetter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmcli.config.experts import ExpertsConfig
from llmcli.errors import UnsupportedModel
from llmcli.families import find, parts_to_fill, plan
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


SMALL = {"vocab_size": 67, "hidden_size": 64, "num_attention_heads": 4}
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# of a part: our names and transformers', for each what is read where config.json has only sizes
LATENT = {
    "content": "qk_nope_head_dim", "rope.dims": "qk_rope_head_dim", "value_dim": "v_head_dim",
    "rank": "kv_lora_rank", "query_rank": "q_lora_rank",
}  # fmt: skip
ROUTED = {
    "experts": "n_routed_experts", "hidden": "moe_intermediate_size",
    "routing.chosen": "num_experts_per_tok", "routing.scale": "routed_scaling_factor",
    "routing.renormalized": "norm_topk_prob",
}  # fmt: skip
DELTA = {
    "heads": "linear_num_value_heads", "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim",
    "length": "linear_conv_kernel_dim",
}  # fmt: skip
MIXED = {
    "experts": "num_experts", "hidden": "moe_intermediate_size",
    "shared.hidden": "shared_expert_intermediate_size", "routing.chosen": "num_experts_per_tok",
}  # fmt: skip


def assert_same(ours, theirs, names):
    found = {name: attrgetter(name)(ours) for name in names}
    assert found == {name: getattr(theirs, names[name]) for name in names}


@pytest.mark.parametrize("model_type", LATENTS)
def test_absent_keys_of_latent_attention_have_transformers_defaults(model_type):
    raw = SMALL | {"intermediate_size": 40, "num_hidden_layers": 1}
    dense = {} if model_type == "glm4_moe_lite" else {"first_k_dense_replace": 1}
    ours, theirs = read(model_type, **raw, **dense), AutoConfig.for_model(model_type, **raw)
    assert_same(ours, theirs, {
        "context": "max_position_embeddings", "final_norm.eps": "rms_norm_eps",
        "bos": "bos_token_id",
    })  # fmt: skip
    assert ours.eos == (theirs.eos_token_id,)
    assert_same(ours.layers[0].parts[0], theirs, LATENT)


@pytest.mark.parametrize("model_type", LATENTS)
def test_absent_keys_of_experts_have_transformers_defaults(model_type):
    raw = SMALL | {"intermediate_size": 40, "num_hidden_layers": 4}
    if model_type == "deepseek_v2":  # the only one that says nothing of it
        raw["num_experts_per_tok"] = 4
    layers, theirs = read(model_type, **raw).layers, AutoConfig.for_model(model_type, **raw)
    first = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe_lite": 1}[model_type]
    kinds = [isinstance(layer.parts[1], ExpertsConfig) for layer in layers]
    assert kinds == [at >= first for at in range(4)]
    ours = layers[-1].parts[1]
    assert_same(ours, theirs, ROUTED)
    assert ours.shared.hidden == theirs.n_shared_experts * theirs.moe_intermediate_size
    groups = (ours.routing.groups, ours.routing.kept_groups)
    assert groups == (theirs.n_group or 1, theirs.topk_group or 1)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_absent_keys_of_gated_deltanet_have_transformers_defaults(model_type):
    raw = SMALL | {"num_hidden_layers": 6, "num_attention_heads": 16}
    if model_type == "qwen3_5_text":
        raw["intermediate_size"] = 40
    ours, theirs = read(model_type, **raw), AutoConfig.for_model(model_type, **raw)
    kinds = [one.attention is None for one in ours.layers]
    assert kinds == [kind == "linear_attention" for kind in theirs.layer_types]
    assert_same(ours.layers[0].parts[0], theirs, DELTA)
    attention, rope = ours.layers[3].attention, theirs.rope_parameters
    assert_same(attention, theirs, {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"})
    assert (attention.rope.theta, ours.context) == (
        rope["rope_theta"], theirs.max_position_embeddings
    )  # fmt: skip
    assert (rope["partial_rotary_factor"], attention.rope.dims) == (0.25, attention.head_dim // 4)
    if model_type != "qwen3_5_text":
        assert_same(ours.layers[0].parts[1], theirs, MIXED)
        assert ours.layers[0].parts[1].routing.renormalized


HYBRID = {"vocab_size": 67, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 40}  # fmt: skip
CHOOSING = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}


def test_layers_that_predict_further_tokens_are_dropped():
    config = read("deepseek_v3", **ROPED)
    names = ["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_a_proj.weight"]
    found = plan(names, find("deepseek_v3", "safetensors").rules_hf(config), config)
    assert [name for name, reason in found.dropped if "multi-token" in reason] == names


def test_rotated_halves_are_refused():
    with pytest.raises(UnsupportedModel, match="rope_interleave"):
        read("deepseek_v3", **ROPED, rope_interleave=False)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "internlm3"])
def test_keys_that_are_absent_have_transformers_defaults(model_type):
    """Only the sizes are given; what is left out has to mean what it means to transformers."""
    raw = GPT2 | {"vocab_size": 60000} if model_type == "gpt2" else {
        "vocab_size": 60000, "hidden_size": 192, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 32,
    }  # fmt: skip
    ours, theirs = read(model_type, **raw), AutoConfig.for_model(model_type, **raw)
    layer = ours.layers[0]
    mixer, mlp = layer.attention, layer.parts[-1]
    assert_same(ours, theirs, {
        "head.tied": "tie_word_embeddings", "context": "max_position_embeddings",
        "bos": "bos_token_id",
    })  # fmt: skip
    assert ours.eos == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    if model_type == "gpt2":
        assert (mlp.hidden, mlp.activation) == (4 * theirs.n_embd, "gelu_tanh")
        assert ours.final_norm.eps == theirs.layer_norm_epsilon
        return
    assert mixer.kv_heads == theirs.num_key_value_heads
    assert mixer.head_dim == theirs.head_dim if model_type != "qwen2" else 6
    assert mixer.rope.theta == theirs.rope_parameters["rope_theta"]
    assert mixer.scores.window == (4096 if model_type == "mistral" else None)
    assert (ours.final_norm.eps, mlp.activation) == (theirs.rms_norm_eps, theirs.hidden_act)


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
