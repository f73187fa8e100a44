"""The models of the tests, a row each: who adds a family adds rows here, and nowhere else.

`TYPES` and `ZOO` are models that transformers has, written in its own names; each row is one thing
that can go wrong. `MODELS` are small ones of every kind that our configuration can express.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llmcli.config.attention import AttentionConfig, KeysValues, RopeConfig
from llmcli.config.delta import DeltaConfig
from llmcli.config.embedding import EmbeddingConfig, HeadConfig, LayerEmbeddingConfig
from llmcli.config.experts import ExpertGroups, ExpertsConfig, SharedConfig
from llmcli.config.formats import PACKED as BLOCK
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import ModelConfig, sequential
from llmcli.config.ple import PleConfig
from llmcli.config.samples import (  # noqa: F401
    ATTENTION,
    BLOCKS,
    CONFIGS,
    GATED,
    MODELS,
    PLE,
    RMS,
    VOCAB,
    block,
    branch,
    delta,
    gpt2,
    latent,
    layer,
    llama,
    mixture,
    ssm,
    stretched,
)  # fmt: skip
from llmcli.config.ssm import SsmConfig
from llmcli.families import find
from llmcli.graph.precision import in_no_blocks, matrices


@dataclass(frozen=True)
class Type:
    """What the variants of a `model_type` share: the `base` of their configuration.

    In GGUF it is the architecture `arch` of the gguf package, None where llama.cpp has none for it.
    `blocks` changes its sizes so that rows are whole blocks of 32, as packed formats need them.
    `modules` is which module of transformers puts an activation of ours out, of a layer but for the
    first and last ones: `<` its input, `/1` the second third of it, `|` whichever the layer has,
    `&` where it has another, too, or (`&!`) has not, nothing where no module does. What the
    converter to GGUF does: `permuted` rows of queries and keys, and `metadata` that other
    architectures have not, its key in the gguf package → the setting. `near`: how near activations
    are in float64, relative to the largest.
    """

    base: Mapping[str, Any]
    modules: Mapping[str, str]
    arch: str | None = None
    blocks: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False
    near: float = 1e-11
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One checkpoint: `overrides` of its type, how it is stored, what is edited after, what runs.

    `history`: the rotation's tables depend on how many positions were seen so far, so that it is
    compared with the reference's own piecewise run, not with its whole pass. `typical`: one of each
    mechanism, for what costs a call per token or parameter. `views`: every command runs on it.
    `gguf` is the tolerance in float64 of what a GGUF file of it gives, None where none is written.
    """

    name: str
    model_type: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"
    edit: Callable[[Path], None] | None = None
    history: bool = False
    typical: bool = False
    views: bool = False
    gguf: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What its config.json says."""
        base = TYPES[self.model_type].base
        return {"model_type": self.model_type, **base, **self.overrides}

    def config(self, **overrides: Any) -> ModelConfig:
        """What we make of its config.json, changed by more overrides."""
        if not overrides:
            return self._config
        return find(self.model_type, "safetensors").from_hf(self.settings | overrides)

    @cached_property
    def _config(self) -> ModelConfig:
        """Asked for at each import of what is parametrized by it: once."""
        return find(self.model_type, "safetensors").from_hf(self.settings)


_HOW = [one.name for one in fields(Variant)][3:]


def _one(name: str, model_type: str, **how: Any) -> Variant:
    """A variant; what is no field of one is a setting of its type."""
    own = {key: how.pop(key) for key in _HOW if key in how}
    return Variant(name, model_type, how, **own)


# the one of its type that all tests know
_first = partial(_one, typical=True, views=True)


def _without(settings: Mapping[str, Any], *keys: str, begin: str = "") -> dict[str, Any]:
    """All but those keys, and (`begin`) those that begin so."""
    return {
        key: value for key, value in settings.items()
        if key not in keys and not (begin and key.startswith(begin))
    }  # fmt: skip


_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_TIED = {"tie_word_embeddings": True}
# What the rotary families share. Widths are no powers of two, and the vocabulary is a prime.
_ROPE: dict[str, Any] = dict(vocab_size=211, hidden_size=48, intermediate_size=88,
    num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
_OWN_EPS = _without(_ROPE, "rms_norm_eps")
_GPT2 = dict(vocab_size=211, n_embd=48, n_layer=2, n_head=6, n_positions=512, bos_token_id=1,
    eos_token_id=2)
_GPT_NEO = dict(vocab_size=211, hidden_size=48, num_layers=3, num_heads=6, window_size=19,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    attention_types=[[["global", "local"], 1], [["local"], 1]])
# of its neurons two thirds are built
_LFM2 = _OWN_EPS | dict(intermediate_size=120, block_multiple_of=8, num_hidden_layers=3,
    layer_types=["conv", _FULL, "conv"])
_DEEPSEEK = _ROPE | dict(num_key_value_heads=6, qk_nope_head_dim=10, qk_rope_head_dim=6,
    v_head_dim=7, kv_lora_rank=20, q_lora_rank=18, first_k_dense_replace=9, n_routed_experts=8,
    n_shared_experts=2, moe_intermediate_size=16, num_experts_per_tok=3, n_group=1, topk_group=1,
    routed_scaling_factor=1.5)
_LATENT_WIDE = dict(hidden_size=96, intermediate_size=128, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=16, kv_lora_rank=64, q_lora_rank=32)
_WIDE = {"hidden_size": 96, "intermediate_size": 128}


def _norms_after(attention: str, mlp: str) -> dict[str, str]:
    """Modules where what is added is what these norms put out."""
    added = {"ln1_post.out": attention, "attn_out": attention, "ln2_post.out": mlp, "mlp_out": mlp}
    return {"attn.out": "self_attn", "mlp.out": "mlp", **added}


def _unseen(part: str, names: str) -> dict[str, str]:
    """What no module puts out, names of one part."""
    return dict.fromkeys([f"{part}.{name}" for name in names.split()], "")


def _own(names: str, ours: str, theirs: str) -> dict[str, str]:
    """Modules that are called alike: `{}` stands for each of these names."""
    return {ours.format(name): theirs.format(name) for name in names.split()}


_GPT2_MODULES = {
    "embed": "wte", "pos_embed": "wpe", "ln_final.out": "ln_f", "ln1.out": "ln_1",
    "attn.q": "attn.c_attn/0", "attn.k": "attn.c_attn/1", "attn.v": "attn.c_attn/2",
    "attn.z": "attn.c_proj<", "attn_out": "attn", "resid_mid": "ln_2<", "ln2.out": "ln_2",
    "mlp.pre": "mlp.c_fc", "mlp.post": "mlp.act", "mlp_out": "mlp",
}  # fmt: skip
_MODULES = {
    "embed": "embed_tokens", "ln_final.out": "norm", "ln1.out": "input_layernorm",
    **_own("q k v", "attn.{}", "self_attn.{}_proj"),
    **_own("q k", "attn.{}_norm", "self_attn.{}_norm"),
    "attn.z": "self_attn.o_proj<", "attn_out": "self_attn",
    "resid_mid": "post_attention_layernorm<", "ln2.out": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.act": "mlp.act_fn",
    "mlp.post": "mlp.down_proj<", "mlp_out": "mlp",
}  # fmt: skip
_OLMO2_MODULES = _without(_MODULES, "ln1.out", "ln2.out") | {
    **_norms_after("post_attention_layernorm", "post_feedforward_layernorm"), "resid_mid": "mlp<",
}  # fmt: skip
_GEMMA = _ROPE | {"head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
_GEMMA_WIDE = _WIDE | {"query_pre_attn_scalar": 16}  # which GGUF cannot say
_GEMMA_MODULES = _MODULES | {
    **_norms_after("post_attention_layernorm", "post_feedforward_layernorm"),
    "resid_mid": "pre_feedforward_layernorm<", "ln2.out": "pre_feedforward_layernorm",
}  # fmt: skip
# two kinds of layers, the last two of them with keys and values of earlier ones
_GEMMA4 = _OWN_EPS | dict(head_dim=8, global_head_dim=16, sliding_window=21, num_hidden_layers=5,
    layer_types=[_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL], num_kv_shared_layers=2,
    use_double_wide_mlp=True, hidden_size_per_layer_input=12, vocab_size_per_layer_input=211,
    final_logit_softcapping=8.0, tie_word_embeddings=True, rms_norm_eps=2.0**-17)
_GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=6, top_k_experts=2,
    moe_intermediate_size=24)
_GEMMA4_MODULES = _GEMMA_MODULES | {
    "ple.embed": "embed_tokens_per_layer", "ple.proj": "per_layer_model_projection",
    "ple.proj_norm": "per_layer_projection_norm", "resid_mid2": "per_layer_input_gate<",
    "attn.v": "self_attn.v_proj|self_attn.k_proj", "attn.v_norm": "self_attn.v_norm",
    "ple.gate": "per_layer_input_gate", "ple.act": "act_fn",
    "ple.post": "per_layer_projection<", "ple.out": "per_layer_projection",
    **dict.fromkeys(("ln4_post.out", "ple_out"), "post_per_layer_input_norm"),
    # beside experts
    "ln2_post.out": "post_feedforward_layernorm_1|post_feedforward_layernorm",
    "ln3.out": "pre_feedforward_layernorm_2",
    "ln3_post.out": "post_feedforward_layernorm_2|post_per_layer_input_norm",
    "branch_sum": "post_feedforward_layernorm<", "sum_norm.out": "post_feedforward_layernorm",
    "moe.router_norm.out": "router.proj<", "moe.router_logits": "router.proj",
    "moe.router_probs": "router#0", "moe.expert_weight": "router#1", "moe.expert_idx": "router#2",
    **_unseen("moe", "gate up act post expert_out"), "moe.out": "experts",
}  # fmt: skip
_UNPADDED = {"pad_token_id": None}  # their own one lies beyond the vocabulary
_FUSED = _unseen("attn", "q k v") | _unseen("mlp", "gate up")
_PHI3_MODULES = _MODULES | _FUSED | {"mlp.act": "mlp.activation_fn"}
_GLM_MODULES = _MODULES | _unseen("mlp", "gate up") | {"mlp.act": "mlp.activation_fn"}
_GLM4_MODULES = _GLM_MODULES | _norms_after("post_self_attn_layernorm", "post_mlp_layernorm")
_COHERE2_MODULES = _without(_MODULES, "resid_mid", "ln2.out")
_STARCODER2_MODULES = _without(_MODULES, "mlp.gate", "mlp.up", "mlp.act")
_STARCODER2_MODULES |= {"mlp.pre": "mlp.c_fc", "mlp.post": "mlp.act"}
_NEOX_MODULES = {
    "embed": "embed_in", "ln_final.out": "final_layer_norm", "ln1.out": "input_layernorm",
    **_unseen("attn", "q k v"), "attn.z": "attention.dense<",
    "attn_out": "attention", "ln2.out": "post_attention_layernorm",
    "resid_mid": "post_attention_layernorm<", "mlp.pre": "mlp.dense_h_to_4h",
    "mlp.post": "mlp.act", "mlp_out": "mlp",
}  # fmt: skip
_BLOOM_MODULES = _NEOX_MODULES | {
    "embed": "word_embeddings", "embed_norm.out": "word_embeddings_layernorm",
    "ln_final.out": "ln_f", "attn.z": "self_attention.dense<", "attn_out": "self_attention.dense",
    "mlp.post": "mlp.gelu_impl", "mlp_out": "mlp.dense_4h_to_h",
}
_OPT = _without(_OWN_EPS, "tie_word_embeddings", "intermediate_size", "num_key_value_heads")
_OPT |= {"ffn_dim": 88, "pad_token_id": None}
_OPT_MODULES = {
    "embed": "decoder.embed_tokens", "pos_embed": "decoder.embed_positions",
    "embed_proj": "decoder.project_in", "head_proj": "decoder.project_out",
    "ln_final.out": "decoder.final_layer_norm", "ln1.out": "self_attn_layer_norm",
    **_own("q k v", "attn.{}", "self_attn.{}_proj"), "attn.z": "self_attn.out_proj<",
    "attn_out": "self_attn", "resid_mid": "final_layer_norm<", "ln2.out": "final_layer_norm",
    "mlp.pre": "fc1", "mlp.post": "activation_fn", "mlp_out": "fc2",
}  # fmt: skip
# multipliers that are float32 numbers, for GGUF rounds to these
_GRANITE = _ROPE | dict(attention_multiplier=0.3125, residual_multiplier=0.75,
    embedding_multiplier=5.0, logits_scaling=4.0)
_GRANITE_MODULES = _MODULES | {
    "attn.out": "self_attn", "mlp.out": "mlp", "attn_out": "", "mlp_out": "", "embed": "",
}  # fmt: skip
_LFM2_MODULES = _MODULES | {
    "ln_final.out": "embedding_norm", "ln1.out": "operator_norm", "attn.z": "self_attn.out_proj<",
    **_own("q k", "attn.{}_norm", "self_attn.{}_layernorm"), "attn_out": "self_attn|conv",
    "conv.B": "conv.in_proj/0", "conv.gate": "conv.in_proj/1",
    "conv.x": "conv.in_proj/2", "conv.out": "conv.out_proj<",
    "resid_mid": "ffn_norm<", "ln2.out": "ffn_norm", "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3", "mlp.act": "", "mlp.post": "feed_forward.w2<",
    "mlp_out": "feed_forward",
}  # fmt: skip


def _router(module: str) -> dict[str, str]:
    """A module that puts out logits, weights of the chosen experts, and which these are."""
    outs = ("router_logits", "expert_weight", "expert_idx")
    return {f"moe.{one}": f"{module}#{at}" for at, one in enumerate(outs)}


_ROUTED = _unseen("moe", "router_probs gate up act post expert_out") | _router("mlp.gate")
_GPT_OSS_MODULES = _without(_MODULES | _ROUTED, "moe.router_probs", begin="mlp.")
_GPT_OSS_MODULES |= _router("mlp.router")
_LLAMA4_MODULES = {
    key: name.replace("mlp", "feed_forward") for key, name in _MODULES.items()
} | _unseen("attn", "q_norm k_norm") | _unseen(
    "moe", "router_probs expert_weight expert_idx expert_in gate up act post expert_out"
) | {
    "moe.router_logits": "feed_forward.router#1", "mlp.act": "feed_forward.activation_fn",
    **_own("gate up", "moe.shared.{}", "feed_forward.shared_expert.{}_proj"),
    "moe.shared.act": "feed_forward.shared_expert.activation_fn",
    "moe.shared.post": "feed_forward.shared_expert.down_proj<",
    "moe.shared_out": "feed_forward.shared_expert",
}  # fmt: skip


# what no function of a mixer puts out; the rest is seen where these are called
_SSM = _unseen("ssm", "conv dt log_decay z gate_act gated")
_MAMBA2 = dict(vocab_size=211, hidden_size=48, num_hidden_layers=2, num_heads=6, head_dim=16,
    state_size=10, n_groups=2, conv_kernel=4, chunk_size=32, bos_token_id=1, eos_token_id=2,
    pad_token_id=None, layer_norm_epsilon=2.0**-17)
_MAMBA2_MODULES = _SSM | {
    "embed": "embeddings", "ln_final.out": "norm_f", "ln1.out": "norm", "attn_out": "mixer",
}  # fmt: skip
_GRANITE_HYBRID = _GRANITE | dict(num_hidden_layers=3, layer_types=[_LINEAR, _FULL, _LINEAR],
    intermediate_size=24, shared_intermediate_size=40, num_local_experts=6, num_experts_per_tok=2,
    mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=10, mamba_chunk_size=32,
    rms_norm_eps=2.0**-17)
_GRANITE_HYBRID_MODULES = _without(_GRANITE_MODULES, begin="mlp.") | _SSM | _unseen(
    "moe", "gate up act post expert_out out shared.gate shared.up"
) | _unseen("mlp", "gate up") | _router("block_sparse_moe.router") | {
    "attn.out": "self_attn", "ssm.out_raw": "mamba",
    "moe.shared.act": "shared_mlp.activation&block_sparse_moe",
    "moe.shared.post": "shared_mlp.output_linear&block_sparse_moe<",
    "moe.shared_out": "shared_mlp&block_sparse_moe",
    "mlp.act": "shared_mlp.activation&!block_sparse_moe",
    "mlp.post": "shared_mlp.output_linear&!block_sparse_moe<",
    "mlp.out": "shared_mlp&!block_sparse_moe",
}  # fmt: skip
_NEMOTRON_H = dict(vocab_size=211, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
    head_dim=10, intermediate_size=88, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    pad_token_id=None, layer_norm_epsilon=2.0**-17, mamba_num_heads=6, mamba_head_dim=14,
    n_groups=2, ssm_state_size=10, chunk_size=32, n_routed_experts=8, num_experts_per_tok=3,
    n_group=4, topk_group=2, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
    routed_scaling_factor=2.5, layers_block_type=[_LINEAR, _FULL, "moe"])
_NEMOTRON_H_MODULES = _SSM | _router("mixer.gate") | {
    **_unseen("moe", "router_probs pre post expert_out"),
    "embed": "embeddings", "ln_final.out": "norm_f", "ln1.out": "norm",
    "attn_out": "mixer.o_proj|mixer.out_proj", "attn.z": "mixer.o_proj<",
    **_own("q k v", "attn.{}", "mixer.{}_proj"),
    "mlp.pre": "mixer.up_proj", "mlp.post": "mixer.act_fn",
    "mlp_out": "mixer.down_proj|mixer&mixer.gate",
    "moe.shared.pre": "mixer.shared_experts.up_proj",
    "moe.shared.post": "mixer.shared_experts.act_fn", "moe.shared_out": "mixer.shared_experts",
}  # fmt: skip


def _shared(module: str, out: str) -> dict[str, str]:
    """Modules of a mixture with a shared expert."""
    return _ROUTED | {
        **_own("gate up", "moe.shared.{}", f"mlp.{module}.{{}}_proj"),
        "moe.shared.act": f"mlp.{module}.act_fn", "moe.shared.post": f"mlp.{module}.down_proj<",
        f"moe.{out}": f"mlp.{module}",
    }  # fmt: skip


_CHOOSES = {"num_experts": 6, "num_experts_per_tok": 2}
# three value heads for each key head, attention in the second layer of three
_QWEN_NEXT = _ROPE | dict(head_dim=16, num_hidden_layers=3, rms_norm_eps=2.0**-17,
    layer_types=[_LINEAR, _FULL, _LINEAR], linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=10, linear_value_head_dim=12)
_QWEN_EXPERTS = _CHOOSES | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_QWEN_NEXT_MODULES = _MODULES | {
    "attn_out": "self_attn|linear_attn", "attn.q": "self_attn.q_proj",
    "attn.gate": "self_attn.q_proj", "attn.gated": "self_attn.o_proj<",
    "linattn.z": "linear_attn.norm<", "linattn.out": "linear_attn.norm",
    **_unseen("linattn", "conv q k dt z_norm gate_act beta_in decay_in in gate"),
}  # fmt: skip
_QWEN_3_5_MODULES = _QWEN_NEXT_MODULES | {
    f"linattn.{ours}": f"linear_attn.in_proj_{theirs}"
    for ours, theirs in (("in", "qkv"), ("gate", "z"), ("beta_in", "b"), ("decay_in", "a"))
}
_SHARED_MODULES = _shared("shared_expert", "shared.out") | _unseen(
    "moe", "shared_weight shared_out"
) | {"moe.shared_logit": "mlp.shared_expert_gate"}
_DEEPSEEK_MODULES = _without(_MODULES, *_unseen("attn", "q k v q_norm k_norm")) | _shared(
    "shared_experts", "shared_out"
) | {
    "attn.q_latent": "self_attn.q_a_proj", "attn.q_latent_norm": "self_attn.q_a_layernorm",
    "attn.kv_latent": "self_attn.kv_a_layernorm<", "attn.q_pe": "", "attn.k_pe": "",
    "attn.kv_latent_norm": "self_attn.kv_a_layernorm",
}  # fmt: skip

_PARALLEL = {"parallel_residual": "use_parallel_residual"}
GRANITE_SCALES = {
    "attention_scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
TYPES: dict[str, Type] = {
    "gpt2": Type(_GPT2, _GPT2_MODULES, "GPT2", {"n_embd": 96}),
    "llama": Type(_ROPE, _MODULES, "LLAMA", _WIDE, permuted=True),
    # a Llama in GGUF, which has no window
    "mistral": Type(_ROPE | {"sliding_window": None}, _MODULES),
    "ministral": Type(_ROPE | dict(sliding_window=17, num_hidden_layers=3, head_dim=8), _MODULES),
    "qwen2": Type(_ROPE, _MODULES, "QWEN2", _WIDE),
    "qwen3": Type(_ROPE | {"head_dim": 16}, _MODULES, "QWEN3",
        dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)),
    # what it normalizes is small, so that eps counts: GGUF rounds it to float32
    "olmo2": Type(_ROPE | {"rms_norm_eps": 2.0**-17}, _OLMO2_MODULES, "OLMO2", _WIDE),
    "gemma": Type(_ROPE | {"head_dim": 16, "tie_word_embeddings": True}, _MODULES, "GEMMA", _WIDE),
    "gemma2": Type(_GEMMA | {"sliding_window": 19}, _GEMMA_MODULES, "GEMMA2", _GEMMA_WIDE,
        metadata={"attn_logit_softcapping": "attn_logit_softcapping"}),
    "gemma3_text": Type(_GEMMA | dict(sliding_window=21, num_hidden_layers=3,
        sliding_window_pattern=3), _GEMMA_MODULES, "GEMMA3", _GEMMA_WIDE),
    "gemma4_text": Type(_GEMMA4, _GEMMA4_MODULES, "GEMMA4",
        _WIDE | {"head_dim": 16, "hidden_size_per_layer_input": 32}),
    "olmo3": Type(_ROPE | dict(rms_norm_eps=2.0**-17, sliding_window=18, num_hidden_layers=4),
        _OLMO2_MODULES),
    "phi3": Type(_ROPE | _UNPADDED, _PHI3_MODULES, "PHI3", _WIDE),
    "granite": Type(_GRANITE, _GRANITE_MODULES, "GRANITE", _WIDE, permuted=True,
        metadata=GRANITE_SCALES),
    "smollm3": Type(_ROPE | _UNPADDED | {"num_hidden_layers": 4}, _MODULES, "SMOLLM3", _WIDE,
        permuted=True),
    "exaone4": Type(_ROPE | dict(sliding_window=20, num_hidden_layers=4, rms_norm_eps=2.0**-17),
        _OLMO2_MODULES, "EXAONE4", _WIDE),
    "glm": Type(_ROPE | _UNPADDED | {"head_dim": 8}, _GLM_MODULES, "CHATGLM",
        _WIDE | {"head_dim": 16}),
    "glm4": Type(_ROPE | _UNPADDED | {"head_dim": 8}, _GLM4_MODULES, "GLM4",
        _WIDE | {"head_dim": 16}),
    "starcoder2": Type(_OWN_EPS, _STARCODER2_MODULES, "STARCODER2", _WIDE),
    "cohere2": Type(_OWN_EPS | _TIED | {"sliding_window": 22, "num_hidden_layers": 4},
        _COHERE2_MODULES, "COHERE2", _WIDE, metadata={"logit_scale": "logit_scale"}),
    "gpt_neox": Type(_without(_OWN_EPS, "num_key_value_heads"), _NEOX_MODULES, "GPTNEOX", _WIDE,
        metadata=_PARALLEL),
    "olmo": Type(_without(_OWN_EPS, "tie_word_embeddings") | _UNPADDED, _MODULES, "OLMO", _WIDE,
        permuted=True, metadata={"clamp_kqv": "clip_qkv"}),
    "gpt_neo": Type(_GPT_NEO, _GPT2_MODULES | _own("q k v", "attn.{}", "attn.attention.{}_proj")
        | {"attn.z": "attn.attention.out_proj<"}),
    "opt": Type(_OPT, _OPT_MODULES),
    "bloom": Type(dict(vocab_size=211, hidden_size=48, n_layer=2, n_head=6, bos_token_id=1,
        eos_token_id=2, seq_length=512), _BLOOM_MODULES, "BLOOM",
        {"hidden_size": 96, "n_head": 4}, near=1e-9),  # √(2/π) has eight digits there
    "exaone": Type(_ROPE, _MODULES, "EXAONE", _WIDE),
    "internlm3": Type(_ROPE | {"head_dim": 10}, _MODULES, "LLAMA", _WIDE | {"head_dim": 16},
        permuted=True),
    "stablelm": Type(_OWN_EPS, _MODULES | _own("q k", "attn.{}_norm", "self_attn.{}_layernorm"),
        "STABLELM", _WIDE, metadata=_PARALLEL),
    "ministral3": Type(_ROPE | {"head_dim": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.25,
        "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
    }}, _MODULES, "MISTRAL3", _WIDE | {"head_dim": 16}, permuted=True),
    "deepseek_v2": Type(_DEEPSEEK, _DEEPSEEK_MODULES, "DEEPSEEK2"),
    # what its latents are normalized with is 1e-6, whatever this says
    "deepseek_v3": Type(_DEEPSEEK | {"rms_norm_eps": 2.0**-10}, _DEEPSEEK_MODULES, "DEEPSEEK2",
        _LATENT_WIDE),
    "glm4_moe_lite": Type(_without(_DEEPSEEK, "first_k_dense_replace") | _UNPADDED
        | {"mlp_layer_types": ["dense"] * 2}, _DEEPSEEK_MODULES, "DEEPSEEK2"),
    "lfm2": Type(_LFM2, _LFM2_MODULES, "LFM2", {"hidden_size": 96, "intermediate_size": 192}),
    "lfm2_moe": Type(_without(_LFM2, "block_multiple_of") | _CHOOSES | _TIED
        | {"moe_intermediate_size": 24, "num_dense_layers": 1}, _LFM2_MODULES
        | {key: name.replace("mlp.", "feed_forward.") for key, name in _ROUTED.items()}, "LFM2MOE"),
    "mamba2": Type(_MAMBA2, _MAMBA2_MODULES, "MAMBA2", {"hidden_size": 96, "head_dim": 32}),
    "granitemoehybrid": Type(_GRANITE_HYBRID, _GRANITE_HYBRID_MODULES, "GRANITE_HYBRID",
        dict(hidden_size=96, intermediate_size=64, shared_intermediate_size=64, num_local_experts=0,
        num_experts_per_tok=0), permuted=True),
    "nemotron_h": Type(_NEMOTRON_H, _NEMOTRON_H_MODULES, "NEMOTRON_H", dict(hidden_size=96,
        intermediate_size=128, head_dim=16, mamba_head_dim=16,
        layers_block_type=[_LINEAR, _FULL, "mlp"],
        time_step_min=1e-9), permuted=True),  # which files cannot say
    "mixtral": Type(_ROPE | {"num_local_experts": 5, "num_experts_per_tok": 2}, _MODULES | _ROUTED,
        "LLAMA", permuted=True),
    "qwen2_moe": Type(_ROPE | _QWEN_EXPERTS, _MODULES | _SHARED_MODULES, "QWEN2MOE"),
    "qwen3_moe": Type(_ROPE | _CHOOSES
        | {"head_dim": 16, "moe_intermediate_size": 24, "norm_topk_prob": True},
        _MODULES | _ROUTED, "QWEN3MOE"),
    "qwen3_next": Type(_QWEN_NEXT | _QWEN_EXPERTS, _QWEN_NEXT_MODULES | _SHARED_MODULES,
        "QWEN3NEXT"),
    "qwen3_5_text": Type(_QWEN_NEXT, _QWEN_3_5_MODULES, "QWEN35",
        _WIDE | {"linear_num_value_heads": 4, "linear_value_head_dim": 16}),
    "qwen3_5_moe_text": Type(_without(_QWEN_NEXT, "intermediate_size") | _QWEN_EXPERTS,
        _QWEN_3_5_MODULES | _SHARED_MODULES, "QWEN35MOE"),
    "olmoe": Type(_ROPE | _UNPADDED | _CHOOSES, _MODULES | _ROUTED, "OLMOE"),
    "gpt_oss": Type(_ROPE | _UNPADDED | dict(head_dim=16, num_local_experts=6,
        num_experts_per_tok=2, intermediate_size=40, sliding_window=19,
        rope_parameters=dict(rope_type="yarn", rope_theta=1500.0, factor=4.0, beta_fast=32.0,
        beta_slow=1.0, truncate=False, original_max_position_embeddings=128)), _GPT_OSS_MODULES,
        "GPT_OSS"),
    # the chunk, and what queries grow with, as llama.cpp has them
    "llama4_text": Type(_ROPE | _UNPADDED | dict(head_dim=16, num_hidden_layers=5,
        intermediate_size=24, intermediate_size_mlp=40, num_local_experts=6,
        interleave_moe_layer_step=2, attention_chunk_size=8192), _LLAMA4_MODULES, "LLAMA4",
        metadata={"interleave_moe_layer_step": "interleave_moe_layer_step"}),
    "glm4_moe": Type(_ROPE | dict(n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=24, n_shared_experts=2, num_hidden_layers=3,
        routed_scaling_factor=1.5), _MODULES | _shared("shared_experts", "shared_out"), "GLM4_MOE"),
}  # fmt: skip


def _rope(kind: str, theta: float = 10_000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


def _ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """One for each of two types of layers."""
    kinds = {_FULL: full["rope_parameters"], _SLIDING: sliding["rope_parameters"]}
    return {"rope_parameters": kinds}


Edit = Callable[[Path], None]
Tensors = dict[str, torch.Tensor]


def _of_config(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Edit:
    """Edits config.json, in place or as it returns it."""

    def edit(path: Path) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(change(config) or config))

    return edit


def _of_tensors(change: Callable[[Tensors], Tensors]) -> Edit:
    """Edits a file of tensors, as it returns them."""

    def edit(path: Path) -> None:
        file = path / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return edit


def _in_turn(*edits: Edit) -> Edit:
    """One edit after the other."""

    def edit(path: Path) -> None:
        for one in edits:
            one(path)

    return edit


def _called(**names: str) -> Edit:
    """Settings under other names."""
    return _of_config(lambda config: {names.get(key, key): one for key, one in config.items()})


# types of layers in a configuration that has none
_layer_types = _of_config(lambda config: config | {"layer_types": [_SLIDING, _FULL]})
_no_layer_types = _of_config(lambda config: config | {"layer_types": None})


@_of_config
def _old_rope(config: dict[str, Any]) -> None:
    """As transformers 4 wrote it: rope_theta, rope_scaling, torch_dtype."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")


@_of_config
def _kind_as_type(config: dict[str, Any]) -> None:
    """As the first releases wrote it: the kind of scaling under `type`, no head_dim."""
    scaling = config["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    config.pop("head_dim", None)


_oldest_rope = _in_turn(_old_rope, _kind_as_type)


@_of_config
def _first_types(config: dict[str, Any]) -> None:
    """Types of layers as the first releases called them, and dt's limits in plain JSON."""
    key = "layer_types" if config.get("layer_types") else "layers_block_type"
    first = {_LINEAR: "mamba", _FULL: "attention"}
    config[key] = [first.get(kind, kind) for kind in config[key]]
    config["time_step_limit"] = [0.0, float("inf")]


# as published for code of their own, InternLM3 with transformers 4's rotary settings
_exaone_settings = _called(num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon",
    hidden_act="activation_function")
_internlm3_settings = _in_turn(_old_rope, _called(attention_bias="qkv_bias", mlp_bias="bias"))


@_of_config
def _pattern(config: dict[str, Any]) -> None:
    """A letter for each block, and names of the first releases."""
    letters = {_LINEAR: "M", _FULL: "*", "mlp": "-", "moe": "E"}
    kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["mamba_n_groups"], config["n_groups"] = config["n_groups"], 1


@_of_tensors
def _hub_gpt2(tensors: Tensors) -> Tensors:
    """The names of the original `gpt2` repository: no prefix, and each layer's mask as a buffer."""
    out = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for i in range(2):
        out[f"h.{i}.attn.bias"] = torch.ones(512, 512).tril().view(1, 1, 512, 512)
        out[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return out


@_of_tensors
def _hub_llama(tensors: Tensors) -> Tensors:
    """Without a prefix; early checkpoints have the rotary frequencies of every layer as tensors."""
    return {name.removeprefix("model."): value for name, value in tensors.items()} | {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)
    }


# a tied checkpoint that stores its head all the same; and another one, as GPT-NeoX calls it
_stored_head = _of_tensors(lambda t: t | {"lm_head.weight": 1 * t["model.embed_tokens.weight"]})
_another_head = _of_tensors(
    lambda t: t | {"embed_out.weight": t["gpt_neox.embed_in.weight"].flip(0) * 1.5}
)


@_of_tensors
def _fused_experts(tensors: Tensors) -> Tensors:
    """As transformers 5 has them in memory: the experts of a layer in one tensor, gate above up."""
    fused: Tensors = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(tensors, key=lambda name: [
        int(part) if part.isdigit() else part for part in name.split(".")
    ]):
        *begin, last, _ = name.split(".")
        if "experts" not in begin:
            fused[name.replace("block_sparse_moe.gate", "mlp.gate")] = tensors[name]
            continue
        into = f"model.layers.{begin[2]}.mlp.experts"
        experts.setdefault(into, {}).setdefault(last, []).append(tensors[name])
    for into, each in experts.items():
        gate, up, down = (
            torch.stack(each[one if one in each else other])
            for one, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        )
        fused |= {f"{into}.gate_up_proj": torch.cat((gate, up), 1), f"{into}.down_proj": down}
    return fused


_numbered_experts = _called(num_local_experts="num_experts")  # before version 5


@_of_config
def _old_share(config: dict[str, Any]) -> None:
    """An old place of a share; sections of rotary positions, which of text change nothing."""
    rope = config.pop("rope_parameters")
    config |= {one: rope.pop(one) for one in ("rope_theta", "partial_rotary_factor")}
    config["rope_scaling"] = rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}


# tensors of a layer that predicts the token after the next one
_predicted = _in_turn(_old_share, _of_tensors(lambda tensors: tensors | {
    "mtp.fc.weight": torch.ones(48, 96), "mtp.layers.0.input_layernorm.weight": torch.ones(48),
}))  # fmt: skip


@_of_tensors
def _later_layers(tensors: Tensors) -> Tensors:
    """A layer that predicts the token after the next one."""
    extra = {
        name.replace("layers.2.", "layers.3."): value.clone()
        for name, value in tensors.items() if "layers.2." in name
    }  # fmt: skip
    return tensors | extra | {"model.layers.3.eh_proj.weight": torch.ones(48, 96)}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 128}

_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 1.5, 2.5, 4.0]}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}

ZOO: tuple[Variant, ...] = (
    _first("gpt2", "gpt2", gguf=1e-9),
    _one("gpt2-untied", "gpt2", tie_word_embeddings=False),
    # its epsilon is rounded to float32 in GGUF
    _one("gpt2-odd-heads", "gpt2", n_embd=39, n_head=3, n_inner=50, layer_norm_epsilon=0.001,
        tie_word_embeddings=False, gguf=1e-7),
    _one("gpt2-one-head", "gpt2", n_head=1, n_layer=1),
    _one("gpt2-layer-scale", "gpt2", scale_attn_by_inverse_layer_idx=True, n_layer=3,
        layer_norm_epsilon=0.001),
    _one("gpt2-unscaled", "gpt2", scale_attn_weights=False, n_embd=12, n_head=3),
    _one("gpt2-upcast", "gpt2", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True),
    _one("gpt2-gelu", "gpt2", activation_function="gelu"),
    _one("gpt2-relu", "gpt2", activation_function="relu"),
    _one("gpt2-tanh-gelu", "gpt2", activation_function="gelu_pytorch_tanh"),
    _one("gpt2-bf16", "gpt2", dtype=torch.bfloat16),
    _one("gpt2-shards", "gpt2", n_layer=3, shard="40KB"),
    _one("gpt2-hub-names", "gpt2", edit=_hub_gpt2),
    _first("llama-gqa3", "llama", gguf=1e-9),
    _one("llama-tied", "llama", **_TIED, views=True, gguf=1e-9),
    _one("llama-tied-stored", "llama", **_TIED, edit=_stored_head),
    _one("llama-mha", "llama", num_key_value_heads=6, gguf=1e-9),
    _one("llama-mqa", "llama", num_key_value_heads=1, typical=True, gguf=1e-9),
    _one("llama-no-kv-heads", "llama", num_key_value_heads=None),
    _one("llama-bias", "llama", **_BIASES, typical=True, gguf=1e-9),
    _one("llama-bias-tied", "llama", **_BIASES, **_TIED),
    _one("llama-attention-bias", "llama", attention_bias=True, gguf=1e-9),
    _one("llama-mlp-bias", "llama", mlp_bias=True, num_hidden_layers=3),
    _one("llama-head10", "llama", head_dim=10, gguf=1e-9),
    _one("llama-head10-mha", "llama", head_dim=10, num_key_value_heads=6),
    _one("llama-wide-heads", "llama", hidden_size=51, num_attention_heads=3, num_key_value_heads=1,
        head_dim=34),
    _one("llama-theta", "llama", **_rope("default", 5e5), gguf=1e-9),
    # transformers' Llama rotates whole heads whatever this says
    _one("llama-partial", "llama", partial_rotary_factor=0.5),
    _one("llama-gelu", "llama", hidden_act="gelu", rms_norm_eps=1e-2),
    _one("llama-tanh-gelu", "llama", hidden_act="gelu_pytorch_tanh"),
    _one("llama-relu", "llama", hidden_act="relu"),
    _one("llama-bf16", "llama", dtype=torch.bfloat16),
    _one("llama-fp16", "llama", **_TIED, dtype=torch.float16),
    _one("llama-shards", "llama", num_hidden_layers=3, shard="30KB"),
    _one("llama-bf16-shards", "llama", dtype=torch.bfloat16, shard="20KB"),
    _one("llama-hub-tensors", "llama", edit=_hub_llama),
    _one("rope-linear", "llama", **_rope("linear", factor=4.0), gguf=1e-9),
    _one("rope-dynamic", "llama", max_position_embeddings=128, **_rope("dynamic", factor=2.0),
        history=True),
    _one("rope-yarn", "llama", **_rope("yarn", **_YARN), gguf=1e-9),
    _one("rope-yarn-mscale", "llama", **_rope("yarn", **_YARN, mscale=1.3, mscale_all_dim=0.7,
        beta_fast=16.0, beta_slow=2.0), typical=True),
    _one("rope-yarn-temperature", "llama", **_rope("yarn", **_YARN, attention_factor=1.25)),
    _one("rope-yarn-untruncated", "llama", head_dim=32, **_rope("yarn", **_YARN, truncate=False)),
    _one("rope-yarn-wide", "llama", head_dim=32, **_rope("yarn", **_YARN)),
    # the factors are rounded to float32 in GGUF: 330 positions turn that into 1e-5 radians
    _one("rope-llama3", "llama", head_dim=32, **_rope("llama3", 500_000.0, **_LLAMA3), gguf=1e-5),
    _one("rope-longrope-short", "llama", **_rope("longrope", factor=2.0, **_LONGROPE,
        original_max_position_embeddings=400), history=True),
    _one("rope-longrope", "llama", **_rope("longrope", factor=4.0, **_LONGROPE,
        original_max_position_embeddings=128), history=True),
    _one("rope-linear-old", "llama", **_rope("linear", 5_000.0, factor=2.5), edit=_oldest_rope),
    _one("rope-yarn-old", "qwen2", **_rope("yarn", 1e6, **_YARN), edit=_oldest_rope),
    _one("rope-llama3-old", "llama", **_rope("llama3", **_LLAMA3), edit=_old_rope),
    _one("mistral", "mistral", head_dim=8),
    _first("mistral-window", "mistral", sliding_window=17),
    _one("mistral-window1", "mistral", sliding_window=1),
    # which AutoConfig takes for a ministral, nulls too
    _one("mistral-layer-types", "mistral", sliding_window=9, edit=_layer_types),
    _one("mistral-layer-types-null", "mistral", sliding_window=9, edit=_no_layer_types),
    _first("ministral", "ministral"),
    _one("ministral-types", "ministral", layer_types=[_FULL, _SLIDING, _FULL]),
    _one("mistral-window-head", "mistral", sliding_window=64, head_dim=12, num_hidden_layers=3,
        typical=True),
    _first("qwen2", "qwen2", gguf=1e-9),
    _one("qwen2-yarn", "qwen2", rms_norm_eps=0.001, **_rope("yarn", **_YARN), gguf=1e-7),
    _one("qwen2-tied", "qwen2", **_TIED, num_key_value_heads=6),
    _one("qwen2-window", "qwen2", use_sliding_window=True, sliding_window=29, max_window_layers=1,
        num_hidden_layers=3, typical=True),
    _one("qwen2-window-off", "qwen2", use_sliding_window=False, sliding_window=29,
        max_window_layers=0),
    _one("qwen2-layer-types", "qwen2", use_sliding_window=True, sliding_window=23,
        layer_types=[_SLIDING, _FULL, _SLIDING], num_hidden_layers=3, **_TIED),
    _first("qwen3", "qwen3", gguf=1e-9),
    _one("qwen3-head32", "qwen3", num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        gguf=1e-9),
    _one("qwen3-tied-bf16", "qwen3", **_TIED, dtype=torch.bfloat16),
    _one("qwen3-bias", "qwen3", attention_bias=True, num_key_value_heads=1, typical=True),
    _one("qwen3-bias-tied", "qwen3", attention_bias=True, **_TIED),
    _one("qwen3-window", "qwen3", use_sliding_window=True, sliding_window=31, max_window_layers=1,
        head_dim=10, num_key_value_heads=6, typical=True),
    _first("olmo2", "olmo2", gguf=1e-9),
    _one("olmo2-bias-tied", "olmo2", attention_bias=True, **_TIED, num_key_value_heads=6),
    _first("gemma", "gemma", gguf=1e-9),
    _one("gemma-untied", "gemma", tie_word_embeddings=False, hidden_act="gelu",
        num_key_value_heads=1, **_rope("default", 500.0)),
    _one("gemma-bf16", "gemma", hidden_size=51, dtype=torch.bfloat16),
    _first("gemma2", "gemma2"),
    _one("gemma2-gguf", "gemma2", query_pre_attn_scalar=16, sliding_window=5,
        attn_logit_softcapping=3.0, gguf=1e-9),
    _one("gemma2-uncapped", "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None,
        num_hidden_layers=3),
    _one("gemma2-strong-caps", "gemma2", attn_logit_softcapping=0.5, final_logit_softcapping=0.3,
        sliding_window=1, tie_word_embeddings=False, num_key_value_heads=6),
    _one("gemma2-layer-types", "gemma2", layer_types=[_FULL, _SLIDING, _SLIDING],
        num_hidden_layers=3, head_dim=10, query_pre_attn_scalar=10),
    _first("gemma3", "gemma3_text"),
    _one("gemma3-gguf", "gemma3_text", query_pre_attn_scalar=16, final_logit_softcapping=1.5,
        **_ropes(_rope("linear", 1e6, factor=8.0), _rope("default")), gguf=1e-9),
    _one("gemma3-capped", "gemma3_text", attn_logit_softcapping=0.7, final_logit_softcapping=2.0,
        num_key_value_heads=1, tie_word_embeddings=False, layer_types=[_FULL, _SLIDING] * 2,
        num_hidden_layers=4, typical=True),
    _one("gemma3-linear", "gemma3_text", **_ropes(_rope("linear", 3e5, factor=8.0), _rope("default",
        700.0))),
    # Gemma 4: E2B and E4B, then 31B
    _first("gemma4", "gemma4_text", gguf=1e-9),
    _one("gemma4-keys-as-values", "gemma4_text", attention_k_eq_v=True,
        num_global_key_value_heads=1, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        use_double_wide_mlp=False, typical=True, gguf=1e-9),
    _one("gemma4-all", "gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=3,
        num_kv_shared_layers=3, use_double_wide_mlp=False, tie_word_embeddings=False,
        attention_bias=True, vocab_size_per_layer_input=230, final_logit_softcapping=None),
    _one("gemma4-alike", "gemma4_text", global_head_dim=8, num_kv_shared_layers=0, sliding_window=1,
        **_ropes(_rope("proportional", partial_rotary_factor=1.0, factor=2.0), _rope("linear",
        700.0, factor=3.0))),
    _one("gemma4-bf16", "gemma4_text", hidden_size=51, dtype=torch.bfloat16),
    # … and 26B-A4B
    _first("gemma4-experts", "gemma4_text", **_GEMMA4_EXPERTS, attention_k_eq_v=True,
        num_global_key_value_heads=1, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        gguf=1e-9),
    _one("gemma4-experts-all", "gemma4_text", **_GEMMA4_EXPERTS | {"top_k_experts": 3},
        tie_word_embeddings=False, gguf=1e-9),
    _first("olmo3", "olmo3"),
    _one("olmo3-yarn", "olmo3", **_ropes(_rope("yarn", 5e5, **_YARN), _rope("default", 5e5)),
        attention_bias=True, **_TIED, layer_types=[_FULL, _SLIDING] * 2),
    _first("phi3", "phi3", gguf=1e-9),
    _one("phi3-window", "phi3", sliding_window=16, num_key_value_heads=6, gguf=1e-9),
    _one("phi3-partial", "phi3", **_TIED, partial_rotary_factor=0.75, hidden_act="gelu"),
    _one("phi3-longrope", "phi3", max_position_embeddings=512, original_max_position_embeddings=128,
        **_rope("longrope", factor=4.0, short_factor=[1.0, 1.125, 1.25, 1.75],
        long_factor=[1.0, 1.5, 2.5, 4.0], original_max_position_embeddings=128), history=True,
        gguf=1e-5),
    _first("granite", "granite", gguf=1e-9),
    _one("granite-plain", "granite", attention_multiplier=1.0, residual_multiplier=1.0,
        embedding_multiplier=1.0, logits_scaling=1.0, **_TIED, **_BIASES, hidden_size=30,
        num_attention_heads=3, num_key_value_heads=1),
    _first("smollm3", "smollm3", gguf=1e-9),
    _one("smollm3-listed", "smollm3", no_rope_layers=[0, 1, 1, 0], attention_bias=True, **_TIED),
    _one("smollm3-window", "smollm3", use_sliding_window=True, sliding_window=14,
        no_rope_layer_interval=2, num_key_value_heads=6),
    _first("exaone4", "exaone4", gguf=1e-9),
    _one("exaone4-full", "exaone4", sliding_window=None, layer_types=[_FULL] * 4,
        num_key_value_heads=1, **_TIED),
    _first("glm", "glm", gguf=1e-9),
    _one("glm-whole-heads", "glm", partial_rotary_factor=1.0, attention_bias=False, head_dim=10,
        **_TIED, num_key_value_heads=6),
    _first("glm4", "glm4", gguf=1e-9),
    _one("glm4-tied", "glm4", **_TIED, attention_bias=False, num_key_value_heads=1,
        rms_norm_eps=1e-3),
    _first("starcoder2", "starcoder2", gguf=1e-7),
    _one("starcoder2-plain", "starcoder2", use_bias=False, **_TIED, sliding_window=15,
        norm_epsilon=1e-3, num_key_value_heads=1),
    _first("cohere2", "cohere2", gguf=1e-7),
    _one("cohere2-bias", "cohere2", attention_bias=True, logit_scale=2.5, num_key_value_heads=6,
        layer_types=[_FULL, _SLIDING] * 2),
    _first("gpt_neox", "gpt_neox", gguf=1e-7),
    _one("gpt_neox-tied-another", "gpt_neox", **_TIED, edit=_another_head),
    _one("gpt_neox-in-sequence", "gpt_neox", use_parallel_residual=False, rotary_pct=0.5, **_TIED,
        hidden_act="gelu_new", attention_bias=False, layer_norm_eps=1e-3),
    _first("exaone", "exaone", gguf=1e-9),
    _one("exaone-hub-settings", "exaone", **_TIED, rms_norm_eps=1e-3, edit=_exaone_settings),
    _first("internlm3", "internlm3", gguf=1e-9),
    _one("internlm3-bias", "internlm3", qkv_bias=True, bias=True, num_key_value_heads=6, **_TIED,
        gguf=1e-9),
    _one("internlm3-hub-settings", "internlm3", qkv_bias=True, bias=True,
        max_position_embeddings=128, **_rope("dynamic", 5e7, factor=6.0), dtype=torch.bfloat16,
        edit=_internlm3_settings, history=True),
    _first("stablelm", "stablelm", gguf=1e-7),
    _one("stablelm-parallel", "stablelm", use_parallel_residual=True, use_qkv_bias=True, **_TIED,
        layer_norm_eps=1e-3, num_key_value_heads=6, **_rope("default", partial_rotary_factor=0.75),
        gguf=1e-7),
    _one("stablelm-normed-heads", "stablelm", use_parallel_residual=True, qk_layernorm=True,
        layer_norm_eps=1e-3, typical=True, gguf=1e-7),
    _first("olmo", "olmo", clip_qkv=0.75, gguf=1e-7),
    _one("olmo-unclipped", "olmo", **_TIED, num_key_value_heads=None, attention_bias=True,
        gguf=1e-7),
    _first("gpt_neo", "gpt_neo"),
    _one("gpt_neo-untied", "gpt_neo", tie_word_embeddings=False, intermediate_size=40,
        activation_function="relu", attention_types=[[["global"], 3]], layer_norm_epsilon=1e-3),
    _first("opt", "opt"),
    _first("opt-350m", "opt", do_layer_norm_before=False, word_embed_proj_dim=20),
    _one("opt-post-norm", "opt", do_layer_norm_before=False, _remove_final_layer_norm=True,
        num_hidden_layers=3, layer_norm_elementwise_affine=False),
    _one("opt-projected", "opt", word_embed_proj_dim=96, tie_word_embeddings=False),
    _one("opt-plain", "opt", enable_bias=False, layer_norm_elementwise_affine=False, ffn_dim=40,
        activation_function="gelu", tie_word_embeddings=False),
    _first("bloom", "bloom", gguf=1e-7),
    _one("bloom-normed-residual", "bloom", apply_residual_connection_post_layernorm=True),
    _one("bloom-heads", "bloom", n_head=4, tie_word_embeddings=False, layer_norm_epsilon=1e-3,
        n_layer=3, gguf=1e-7),
    _first("ministral3", "ministral3", gguf=1e-9),
    _one("ministral3-betas", "ministral3", **_rope("yarn", factor=8.0, llama_4_scaling_beta=0.1,
        original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.5, beta_fast=8.0,
        beta_slow=2.0), gguf=1e-7),
    _one("ministral3-window", "ministral3", sliding_window=33, **_TIED, num_key_value_heads=1),
    _first("deepseek_v2", "deepseek_v2"),
    _one("deepseek_v2-lite", "deepseek_v2", q_lora_rank=None, **_BIASES, **_TIED,
        num_hidden_layers=3, v_head_dim=10, **_rope("yarn", **_YARN, **_MSCALE)),
    _one("deepseek_v2-old", "deepseek_v2", **_rope("yarn", **_YARN, **_MSCALE), edit=_oldest_rope),
    _first("deepseek_v3", "deepseek_v3", gguf=1e-9),
    _one("deepseek_v3-yarn", "deepseek_v3", num_attention_heads=3, num_key_value_heads=3,
        v_head_dim=12, kv_lora_rank=5,
        **_rope("yarn", 5e4, **_YARN, mscale=1.0, mscale_all_dim=1.0), typical=True, gguf=1e-9),
    _one("deepseek_v3-mscale", "deepseek_v3", q_lora_rank=None, attention_bias=True, **_rope("yarn",
        **_YARN, mscale=1.4, mscale_all_dim=0.6, beta_fast=16.0)),
    _one("deepseek_v3-one-head", "deepseek_v3", num_attention_heads=1, num_key_value_heads=1,
        attention_bias=True, qk_rope_head_dim=2, qk_nope_head_dim=1, **_TIED,
        **_rope("linear", factor=4.0)),
    _first("deepseek_v2-experts", "deepseek_v2", first_k_dense_replace=1, num_hidden_layers=3,
        topk_method="group_limited_greedy", n_group=4, topk_group=2, edit=_later_layers, gguf=1e-9),
    _one("deepseek_v2-greedy", "deepseek_v2", first_k_dense_replace=0, topk_method="greedy",
        n_group=4, topk_group=1, norm_topk_prob=True, n_shared_experts=1, q_lora_rank=None,
        edit=_fused_experts),
    _one("deepseek_v2-groups-of-one", "deepseek_v2", first_k_dense_replace=1,
        topk_method="group_limited_greedy", n_group=8, topk_group=5, routed_scaling_factor=4.0,
        gguf=1e-9),
    _first("deepseek_v3-experts", "deepseek_v3", first_k_dense_replace=1, num_hidden_layers=3,
        n_group=4, topk_group=2, edit=_later_layers, gguf=1e-9),
    _one("deepseek_v3-all-experts", "deepseek_v3", first_k_dense_replace=0, norm_topk_prob=False,
        n_shared_experts=1, routed_scaling_factor=1.0, **_TIED, edit=_fused_experts, gguf=1e-9),
    _first("glm4_moe_lite", "glm4_moe_lite"),
    _one("glm4_moe_lite-experts", "glm4_moe_lite", num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"], edit=_later_layers, gguf=1e-9),
    _one("lfm2", "lfm2", views=True, gguf=1e-9),
    _one("lfm2-bias-tied", "lfm2", conv_bias=True, conv_L_cache=5, **_TIED,
        block_ffn_dim_multiplier=1.3, norm_eps=1e-4, typical=True),
    _first("lfm2_moe", "lfm2_moe", gguf=1e-9),
    _one("lfm2_moe-uncorrected", "lfm2_moe", use_expert_bias=False, norm_topk_prob=False,
        routed_scaling_factor=1.5, num_dense_layers=0, num_experts_per_tok=3,
        tie_word_embeddings=False),
    _first("mamba2", "mamba2", gguf=1e-9),
    _one("mamba2-one-group-bias-tied", "mamba2", n_groups=1, use_bias=True, use_conv_bias=False,
        **_TIED, conv_kernel=3, time_step_limit=[0.03, 0.09], expand=3, head_dim=24, typical=True),
    _one("mamba2-tied", "mamba2", **_TIED, n_groups=1, num_hidden_layers=3, state_size=7,
        gguf=1e-9),
    _one("mamba2-heads-shards", "mamba2", num_heads=8, head_dim=12, n_groups=4, conv_kernel=2,
        chunk_size=7, dtype=torch.bfloat16, shard="40KB"),
    _first("granitemoehybrid", "granitemoehybrid", gguf=1e-9),
    _first("granitemoehybrid-dense", "granitemoehybrid", num_local_experts=0, num_experts_per_tok=0,
        intermediate_size=40, mamba_n_groups=1, **_TIED, edit=_first_types, gguf=1e-9),
    _one("granitemoehybrid-rope-bias", "granitemoehybrid", position_embedding_type="rope",
        attention_bias=True, mamba_proj_bias=True, mamba_conv_bias=False, mamba_expand=1,
        mamba_d_head=8, mamba_d_conv=3, time_step_limit=[0.02, 0.1], num_experts_per_tok=3,
        **_rope("default", 500.0)),
    _one("granitemoehybrid-attention", "granitemoehybrid", layer_types=[_FULL] * 3,
        num_local_experts=0, num_experts_per_tok=0, intermediate_size=40,
        position_embedding_type="rope", gguf=1e-9),
    _first("nemotron_h", "nemotron_h", gguf=1e-9),
    _first("nemotron_h-dense", "nemotron_h", layers_block_type=[_LINEAR, "mlp", _FULL, "mlp"],
        mlp_bias=True, n_groups=1, edit=_pattern, gguf=1e-9),
    _one("nemotron_h-all-kinds", "nemotron_h",
        layers_block_type=["mlp", _LINEAR, "moe", _FULL, "moe", _LINEAR], use_bias=True,
        use_conv_bias=False, time_step_min=0.06, norm_topk_prob=False, n_group=1, topk_group=1,
        conv_kernel=3, num_key_value_heads=6, dtype=torch.bfloat16, shard="60KB",
        edit=_first_types),
    _first("mixtral", "mixtral", gguf=1e-9),
    _one("mixtral-fused", "mixtral", edit=_fused_experts),
    _one("mixtral-window-tied", "mixtral", sliding_window=26, **_TIED, num_key_value_heads=6,
        num_local_experts=3, num_experts_per_tok=3),
    _one("mixtral-one-expert-shards", "mixtral", num_experts_per_tok=1, head_dim=10,
        hidden_act="gelu", num_local_experts=8, dtype=torch.bfloat16, shard="60KB"),
    _first("qwen2_moe", "qwen2_moe", gguf=1e-9),
    _one("qwen2_moe-renormalized", "qwen2_moe", norm_topk_prob=True, qkv_bias=False, **_TIED,
        mlp_only_layers=[1], num_hidden_layers=3),
    _one("qwen2_moe-windows", "qwen2_moe", use_sliding_window=True, sliding_window=21,
        max_window_layers=3, num_hidden_layers=4, decoder_sparse_step=2, edit=_fused_experts),
    _first("qwen3_moe", "qwen3_moe", gguf=1e-9),
    _one("qwen3_moe-mixed", "qwen3_moe", norm_topk_prob=False, decoder_sparse_step=2,
        mlp_only_layers=[3], num_hidden_layers=4, attention_bias=True, **_TIED),
    _one("qwen3_moe-window", "qwen3_moe", use_sliding_window=True, sliding_window=18, head_dim=10,
        num_experts=12, num_experts_per_tok=5, edit=_numbered_experts),
    _first("qwen3_next", "qwen3_next", gguf=1e-9),
    _one("qwen3_next-mixed", "qwen3_next", norm_topk_prob=False, decoder_sparse_step=2,
        mlp_only_layers=[3], num_hidden_layers=4, attention_bias=True, **_TIED, layer_types=None,
        full_attention_interval=2, linear_num_value_heads=2, linear_conv_kernel_dim=2,
        **_rope("default", 5e4, partial_rotary_factor=0.5)),
    _one("qwen3_next-one-key-head", "qwen3_next", num_key_value_heads=1, linear_num_key_heads=1,
        linear_num_value_heads=5, linear_key_head_dim=7, head_dim=10, num_experts=5,
        num_experts_per_tok=3, **_rope("default", partial_rotary_factor=0.6), edit=_fused_experts,
        gguf=1e-9),
    _one("qwen3_next-shards", "qwen3_next", head_dim=32, dtype=torch.bfloat16, shard="60KB"),
    _first("qwen3_5", "qwen3_5_text", gguf=1e-9),
    _one("qwen3_5-heads-of-their-own", "qwen3_5_text", linear_num_key_heads=3,
        linear_num_value_heads=3, linear_conv_kernel_dim=3, attention_bias=True, **_TIED,
        num_key_value_heads=6, **_rope("yarn", **_YARN, partial_rotary_factor=0.5)),
    _one("qwen3_5-period", "qwen3_5_text", layer_types=None, num_hidden_layers=5,
        linear_num_key_heads=3, linear_num_value_heads=12, linear_value_head_dim=5,
        num_key_value_heads=1, **_TIED, **_rope("default", 1e6, partial_rotary_factor=1.0),
        gguf=1e-9),
    _one("qwen3_5-old", "qwen3_5_text", edit=_predicted),
    _first("qwen3_5_moe", "qwen3_5_moe_text", gguf=1e-9),
    _one("qwen3_5_moe-attending", "qwen3_5_moe_text", layer_types=[_FULL, _FULL],
        num_hidden_layers=2, num_experts_per_tok=1, num_experts=7,
        shared_expert_intermediate_size=9, **_TIED),
    _first("gpt_oss", "gpt_oss", gguf=1e-9),
    _one("gpt_oss-clamped", "gpt_oss", swiglu_limit=0.5, num_hidden_layers=3, num_local_experts=9,
        num_experts_per_tok=4, sliding_window=30),
    _first("olmoe", "olmoe", gguf=1e-9),
    _one("olmoe-renormalized", "olmoe", norm_topk_prob=True, attention_bias=True,
        num_key_value_heads=None, **_TIED, num_experts_per_tok=4, edit=_fused_experts),
    _one("olmoe-clipped", "olmoe", clip_qkv=0.75, typical=True),
    _first("llama4", "llama4_text", attention_chunk_size=19, floor_scale=11, attn_scale=0.5),
    _one("llama4-published", "llama4_text", interleave_moe_layer_step=1, num_hidden_layers=4,
        **_rope("llama3", 5e5, **_LLAMA3), gguf=1e-5),
    _one("llama4-every-third", "llama4_text", interleave_moe_layer_step=3, num_key_value_heads=3,
        **_TIED, attention_chunk_size=None, no_rope_layers=[1] * 5, attn_temperature_tuning=False,
        gguf=1e-9),
    _one("llama4-plain", "llama4_text", use_qk_norm=False, attn_temperature_tuning=False,
        num_experts_per_tok=3, no_rope_layers=[0, 1, 0], num_hidden_layers=3,
        attention_chunk_size=30, moe_layers=[0, 2], attention_bias=True, **_TIED,
        layer_types=["chunked_attention", _FULL, "chunked_attention"]),
    _one("llama4-whole", "llama4_text", attention_chunk_size=None, floor_scale=64,
        no_rope_layer_interval=2, num_key_value_heads=1, num_hidden_layers=3),
    _first("glm4_moe", "glm4_moe", n_group=4, topk_group=2, use_qk_norm=True, edit=_later_layers,
        gguf=1e-9),
    _one("glm4_moe-plain", "glm4_moe", norm_topk_prob=False, attention_bias=True,
        first_k_dense_replace=0, n_shared_experts=1, head_dim=16, **_TIED,
        routed_scaling_factor=1.0, num_hidden_layers=2, edit=_fused_experts, gguf=1e-9),
)  # fmt: skip


def variant(name: str) -> Variant:
    """The variant of that name."""
    return next(one for one in ZOO if one.name == name)


PACKED = [name for name, one in TYPES.items() if one.blocks]


def packed(model_type: str, **overrides: Any) -> Variant:
    """A variant whose rows are whole blocks, for the packed formats of a GGUF file."""
    return Variant("packed", model_type, TYPES[model_type].blocks | overrides)


def three_layers(model_type: str) -> ModelConfig:
    """Our configuration of that type's first variant, with three layers."""
    one = next(one for one in ZOO if one.model_type == model_type)
    if model_type == "gemma4_text":  # the last one reads the keys and values of the second
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        return one.config(num_hidden_layers=3, num_kv_shared_layers=1, layer_types=kinds)
    if model_type == "nemotron_h":  # which has no other number
        return one.config()
    return one.config(**{"n_layer" if model_type == "gpt2" else "num_hidden_layers": 3})


def _with(model: ModelConfig, *kinds: type) -> list[int]:
    """The layers that have such a part."""
    return [
        i for i, layer in enumerate(model.layers)
        if any(isinstance(part, kinds) for part in layer.parts)
    ]  # fmt: skip


def attending(model: ModelConfig) -> list[int]:
    """The layers whose map is a softmax of scores."""
    return _with(model, AttentionConfig, LatentConfig)


def recurring(model: ModelConfig) -> list[int]:
    """The layers whose map is that of a recurrence."""
    return _with(model, DeltaConfig, SsmConfig)


def keeping_keys(model: ModelConfig) -> list[int]:
    """Those of them whose keys and values are kept, and can be edited."""
    return [i for i, layer in enumerate(model.layers) if layer.attention is not None]


def widened(part, size):
    """A feed-forward part with hidden layers of that size; any other as it is."""
    if isinstance(part, ExpertsConfig) and part.shared is not None:
        part = dataclasses.replace(part, shared=dataclasses.replace(part.shared, hidden=size))
    if isinstance(part, MlpConfig | ExpertsConfig):
        return dataclasses.replace(part, hidden=size)
    return part


def in_blocks(config, *formats, size=64, dense=(), others=None):
    """That model with all widths `size`, and its matrices in blocks of these formats, in turn.

    But for those that are `dense`, by the end of their names, or never in blocks, which have the
    format `others`, if any, and for those whose rows are no whole blocks.
    """
    layers = tuple(
        dataclasses.replace(layer, sublayers=tuple(
            tuple(
                dataclasses.replace(branch, part=widened(branch.part, size)) for branch in branches
            )
            for branches in layer.sublayers
        ))
        for layer in config.layers
    )  # fmt: skip
    narrow = config.embedding.size and size // 2
    embedding = dataclasses.replace(config.embedding, size=narrow)
    config = dataclasses.replace(config, width=size, layers=layers, embedding=embedding)
    apart = {
        name for name in matrices(config)
        if name in in_no_blocks(config) or name.endswith(tuple(dense))
    }  # fmt: skip
    wanted = [one for one in matrices(config).items() if one[0] not in apart]
    turns = [(*one, formats[i % len(formats)]) for i, one in enumerate(wanted)]
    found = {name: format for name, columns, format in turns if columns % BLOCK[format].block == 0}
    return config, found | ({} if others is None else dict.fromkeys(apart, others))


def in_16_bits(model, **dtypes):
    """That model in blocks with matrices in those dtypes, by the ends of their names."""
    config, formats = model
    return config, formats | {
        name: dtype for dtype, ends in dtypes.items() for name in matrices(config)
        if name.endswith(ends)
    }  # fmt: skip


_SMALL = ("Q8_0", "Q4_1", "Q4_0", "Q5_1", "IQ4_NL", "Q5_0", "MXFP4")
_LARGE = ("Q4_K", "Q6_K", "Q5_K", "Q3_K", "IQ4_XS", "Q2_K", "Q8_0")
_LARGE_HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 32, "value_dim": 32, "scale": 32**-0.5}

_WIDE_ROPE = RopeConfig(theta=100.0, dims=16)

# models whose matrices are kept in blocks, several formats in one product: configuration, formats;
# or these alone of one of `BLOCKS`
_IN_BLOCKS = {
    "llama": in_blocks(llama(), *_SMALL),
    "llama in K blocks": in_blocks(
        llama(*(layer(**_LARGE_HEADS),) * 2, head=HeadConfig(tied=True)), *_LARGE, size=256
    ),
    "qk norm": in_blocks(CONFIGS["qk norm"], "Q5_1", "Q8_0"),
    "qk norm over the width": "Q4_0 Q8_0",
    "gpt2": in_blocks(gpt2(heads=4, kv_heads=4), "Q8_0", "Q4_1", "Q5_0"),
    "keys and gates that are dense": in_blocks(llama(), "Q8_0", "Q4_1", dense=("W_k", "W_gate")),
    "a head and embeddings that are dense": in_blocks(
        CONFIGS["window"], "Q4_1", dense=("head.W", "embed.W")
    ),
    "chunks": "Q8_0 Q4_1",
    "norms after": "Q8_0 IQ4_NL",
    "post-norm, narrow embeddings": "Q8_0 Q4_1",
    "parallel with one norm": "Q4_0",
    "offset norms": "Q8_0 Q4_1",
    "caps": "Q4_1 Q8_0",
    "scores lowered by distance": "Q8_0 Q4_1",
    "clipped projections": "Q4_1 Q8_0",
    "sinks": "Q8_0 Q5_1",
    "clamped gates": "Q8_0 Q4_1 MXFP4",
    "gated attention": in_blocks(llama(
        layer(gated=True), layer(gated=True, qk_norm=RMS, qkv_bias=True),
        layer(gated=True, rope=None, kv_heads=1), layer(gated=True, window=3),
        layer(gated=True, window=3, kv=KeysValues(layer=3)),
    ), "Q8_0", "Q4_1"),
    "short convolutions": "Q8_0 Q5_1",
    "partial rotation": in_blocks(CONFIGS["partial rotation"], "Q8_0"),
    "experts": "Q8_0 Q4_1",
    "experts with biases and clamped gates": "Q8_0 MXFP4 Q4_1",
    "experts beside dense layers": "Q5_0 Q8_0",
    "experts in 16 bits": in_16_bits(
        in_blocks(llama(*(layer(mixture(12, renormalized=True, own={"bias": True})),) * 2), "Q8_0"),
        bfloat16=("W_gate", "W_up"), float16="W_down",
    ),
    "experts without gates, alone in their blocks": "Q8_0 Q4_1 Q5_0",
    "gated deltanet": in_blocks(llama(
        sequential(delta(key_dim=24, value_dim=16), GATED, norm=RMS), layer(),
        sequential(delta(key_heads=4, length=2, value_dim=32, tiled=True), GATED, norm=RMS),
    ), "Q8_0", "Q4_1", "Q5_0"),
    "mamba-2": in_blocks(llama(
        sequential(ssm(groups=1, head_dim=16, state=20), norm=RMS),
        sequential(ssm(head_dim=16, bias=True, conv_bias=False), norm=RMS),
        sequential(ssm(head_dim=24, least=0.4, most=0.9, length=3), GATED, norm=RMS), layer(),
    ), "Q8_0", "Q4_1", "Q5_0"),
    "latent attention": in_blocks(llama(
        *(latent(heads=4, rank=32, query_rank=32, value_dim=8, rope=_WIDE_ROPE),) * 2,
        latent(heads=5, rank=64, query_rank=None, value_dim=32, bias=True, rope=_WIDE_ROPE),
        layer(),
    ), "Q8_0", "Q4_1", "Q5_0"),
    "latent attention and experts in 16 bits": in_blocks(llama(
        latent(heads=4, rank=32, query_rank=32, value_dim=8, rope=_WIDE_ROPE),
        latent(
            mixture(8, groups=ExpertGroups(count=4, kept=2, best=1), chosen=3, scale=1.75,
                    own={"shared": SharedConfig(hidden=64)}),
            heads=4, rank=64, query_rank=None, value_dim=32, rope=_WIDE_ROPE,
        ),
    ), "Q8_0", "Q5_1", dense=("W_gate", "W_up", "W_down"), others="bfloat16"),
    "latent attention, its own matrices in 16 bits": in_blocks(llama(
        *(latent(heads=4, rank=32, query_rank=32, value_dim=8, rope=_WIDE_ROPE),) * 2,
    ), "Q8_0", "Q4_1", others="bfloat16"),
    "experts by the best of a group": "Q8_0 Q4_1",
    "experts beside the feed-forward": "Q8_0 Q4_1",
    "latents of another size": in_blocks(llama(
        *(latent(heads=4, rank=32, query_rank=32, value_dim=8),) * 2,
    ), "Q8_0", "Q4_1", "Q5_0"),
    "keys and values of another layer": "Q8_0 Q4_1",
    "values that are normalized keys": "Q4_0 Q8_0",
    "embeddings for each layer": in_blocks(
        llama(
            *(dataclasses.replace(block(
                branch(ATTENTION, RMS, RMS), branch(GATED, RMS, RMS),
                branch(PleConfig(size=32, activation="gelu_tanh"), None, RMS),
            ), scaled=True),) * 2,
            embedding=EmbeddingConfig(scale=4.0, per_layer=LayerEmbeddingConfig(
                vocab=VOCAB, layers=2, size=32, scale=32**0.5, norm=RMS
            )),
        ),
        "Q8_0", "Q4_1",
    ),
}  # fmt: skip
IN_BLOCKS = {
    name: in_blocks(BLOCKS[name], *one.split()) if isinstance(one, str) else one
    for name, one in _IN_BLOCKS.items()
}

# Of these the ones in whose steps PyTorch has a share: learned positions, latents of another size,
# matrices that are dense.
COMPUTED = {
    "gpt2", "latents of another size", "keys and gates that are dense",
    "a head and embeddings that are dense",
}  # fmt: skip
