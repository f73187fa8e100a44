"""GGUF metadata: what it means, what is ignored, and what an architecture says beside it.

That names, rows and biases are those of llama.cpp's converter, `test_gguf_parity` shows.
"""

from types import SimpleNamespace

import pytest

from llmcli.config.attention import FrequencyFactors
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families import find
from llmcli.families.read import GGUF_READS, gguf_ignored
from llmcli.families.rules import UnpairRows, plan

SIZES = {
    "block_count": 3, "context_length": 96, "embedding_length": 24, "feed_forward_length": 40,
    "attention.head_count": 6, "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
EMBEDDING = {"token_embd.weight": (67, 24)}


def metadata(arch, **changes):
    sizes = dict(SIZES)
    if arch == "gpt2":
        sizes["attention.layer_norm_epsilon"] = sizes.pop("attention.layer_norm_rms_epsilon")
        del sizes["attention.head_count_kv"]
    if arch == "qwen3":
        sizes |= {"attention.key_length": 8, "attention.value_length": 8}
    sizes |= {key.replace("__", "."): value for key, value in changes.items()}
    return {"general.architecture": arch} | {
        key if key.startswith("tokenizer") else f"{arch}.{key}": value
        for key, value in sizes.items()
        if value is not None
    }


def test_sizes_that_differ_by_layer():
    """Some files give an array of heads; each layer's rows are unpaired by its own heads."""
    model = config(attention__head_count_kv=[2, 1, 2], feed_forward_length=[40, 40, 16])
    assert [layer.attention.kv_heads for layer in model.layers] == [2, 1, 2]
    assert [layer.parts[-1].hidden for layer in model.layers] == [40, 40, 16]
    names = ["blk.1.attn_k.weight", "blk.2.attn_k.weight"]
    first, second = plan(names, find("llama", "gguf").rules_gguf(model), model).loads
    assert (first.ops, second.ops) == ((UnpairRows(1, 4),), (UnpairRows(2, 4),))


def test_frequency_factors_are_read_into_the_configuration_and_dropped_by_name():
    model = config(shapes=EMBEDDING | {"rope_freqs.weight": (2,)})
    source = "rope_freqs.weight"
    assert model.layers[2].attention.rope.scaling == FrequencyFactors(source=source)
    ((name, reason),) = plan([source], find("llama", "gguf").rules_gguf(model), model).dropped
    assert (name, "frequency factors" in reason) == (source, True)


def config(arch="llama", shapes=EMBEDDING, **changes):
    """Our configuration of a file with tensors of these shapes."""
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    return find(arch, "gguf").from_gguf(metadata(arch, **changes), tensors)


def test_vocabulary_without_an_embedding_is_the_tokenizers():
    named = {"tokenizer__ggml__tokens": ["a", "b", "c"]}
    assert config(shapes={}, **named).vocab == 3
    assert config(shapes={}, vocab_size=5, **named).vocab == 5
    with pytest.raises(CheckpointError, match="vocab_size"):
        config(shapes={})
    with pytest.raises(CheckpointError, match="token_embd"):
        config(shapes={"token_embd.weight": (0, 24)})


@pytest.mark.parametrize(("changes", "part"), [
    ({"attention__causal": False}, "bidirectional attention"),
    ({"expert_count": 8}, "mixture of experts"),
])  # fmt: skip
def test_metadata_that_asks_for_another_model(changes, part):
    arch = "qwen3" if "expert_count" in changes else "llama"
    with pytest.raises(UnsupportedModel, match=f"is not supported: it needs `{part}`"):
        find(arch, "gguf").from_gguf(metadata(arch, **changes), {})
    neutral = {key: key == "attention__causal" for key in changes}
    assert config(**neutral) == config()


@pytest.mark.parametrize("changes", [
    {"logit_scale": 0.5}, {"final_logit_softcapping": 30.0}, {"attention__scale": 0.1},
    {"use_parallel_residual": True}, {"attention__clamp_kqv": 3.0}, {"residual_scale": 2.0},
    {"attention__max_alibi_bias": 8.0}, {"attn_logit_softcapping": 50.0},
])  # fmt: skip
def test_metadata_that_llama_cpp_reads_for_others_is_ignored_and_told(changes):
    assert config(**changes) == config()
    (key,) = (name.replace("__", ".") for name in changes)
    told = gguf_ignored(metadata("llama", **changes), "llama", reads=())
    assert list(told) == [f"llama.{key}"]
    assert gguf_ignored(metadata("llama", **changes), "llama", reads=(key,)) == {}


EXPERTS = {"expert_count": 8, "expert_used_count": 2}


def with_experts(arch="llama", names=(), **changes):
    """A model with a router in all layers, and with more tensors."""
    leaves = ("ffn_gate_inp.weight", *names)
    names = [f"blk.{layer}.{leaf}" for layer in range(3) for leaf in leaves]
    own = EXPERTS | (DEEPSEEK if arch == "deepseek2" else {}) | changes
    return config(arch, EMBEDDING | dict.fromkeys(names, (8, 24)), **own)


DEEPSEEK = {
    "attention__head_count_kv": 1, "attention__key_length": 13, "attention__value_length": 8,
    "attention__key_length_mla": 9, "attention__value_length_mla": 5,
    "attention__kv_lora_rank": 8, "rope__dimension_count": 4, "expert_feed_forward_length": 10,
    "expert_shared_count": 2, "expert_group_count": 4, "expert_group_used_count": 2,
}  # fmt: skip


DELTA = {
    "attention__key_length": 8, "attention__value_length": 8, "ssm__conv_kernel": 3,
    "ssm__state_size": 5, "ssm__group_count": 2, "ssm__time_step_rank": 4, "ssm__inner_size": 24,
}  # fmt: skip


def hybrid(arch="qwen35", **changes):
    """A model of gated DeltaNet and attention."""
    if arch == "qwen35":
        return config(arch, **DELTA | changes)
    routers = {f"blk.{i}.ffn_gate_inp.weight": (8, 24) for i in (0, 2)}
    return config(arch, EMBEDDING | routers, **DELTA | EXPERTS | changes)


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


def nemotron(changes):
    """Nemotron-H with experts."""
    keys = {
        key if "general" in key else f"nemotron_h_moe.{key}": one
        for key, one in (NEMOTRON | changes).items()
    }
    return find("nemotron_h_moe", "gguf").from_gguf(keys, dict.fromkeys(TENSORS))


@pytest.mark.parametrize("arch", ["glm4moe", "deepseek2", "qwen35", "qwen35moe"])
def test_layers_that_predict_further_on_are_none(arch):
    more = DEEPSEEK if arch == "deepseek2" else DELTA if arch.startswith("qwen") else {}
    model = config(arch, block_count=4, nextn_predict_layers=1, **more)
    assert len(model.layers) == 3
    rules = find(arch, "gguf").rules_gguf(model)
    found = plan(["blk.3.nextn.eh_proj.weight", "blk.3.attn_q.weight", "blk.2.x"], rules, model)
    assert [name for name, reason in found.dropped if "multi-token" in reason] == [
        "blk.3.nextn.eh_proj.weight", "blk.3.attn_q.weight",
    ]  # fmt: skip
    assert found.unexpected == ("blk.2.x",)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_metadata_that_llama_cpp_does_not_read_has_no_effect_and_is_reported(arch):
    """It reads them for other architectures: a file that has them has always run without them."""
    given = {
        "attention.sliding_window": 5, "rope.scaling.yarn_ext_factor": 0.5,
        "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
        "rope.scaling.yarn_log_multiplier": 0.5,
    }  # fmt: skip
    keys = {key.replace(".", "__"): value for key, value in given.items()}
    for kind in ("yarn", "linear"):
        scaling = {"rope__scaling__type": kind, "rope__scaling__factor": 4.0}
        assert config(arch, **scaling, **keys) == config(arch, **scaling)
    told = gguf_ignored(metadata(arch, **keys), arch, reads=())
    assert told == {f"{arch}.{key}": str(value) for key, value in given.items()}
    assert gguf_ignored(metadata(arch), arch, reads=()) == {}
    told = gguf_ignored(metadata(arch, **keys), arch, reads=GGUF_READS["windows"])
    assert not any("sliding" in key for key in told)


def test_the_largest_gemma_3_scales_its_queries_by_the_width_of_a_head_in_the_model():
    """Its files do not say so: of 62 layers, 24 / 6 instead of the size of a head."""
    sizes = {"attention__key_length": 10, "attention__value_length": 10}
    models = [config("gemma3", block_count=layers, **sizes) for layers in (61, 62)]
    assert [one.layers[0].attention.scores.scale for one in models] == [10**-0.5, 4**-0.5]
