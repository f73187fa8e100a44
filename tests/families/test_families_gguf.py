"""GGUF metadata: what it means, what is ignored, and what an architecture says beside it.

That names, rows and biases are those of llama.cpp's converter, `test_gguf_parity` shows.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from llmcli.checkpoints import open_checkpoint
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families import UnpairRows, find, plan
from llmcli.families.read import GGUF_WINDOWS, gguf_ignored
from llmcli.loading.load import check_loadable
from llmcli.loading.prepared import prepare
from llmcli.parts.attention.config import FrequencyFactors
from llmcli.parts.delta.config import DeltaConfig
from llmcli.parts.experts.config import RoutingConfig, SharedConfig
from llmcli.parts.norm.config import NormConfig

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
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    return find(arch, "gguf").from_gguf(metadata(arch, **changes), tensors)


def test_other_metadata():
    one = config(
        attention__key_length=10, attention__value_length=12, tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7,
        tokenizer__ggml__eom_token_id=2,
    )  # fmt: skip
    mixer = one.layers[0].attention
    assert (mixer.head_dim, mixer.value_dim, mixer.rope.dims) == (10, 12, 10)
    assert mixer.scale == 10**-0.5
    assert (one.bos, one.eos) == (1, (2, 7))
    assert config(attention__head_count_kv=None).layers[0].attention.kv_heads == 6
    assert config("gpt2").layers[0].parts[-1].activation == "gelu_tanh"
    assert config("gpt2").embedding.positions == 96


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


def mixture(arch="llama", *names, **changes):
    """The feed-forward of the last layer, where the file has a router in all of them."""
    return with_experts(arch, *names, **changes).layers[-1].parts[-1]


def with_experts(arch, *names, **changes):
    given = metadata(arch, **(EXPERTS | changes))
    names = ("ffn_gate_inp.weight", *names)
    names = [f"blk.{layer}.{name}" for layer in range(3) for name in names]
    tensors = {name: SimpleNamespace(shape=(8, 24)) for name in names}
    tensors["token_embd.weight"] = SimpleNamespace(shape=(67, 24))
    return find(arch, "gguf").from_gguf(given, tensors)


def test_what_an_architecture_says_of_its_experts():
    """What its converter leaves out is the architecture's own."""
    assert mixture().routing == RoutingConfig(chosen=2, renormalized=True)
    assert mixture().hidden == 40
    assert mixture("olmoe").routing == RoutingConfig(chosen=2)
    qwen2 = mixture("qwen2moe", expert_feed_forward_length=12)
    assert (qwen2.hidden, qwen2.shared) == (12, SharedConfig(hidden=40, weighed=True))
    assert not qwen2.routing.renormalized
    assert mixture("qwen2moe").hidden == 20
    qwen3 = mixture("qwen3moe", attention__key_length=8, attention__value_length=8)
    assert qwen3.routing == RoutingConfig(chosen=2, renormalized=True)
    assert qwen3.shared is None
    glm = mixture(
        "glm4moe", "exp_probs_b.bias", expert_gating_func=2, expert_weights_norm=True,
        expert_weights_scale=2.5, expert_shared_count=3, expert_feed_forward_length=10,
        expert_group_count=4, expert_group_used_count=1,
    )  # fmt: skip
    assert glm.shared == SharedConfig(hidden=30)
    assert glm.routing == RoutingConfig(
        chosen=2, scores="sigmoid", renormalized=True, scale=2.5, correction=True, groups=4,
        kept_groups=1,
    )  # fmt: skip
    assert mixture(expert_gating_func=3).routing.scores == "softmax of the chosen"


DEEPSEEK = {
    "attention__head_count_kv": 1, "attention__key_length": 13, "attention__value_length": 8,
    "attention__key_length_mla": 9, "attention__value_length_mla": 5,
    "attention__kv_lora_rank": 8, "rope__dimension_count": 4, "expert_feed_forward_length": 10,
    "expert_shared_count": 2, "expert_group_count": 4, "expert_group_used_count": 2,
}  # fmt: skip


def test_files_of_deepseek_2_are_told_from_those_of_3():
    """Old ones say nothing of the function: those with a correction are of 3."""
    second = mixture("deepseek2", expert_weights_scale=16.0, **DEEPSEEK)
    assert (second.hidden, second.shared) == (10, SharedConfig(hidden=20))
    assert second.routing == RoutingConfig(
        chosen=2, scale=16.0, groups=4, kept_groups=2, group_best=1
    )
    assert with_experts("deepseek2", **DEEPSEEK).model_type == "deepseek_v2"
    same = mixture("deepseek2", expert_gating_func=1, **DEEPSEEK).routing
    assert same == replace(second.routing, scale=1.0)
    for function in ({}, {"expert_gating_func": 2}):
        said = DEEPSEEK | function | {"expert_weights_norm": True}
        model = with_experts("deepseek2", "exp_probs_b.bias", **said)
        assert model.model_type == "deepseek_v3"
        third = model.layers[-1].parts[-1]
        assert third.routing == RoutingConfig(
            chosen=2, scores="sigmoid", renormalized=True, correction=True, groups=4, kept_groups=2
        )


DELTA = {
    "attention__key_length": 8, "attention__value_length": 8, "ssm__conv_kernel": 3,
    "ssm__state_size": 5, "ssm__group_count": 2, "ssm__time_step_rank": 4, "ssm__inner_size": 24,
}  # fmt: skip


def hybrid(arch="qwen35", **changes):
    """A model of gated DeltaNet and attention, and which of its layers attend."""
    tensors = {"token_embd.weight": SimpleNamespace(shape=(67, 24))}
    if arch != "qwen35":
        tensors |= {f"blk.{i}.ffn_gate_inp.weight": SimpleNamespace(shape=(8, 24)) for i in (0, 2)}
    model = find(arch, "gguf").from_gguf(metadata(arch, **(DELTA | changes)), tensors)
    return model, [layer.attention is not None for layer in model.layers]


def test_sizes_of_gated_deltanet():
    model, attends = hybrid(full_attention_interval=3)
    assert attends == [False, False, True]
    delta, attention = model.layers[0].parts[0], model.layers[2].attention
    norm = NormConfig(kind="rms", eps=1e-5)
    assert delta == DeltaConfig(
        heads=4, key_heads=2, key_dim=5, value_dim=6, length=3, norm=norm, tiled=True
    )
    assert (attention.gated, attention.qk_norm) == (True, replace(norm, offset=1.0))
    assert model.final_norm == model.layers[0].sublayers[0][0].pre_norm == attention.qk_norm


@pytest.mark.parametrize(("arch", "changes", "tiled"), [
    ("qwen35", {}, True), ("qwen3next", EXPERTS, False), ("qwen35moe", EXPERTS, True),
    ("qwen35", {"ssm__group_count": 4}, False), ("qwen35", {"ssm__group_count": 1}, False),
    ("qwen35moe", EXPERTS | {"ssm__v_head_reordered": False}, False),
    ("qwen3next", EXPERTS | {"ssm__v_head_reordered": True}, True),
])  # fmt: skip
def test_orders_of_value_heads(arch, changes, tiled):
    """llama.cpp's go by the architecture; Ollama says it. Of one key head there is one order."""
    assert hybrid(arch, **changes)[0].layers[0].parts[0].tiled == tiled


@pytest.mark.parametrize(("changes", "attends"), [
    ({"block_count": 5}, [False, False, False, True, False]),
    ({"full_attention_interval": 2}, [False, True, False]),
    ({"attention__recurrent_layers": [False, True, False]}, [True, False, True]),
    ({"attention__head_count_kv": [0, 2, 0]}, [False, True, False]),
    ({"attention__recurrent_layers": [True, False, True, False], "block_count": 4,
      "nextn_predict_layers": 1}, [False, True, False]),
])  # fmt: skip
def test_which_layers_attend(changes, attends):
    assert hybrid(**changes)[1] == attends


def test_a_file_of_experts_alone_says_no_other_size():
    for hidden in (None, 0):
        model, _ = hybrid(
            "qwen35moe", feed_forward_length=hidden, expert_feed_forward_length=7,
            expert_shared_feed_forward_length=9, **EXPERTS,
        )  # fmt: skip
        experts = model.layers[0].parts[1]
        assert (experts.hidden, experts.shared) == (7, SharedConfig(hidden=9, weighed=True))
        assert experts.routing == RoutingConfig(chosen=2, renormalized=True)


@pytest.mark.parametrize("arch", ["glm4moe", "deepseek2", "qwen35", "qwen35moe"])
def test_layers_that_predict_further_on_are_none(arch):
    more = DEEPSEEK if arch == "deepseek2" else DELTA if arch.startswith("qwen") else {}
    given = metadata(arch, block_count=4, nextn_predict_layers=1, **more)
    tensors = {"token_embd.weight": SimpleNamespace(shape=(67, 24))}
    model = find(arch, "gguf").from_gguf(given, tensors)
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
    told = gguf_ignored(metadata(arch, **keys), arch, reads=GGUF_WINDOWS)
    assert not any("sliding" in key for key in told)


@pytest.mark.real
def test_the_real_file(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    prepared = prepare(checkpoint)
    check_loadable(prepared)
    assert len(prepared.plan.loads) == len(checkpoint.tensors) == 272
    model = prepared.config
    mixer = model.layers[29].attention
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim) == (9, 3, 64)
    assert mixer.rope.theta == 100000.0
    assert (model.vocab, model.width, model.context) == (49152, 576, 8192)
    assert (model.bos, model.eos, model.head.tied) == (1, (2,), True)
    assert find("llama", "gguf").name == "llama"


def test_the_largest_gemma_3_scales_its_queries_by_the_width_of_a_head_in_the_model():
    """Its files do not say so: of 62 layers, 24 / 6 instead of the size of a head."""
    scales = []
    for layers in (61, 62):
        given = metadata("gemma3", block_count=layers, attention__key_length=10,
                         attention__value_length=10)  # fmt: skip
        tensors = {"token_embd.weight": SimpleNamespace(shape=(67, 24))}
        model = find("gemma3", "gguf").from_gguf(given, tensors)
        scales.append(model.layers[0].attention.scale)
    assert scales == [10**-0.5, 4**-0.5]
