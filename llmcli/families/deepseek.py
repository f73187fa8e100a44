"""DeepSeek-V2 and V3 (2024, arXiv 2405.04434, 2412.19437) and GLM-4.7-Flash.

Latent attention; a mixture of experts with a shared expert in all layers but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.errors import UnsupportedModel
from llmcli.families import llama, mixture
from llmcli.families.family import Family
from llmcli.families.names import QWEN, Names
from llmcli.families.read import gguf_header
from llmcli.families.rope import GGUF_YARN, scores_yarn_from_gguf, scores_yarn_from_hf
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.experts.config import ExpertsConfig
from llmcli.parts.latent.config import LatentConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

_NORM = NormConfig(kind="rms", eps=1e-6)  # of latents, independent of `rms_norm_eps`

# content dimensions of a head come first; old GGUF files have `attn_kv_b`
_LATENT_QUERIES = QWEN.but("""
    attn.q_latent             self_attn.q_a_proj            attn_q_a
    attn.q_latent_norm        self_attn.q_a_layernorm       attn_q_a_norm
    attn.q+attn.q_pe@head     self_attn.q_b_proj            attn_q_b
    attn.kv_latent+attn.k_pe  self_attn.kv_a_proj_with_mqa  attn_kv_a_mqa
    attn.kv_latent_norm       self_attn.kv_a_layernorm      attn_kv_a_norm
    attn.k+attn.v@head        self_attn.kv_b_proj           attn_kv_b
    attn.k                    -                             attn_k_b|by_head|shape
    attn.v                    -                             attn_v_b|shape
""", without="attn.q_norm attn.k_norm attn.q", predicts=True)
_QUERIES = _LATENT_QUERIES.but("attn.q+attn.q_pe@head  self_attn.q_proj  attn_q")

_KINDS = ("dense", "sparse")  # layer types in `mlp_layer_types`

# defaults of the configuration classes that differ from LlamaConfig's
_EVERY: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _EVERY | {
        "first_k_dense_replace": 0, "bos_token_id": 1, "eos_token_id": 2, "n_routed_experts": 64,
        "n_shared_experts": 2, "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _EVERY | {
        "first_k_dense_replace": 3, "max_position_embeddings": 4096, "n_routed_experts": 256,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": _EVERY | {
        "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
    },
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    kind = config["model_type"]
    settings = {**_DEFAULTS[kind], **config}
    values = Values(settings)
    if not values.flag("rope_interleave", True):
        raise UnsupportedModel("`rope_interleave` = `false` is not supported")
    head = {"num_key_value_heads": None, "head_dim": settings["qk_rope_head_dim"]}
    mlp = {} if kind == "deepseek_v2" else {"mlp_bias": False}
    model = llama.from_hf({**settings, **head, **mlp, "model_type": "llama"}, rotated=None)
    content = values.integer("qk_nope_head_dim", most=MOST["head_dim"])
    rotated, rank = llama.first_attention(model), None
    assert rotated.rope is not None
    if values.has("q_lora_rank"):
        rank = values.integer("q_lora_rank", most=MOST["width"])
    attention = LatentConfig(
        heads=rotated.heads, content=content, query_rank=rank, rope=rotated.rope, norm=_NORM,
        value_dim=values.integer("v_head_dim", most=MOST["head_dim"]),
        rank=values.integer("kv_lora_rank", most=MOST["width"]),
        scale=(content + rotated.rope.dims) ** -0.5 * scores_yarn_from_hf(values),
        bias=values.flag("attention_bias", False),
    )  # fmt: skip
    dense = _dense(values, len(model.layers))

    def block(number: int, _: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        ffn = mlp if dense[number] else mixture.from_hf(
            values, mlp.activation, second=kind == "deepseek_v2"
        )  # fmt: skip
        return sequential(attention, ffn, norm=model.final_norm)

    return llama.rebuilt(model, block, family="deepseek", model_type=kind)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig. Files older than llama.cpp's latent cache have other lengths."""
    header = gguf_header(metadata, tensors, mixtures=mixture.GGUF_ARCHS)
    values, later = header.values, "attention.key_length_mla"
    length, value = "attention.key_length", "attention.value_length"
    if values.has(later):
        length, value = later, "attention.value_length_mla"
    rotated = values.integer("rope.dimension_count", most=MOST["head_dim"])
    head_dim = values.integer(length, least=rotated + 1, most=MOST["head_dim"])
    heads = {"attention.head_count_kv": values.raw("attention.head_count"),
             "attention.key_length": rotated, "attention.value_length": rotated}  # fmt: skip
    model = llama.from_gguf(
        {**metadata, **{f"{header.arch}.{key}": one for key, one in heads.items()}}, tensors
    )
    first, rank = llama.first_attention(model), None
    assert first.rope is not None
    if values.has("attention.q_lora_rank"):
        rank = values.integer("attention.q_lora_rank", most=MOST["width"])
    rope, factor = scores_yarn_from_gguf(first.rope, values)
    attention = LatentConfig(
        heads=first.heads, content=head_dim - rotated, query_rank=rank, rope=rope, norm=_NORM,
        value_dim=values.integer(value, most=MOST["head_dim"]),
        rank=values.integer("attention.kv_lora_rank", most=MOST["width"]),
        scale=head_dim**-0.5 * factor,
    )  # fmt: skip

    def block(number: int, _: AttentionConfig, ffn: MlpConfig | ExpertsConfig) -> LayerConfig:
        return sequential(attention, ffn, norm=model.final_norm)

    experts = mixture.found_in(model)
    second = experts is not None and experts.routing.scores == "softmax"
    kind = "deepseek_v2" if second else "deepseek_v3"
    return llama.rebuilt(model, block, family="deepseek", model_type=kind)


def _dense(values: Values, layers: int) -> list[bool]:
    """Whether each layer has a dense feed-forward instead of experts."""
    if values.has("mlp_layer_types"):
        listed = values.raw("mlp_layer_types")
        if not isinstance(listed, list) or len(listed) != layers or set(listed) - {*_KINDS}:
            raise values.wrong("mlp_layer_types", "`dense` or `sparse` for each layer")
        return [one == "dense" for one in listed]
    first = values.integer("first_k_dense_replace", 1, least=0, most=MOST["layers"])
    step = values.integer("moe_layer_freq", 1, most=MOST["layers"])
    return [layer < first or layer % step > 0 for layer in range(layers)]


def _names(config: ModelConfig) -> Names:
    part = config.layers[0].parts[0]
    return _QUERIES if getattr(part, "query_rank", None) is None else _LATENT_QUERIES


FAMILIES = (Family(
    name="deepseek", words="latent attention: a cache of latents, and of one rotated key for all "
    "heads; experts of groups and a shared one, dense first layers",
    hf_types=("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), gguf_archs=("deepseek2",),
    gguf_reads=GGUF_YARN[2:], from_hf=from_hf, from_gguf=from_gguf, 
    rules_hf=lambda config: _names(config).hf(config),
    rules_gguf=lambda config: _names(config).gguf(config), mixers=("latent attention",),
    feed_forwards=("mixture of experts", "gated MLP"),
),)  # fmt: skip
