"""config.json and tensor names as transformers itself writes them, for every type and variant."""

import json

import pytest
import torch
from families_ledger import dry_run
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from zoo import TYPES, ZOO, Variant

from llmcli.anatomy import states
from llmcli.errors import UnsupportedModel
from llmcli.families import Rename, Rows, Transpose, find, plan
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.latent.config import LatentConfig

ROPED = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "bos_token_id": 3, "eos_token_id": [4, 5],
}  # fmt: skip
GPT2 = {"vocab_size": 67, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 96}
# a row for each configuration: not for what is stored or edited otherwise
CASES = [one for one in ZOO if not one.edit and one.shard == Variant.shard]
every_case = pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)


def written(model_type, tmp_path, **settings):
    """The config.json that transformers saves, read back as JSON, and its own view of it."""
    config = AutoConfig.for_model(model_type, **settings)
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text()), config


def shapes_of(model_class, config):
    with torch.device("meta"):
        model = model_class.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@every_case
def test_names_of_a_real_model_are_used_and_fill_every_parameter(one, tmp_path):
    model_type = one.model_type
    raw, config = written(**one.settings, tmp_path=tmp_path)
    shapes = shapes_of(AutoModelForCausalLM, config)
    ledger = dry_run(model_type, "safetensors", raw, shapes)
    assert ledger.clean, (ledger.missing, ledger.misshapen, ledger.plan.unexpected)
    reasons = dict(ledger.plan.dropped)
    if config.tie_word_embeddings:
        assert "tied" in reasons.pop("lm_head.weight")
    assert not reasons


@every_case
def test_values_are_those_that_transformers_reads(one, tmp_path):
    model_type, modules = one.model_type, TYPES[one.model_type].modules
    raw, theirs = written(**one.settings, tmp_path=tmp_path)
    ours = find(model_type, "safetensors").from_hf(raw)
    assert (ours.vocab, ours.width) == (theirs.vocab_size, theirs.hidden_size)
    # Mamba-2 has none
    assert ours.context == getattr(theirs, "max_position_embeddings", 1 << 20)
    assert len(ours.layers) == theirs.num_hidden_layers
    assert ours.head.tied == theirs.tie_word_embeddings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    blocks = next(part for part in model.base_model.children() if isinstance(part, ModuleList))
    for layer, block in zip(ours.layers, blocks, strict=True):
        norms = [part for name, part in block.named_children() if "norm" in name or "ln_" in name]
        eps = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
        branches = [norm for one in layer.branches for norm in (one.pre_norm, one.post_norm)]
        assert {norm.eps for norm in branches if norm} == {ours.final_norm.eps} == eps
        names = {"gpt2": "attn", "gpt_neox": "attention"}
        attention = getattr(block, names.get(model_type, "self_attn"), None)
        if model_type == "nemotron_h" and block.block_type == "full_attention":
            attention = block.mixer
        latent = layer.parts[0]
        if isinstance(latent, LatentConfig):
            check_latent(latent, attention)
            continue
        assert (layer.attention is None) == (attention is None)
        if attention is None:
            continue
        head_dim = attention.head_size if model_type == "gpt_neox" else attention.head_dim
        assert layer.attention.head_dim == layer.attention.value_dim == head_dim
        assert layer.attention.scale == attention.scaling
        window = getattr(attention, "sliding_window", getattr(theirs, "sliding_window", None))
        window = window if getattr(attention, "is_sliding", True) else None
        assert layer.attention.window == (window or None)  # 0 where it is not used
        q_norm = modules.get("attn.q_norm", "").rpartition(".")[2]
        assert (layer.attention.qk_norm is not None) == hasattr(attention, q_norm or "q_norm")


def check_latent(ours, theirs):
    sizes = (ours.heads, ours.content, ours.rope.dims, ours.value_dim, ours.rank, ours.query_rank)
    assert sizes == (
        theirs.num_heads, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim,
        theirs.kv_lora_rank, theirs.q_lora_rank,
    )  # fmt: skip
    assert ours.scale == pytest.approx(theirs.scaling, rel=1e-15)
    norms = [theirs.kv_a_layernorm] + [theirs.q_a_layernorm] * (ours.query_rank is not None)
    assert {ours.norm.eps} == {norm.variance_epsilon for norm in norms}
    assert ours.bias == (theirs.kv_a_proj_with_mqa.bias is not None)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_absent_keys_of_latent_attention_have_transformers_defaults(model_type):
    raw = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 1,
           "num_attention_heads": 4}  # fmt: skip
    dense = {} if model_type == "glm4_moe_lite" else {"first_k_dense_replace": 1}
    ours = find(model_type, "safetensors").from_hf({"model_type": model_type, **raw, **dense})
    theirs = AutoConfig.for_model(model_type, **raw)
    latent = ours.layers[0].parts[0]
    assert (ours.context, ours.final_norm.eps) == (
        theirs.max_position_embeddings, theirs.rms_norm_eps,
    )  # fmt: skip
    assert (latent.content, latent.rope.dims, latent.value_dim, latent.rank, latent.query_rank) == (
        theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim, theirs.kv_lora_rank,
        theirs.q_lora_rank,
    )  # fmt: skip
    ends = (theirs.bos_token_id, (theirs.eos_token_id,))
    assert (ours.bos, ours.eos) == ends


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_absent_keys_of_experts_have_transformers_defaults(model_type):
    raw = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_experts_per_tok": 4}  # fmt: skip
    if model_type != "deepseek_v2":  # the only one that says nothing of it
        del raw["num_experts_per_tok"]
    layers = find(model_type, "safetensors").from_hf({"model_type": model_type, **raw}).layers
    theirs = AutoConfig.for_model(model_type, **raw)
    first = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe_lite": 1}[model_type]
    kinds = [isinstance(layer.parts[1], ExpertsConfig) for layer in layers]
    assert kinds == [at >= first for at in range(4)]
    ours = layers[-1].parts[1]
    assert (ours.experts, ours.hidden) == (theirs.n_routed_experts, theirs.moe_intermediate_size)
    assert ours.shared.hidden == theirs.n_shared_experts * theirs.moe_intermediate_size
    routing = ours.routing
    assert (routing.chosen, routing.scale, routing.renormalized) == (
        theirs.num_experts_per_tok, theirs.routed_scaling_factor, theirs.norm_topk_prob,
    )  # fmt: skip
    assert (routing.groups, routing.kept_groups) == (theirs.n_group or 1, theirs.topk_group or 1)


HYBRIDS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_absent_keys_of_gated_deltanet_have_transformers_defaults(model_type):
    raw = {"vocab_size": 67, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 16}
    if model_type == "qwen3_5_text":
        raw["intermediate_size"] = 40
    ours = find(model_type, "safetensors").from_hf({"model_type": model_type, **raw})
    theirs = AutoConfig.for_model(model_type, **raw)
    kinds = [one.attention is None for one in ours.layers]
    assert kinds == [kind == "linear_attention" for kind in theirs.layer_types]
    delta, attention = ours.layers[0].parts[0], ours.layers[3].attention
    assert (delta.heads, delta.key_heads, delta.key_dim, delta.value_dim, delta.length) == (
        theirs.linear_num_value_heads, theirs.linear_num_key_heads, theirs.linear_key_head_dim,
        theirs.linear_value_head_dim, theirs.linear_conv_kernel_dim,
    )  # fmt: skip
    assert (attention.kv_heads, attention.head_dim, attention.rope.theta, ours.context) == (
        theirs.num_key_value_heads, theirs.head_dim, theirs.rope_parameters["rope_theta"],
        theirs.max_position_embeddings,
    )  # fmt: skip
    share = theirs.rope_parameters["partial_rotary_factor"]
    assert (share, attention.rope.dims) == (0.25, attention.head_dim // 4)
    if model_type == "qwen3_5_text":
        return
    experts = ours.layers[0].parts[1]
    assert (experts.experts, experts.hidden, experts.shared.hidden, experts.routing.chosen) == (
        theirs.num_experts, theirs.moe_intermediate_size, theirs.shared_expert_intermediate_size,
        theirs.num_experts_per_tok,
    )  # fmt: skip
    assert experts.routing.renormalized


HYBRID = {"vocab_size": 67, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 40}  # fmt: skip


def test_larger_qwen_3_5_always_renormalize():
    """transformers reads neither of these keys of them."""
    said = {"norm_topk_prob": False, "mlp_only_layers": [0]}
    raw = {"model_type": "qwen3_5_moe_text"} | HYBRID | said
    layers = find("qwen3_5_moe_text", "safetensors").from_hf(raw).layers
    assert all(layer.parts[1].routing.renormalized for layer in layers)


CHOOSING = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(("limit", "clamp"), [(7.0, 7.0), (3, 3.0), (None, 7.0)])
def test_gates_of_gpt_oss_are_clamped_as_it_says(limit, clamp):
    raw = TYPES["gpt_oss"].base | {"model_type": "gpt_oss", "swiglu_limit": limit}
    ffn = find("gpt_oss", "safetensors").from_hf(raw).layers[1].parts[-1]
    assert (ffn.clamp.limit, ffn.clamp.offset, ffn.activation) == (clamp, 1.0, "quick_gelu")


def test_every_so_many_layers_have_experts():
    raw = ROPED | CHOOSING | {"model_type": "deepseek_v2", "num_hidden_layers": 5}
    more = {"first_k_dense_replace": 1, "moe_layer_freq": 2}
    layers = find("deepseek_v2", "safetensors").from_hf(raw | more).layers
    assert [isinstance(layer.parts[1], ExpertsConfig) for layer in layers] == [
        False, False, True, False, True,
    ]  # fmt: skip


def test_layers_that_predict_further_tokens_are_dropped():
    raw = ROPED | {"model_type": "deepseek_v3"}
    config = find("deepseek_v3", "safetensors").from_hf(raw)
    names = ["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_a_proj.weight"]
    found = plan(names, find("deepseek_v3", "safetensors").rules_hf(config), config)
    assert [name for name, reason in found.dropped if "multi-token" in reason] == names


def test_rotated_halves_are_refused():
    raw = ROPED | {"model_type": "deepseek_v3", "rope_interleave": False}
    with pytest.raises(UnsupportedModel, match="rope_interleave"):
        find("deepseek_v3", "safetensors").from_hf(raw)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_keys_that_are_absent_have_transformers_defaults(model_type):
    """Only the sizes are given; what is left out has to mean what it means to transformers."""
    if model_type == "gpt2":
        raw = dict(GPT2)
    else:
        raw = {key: ROPED[key] for key in ROPED if not key.endswith("_token_id")}
        raw = {key: raw[key] for key in raw if key != "max_position_embeddings"}
        raw |= {"hidden_size": 192, "num_attention_heads": 32}
        del raw["num_key_value_heads"]
    raw["vocab_size"] = 60000
    ours = find(model_type, "safetensors").from_hf({"model_type": model_type, **raw})
    theirs = AutoConfig.for_model(model_type, **raw)
    mixer = ours.layers[0].attention
    assert ours.head.tied == theirs.tie_word_embeddings
    assert ours.context == theirs.max_position_embeddings
    assert (ours.bos, ours.eos) == (
        theirs.bos_token_id, () if theirs.eos_token_id is None else (theirs.eos_token_id,)
    )
    if model_type == "gpt2":
        assert ours.layers[0].parts[-1].hidden == 4 * theirs.n_embd
        assert ours.layers[0].parts[-1].activation == "gelu_tanh"
        assert ours.final_norm.eps == theirs.layer_norm_epsilon
        return
    assert mixer.kv_heads == theirs.num_key_value_heads
    assert mixer.head_dim == theirs.head_dim if model_type != "qwen2" else 6
    assert mixer.rope.theta == theirs.rope_parameters["rope_theta"]
    assert mixer.window == (4096 if model_type == "mistral" else None)
    assert ours.final_norm.eps == theirs.rms_norm_eps
    assert ours.layers[0].parts[-1].activation == theirs.hidden_act


def test_absent_and_null_key_value_heads_differ_where_transformers_says_so():
    raw = {"model_type": "mistral", **ROPED} | {"num_attention_heads": 24, "head_dim": 4}
    del raw["num_key_value_heads"]
    from_hf = find("mistral", "safetensors").from_hf
    assert from_hf(raw).layers[0].attention.kv_heads == 8
    assert from_hf(raw | {"num_key_value_heads": None}).layers[0].attention.kv_heads == 24


def test_windows_by_layer():
    raw = {"model_type": "qwen3", **ROPED, "head_dim": 8, "sliding_window": 5}
    from_hf = find("qwen3", "safetensors").from_hf

    def windows(**settings):
        return [layer.attention.window for layer in from_hf(raw | settings).layers]

    assert windows() == [None, None, None]
    assert windows(use_sliding_window=True) == [None, None, None]  # from layer 28 on
    assert windows(use_sliding_window=True, max_window_layers=2) == [None, None, 5]
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, layer_types=mixed) == [5, None, 5]


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
def test_gemma_4s_published_sizes(size, written_by, tmp_path):
    """Shared layers keep nothing; old files hold keys and values of theirs, which are dropped."""
    settings, cached = GEMMA4[size]
    raw, config = written("gemma4_text", tmp_path, **settings)
    if written_by == "the first files":
        raw = {key: value for key, value in raw.items() if key != "per_layer_config"} | settings
    shapes = shapes_of(AutoModelForCausalLM, config)
    shared = settings.get("num_kv_shared_layers", 0)
    layer = "model.layers.{}.self_attn.{}.weight"
    last = len(find("gemma4_text", "safetensors").from_hf(raw).layers) - 1
    unused = [layer.format(last, name) for name in ("k_proj", "v_proj", "k_norm")] if shared else []
    ledger = dry_run("gemma4_text", "safetensors", raw, shapes | dict.fromkeys(unused, (1, 1)))
    assert ledger.clean, (ledger.missing, ledger.misshapen, ledger.plan.unexpected)
    assert dict(ledger.plan.dropped).keys() == {"lm_head.weight", *unused}
    config = find("gemma4_text", "safetensors").from_hf(raw)
    held = states(config, batch=1, capacity=1, dtype="bfloat16")
    assert sum(spec.bytes for spec in held) == cached
    kept = [spec.layer for spec in held]
    assert sorted({*kept}) == list(range(len(config.layers) - shared))


def test_gpt2_scales():
    from_hf = find("gpt2", "safetensors").from_hf

    def scales(**settings):
        return [layer.attention.scale for layer in from_hf(GPT2 | settings).layers]

    assert scales() == [0.5, 0.5, 0.5]
    assert scales(scale_attn_weights=False) == [1.0, 1.0, 1.0]
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.5, 0.25, 0.5 / 3]


def test_shard_names_are_the_same_names(tmp_path):
    config = AutoConfig.for_model("qwen3", **ROPED | {"head_dim": 8})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    raw = json.loads((tmp_path / "config.json").read_text())
    shapes = shapes_of(AutoModelForCausalLM, config)
    assert set(index["weight_map"]) == set(shapes)
    ledger = dry_run("qwen3", "safetensors", raw, {n: shapes[n] for n in index["weight_map"]})
    assert ledger.clean


@pytest.mark.parametrize(("model_type", "settings"), [("gpt2", GPT2), ("llama", ROPED)])
def test_names_of_a_bare_decoder_have_no_prefix(model_type, settings, tmp_path):
    raw, config = written(model_type, tmp_path, **settings | {"tie_word_embeddings": True})
    shapes = shapes_of(AutoModel, config)
    assert not any(name.startswith(("transformer.", "model.")) for name in shapes)
    assert dry_run(model_type, "safetensors", raw, shapes).clean


def test_buffers_of_old_checkpoints_are_dropped_with_a_reason(tmp_path):
    raw, config = written("gpt2", tmp_path, **GPT2)
    shapes = shapes_of(AutoModelForCausalLM, config)
    shapes |= {"transformer.h.2.attn.bias": (1, 1, 96, 96), "h.0.attn.masked_bias": ()}
    ledger = dry_run("gpt2", "safetensors", raw, shapes)
    assert ledger.clean
    assert "mask" in dict(ledger.plan.dropped)["transformer.h.2.attn.bias"]
    assert "mask" in dict(ledger.plan.dropped)["h.0.attn.masked_bias"]
    raw, config = written("llama", tmp_path, **ROPED)
    shapes = shapes_of(AutoModelForCausalLM, config)
    shapes["model.layers.1.self_attn.rotary_emb.inv_freq"] = (2,)
    ledger = dry_run("llama", "safetensors", raw, shapes)
    assert ledger.clean
    assert "computed" in dict(ledger.plan.dropped)["model.layers.1.self_attn.rotary_emb.inv_freq"]


@pytest.mark.parametrize(("change", "missing", "unexpected"), [
    ({"remove": "model.layers.1.self_attn.k_proj.weight"}, ["blocks.1.attn.W_k"], []),
    ({"remove": "lm_head.weight"}, ["head.W"], []),
    ({"add": "model.layers.3.input_layernorm.weight"}, [], "the added one"),
    ({"add": "model.layers.01.input_layernorm.weight"}, [], "the added one"),
    ({"add": "score.weight"}, [], "the added one"),
    ({"add": "model.layers.0.self_attn.q_proj.weight_scale"}, [], "the added one"),
])  # fmt: skip
def test_planted_faults_show(change, missing, unexpected, tmp_path):
    raw, config = written("llama", tmp_path, **ROPED)
    shapes = shapes_of(AutoModelForCausalLM, config)
    if "remove" in change:
        del shapes[change["remove"]]
    else:
        shapes[change["add"]] = (24,)
        unexpected = [change["add"]]
    ledger = dry_run("llama", "safetensors", raw, shapes)
    assert (ledger.missing, list(ledger.plan.unexpected)) == (missing, unexpected)


def test_a_wrong_shape_and_a_doubled_name_show(tmp_path):
    raw, config = written("llama", tmp_path, **ROPED)
    shapes = shapes_of(AutoModelForCausalLM, config)
    shapes["model.norm.weight"] = (25,)
    shapes["norm.weight"] = (24,)
    ledger = dry_run("llama", "safetensors", raw, shapes)
    assert ledger.misshapen == [("ln_final.w", (24,), (25,))]
    assert ledger.doubled == ["ln_final.w"]


def test_fused_rows_come_after_the_transpose():
    """`c_attn.weight` is `[D, 3D]`: transposed first, and only then are its rows q, k and v."""
    config = find("gpt2", "safetensors").from_hf(GPT2)
    rules = find("gpt2", "safetensors").rules_hf(config)
    loads = plan(["h.1.attn.c_attn.weight", "h.1.attn.c_attn.bias"], rules, config).loads
    assert [(load.target, load.ops) for load in loads] == [
        ("blocks.1.attn.W_q", (Transpose(), Rows(0, 24))),
        ("blocks.1.attn.W_k", (Transpose(), Rows(24, 48))),
        ("blocks.1.attn.W_v", (Transpose(), Rows(48, 72))), ("blocks.1.attn.b_q", (Rows(0, 24),)),
        ("blocks.1.attn.b_k", (Rows(24, 48),)), ("blocks.1.attn.b_v", (Rows(48, 72),)),
    ]  # fmt: skip
    assert all(isinstance(rule, Rename) for rule in rules if "c_attn" in repr(rule))


@pytest.mark.parametrize(("name", "ours"), [
    ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"),
])  # fmt: skip
def test_activations_are_the_functions_that_transformers_has(name, ours):
    from transformers.activations import ACT2FN

    from llmcli.ops.activations import activation

    raw = {"model_type": "llama", **ROPED, "hidden_act": name}
    config = find("llama", "safetensors").from_hf(raw)
    assert config.layers[0].parts[-1].activation == ours
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(activation(ours)(x), ACT2FN[name](x), rtol=0, atol=1e-12)
