"""Gemma 1 to 3 (Google 2024 and 2025, arXiv 2403.08295, 2408.00118, 2503.19786).

Norms multiply by 1 + w, embeddings by √D, GELU is in its tanh form. Gemma 2 has a norm after each
part, too, soft caps, and windows in every other layer; Gemma 3 normalized queries and keys, and
rotary positions of their own in layers with a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import Branch, LayerConfig, ModelConfig, sequential
from llmcli.families import llama, llama_rules
from llmcli.families.family import Family
from llmcli.families.read import gguf_header, gguf_windows, hf_windows
from llmcli.families.rope import of_layer_type, rope_from_hf
from llmcli.families.rules import Rule
from llmcli.families.values import Values
from llmcli.parts.attention.config import AttentionConfig, RopeConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# What transformers' configurations set where LlamaConfig sets something else; the layers, one after
# the other, of which the last has no window.
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 2,
    "eos_token_id": 1, "max_position_embeddings": 8192,
}  # fmt: skip
_TYPES: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"num_key_value_heads": 16},
    "gemma2": {"num_key_value_heads": 4, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0},
    # files of multimodal models leave these out
    "gemma3_text": {"num_key_value_heads": 4, "max_position_embeddings": 131_072,
                    "vocab_size": 262_208, "num_attention_heads": 8},
}  # fmt: skip
_PERIOD = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of those whose queries are scaled by D / H
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_Caps = tuple[float | None, float | None]  # of scores and of logits
_NORMS_HF = (
    ("input_layernorm", "ln1"), ("post_attention_layernorm", "ln1_post"),
    ("pre_feedforward_layernorm", "ln2"), ("post_feedforward_layernorm", "ln2_post"),
)  # fmt: skip
_NORMS_GGUF = (
    ("attn_norm", "ln1"), ("post_attention_norm", "ln1_post"),
    ("ffn_norm", "ln2"), ("post_ffw_norm", "ln2_post"),
)  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    kind = config["model_type"]
    settings = {**_DEFAULTS, **_TYPES[kind], **config}
    values = Values(settings)
    activation = values.text("hidden_act" if kind == "gemma" else "hidden_activation", "gelu")
    # the first files say `gelu` and mean its tanh form
    settings["hidden_act"] = "gelu_pytorch_tanh" if activation == "gelu" else activation
    settings |= {"model_type": "llama", "mlp_bias": False}
    if kind != "gemma3_text":
        model = llama.from_hf(settings)
        local = None
    else:
        model = llama.from_hf(of_layer_type(settings, "full_attention", theta=1e6))
        theta = values.number("rope_local_base_freq", 10_000.0)
        of_local = of_layer_type(settings, "sliding_attention", theta=theta)
        local = rope_from_hf(
            Values(of_local), head_dim=_attention(model).head_dim, context=model.context
        )
    scale = _attention(model).scale
    windows: list[int | None] = [None] * len(model.layers)
    caps: _Caps = (None, None)
    if kind != "gemma":
        scale = values.number("query_pre_attn_scalar", 256.0) ** -0.5
        windows = hf_windows(values, len(model.layers), period=_PERIOD[kind], window=4096)
        # transformers has no cap of Gemma 3's scores, whatever is written
        score_cap = None if local is not None else values.optional_number(_CAPS[0])
        caps = score_cap, values.optional_number(_CAPS[1])
    return _gemma(model, kind, scale, windows, local, caps, rounded=True)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig. Files say neither the scale of queries nor, often, the windows.

    What they leave out is as llama.cpp has it.
    """
    arch = metadata["general.architecture"]
    rest = {key: value for key, value in metadata.items() if not key.endswith(_CAPS)}
    values, header = Values(metadata, prefix=f"{arch}."), gguf_header(rest, tensors)
    model = llama.from_gguf(rest, tensors, function="gelu_tanh")
    attention = _attention(model)
    scale, local = attention.scale, None
    windows: list[int | None] = [None] * header.layers
    caps: _Caps = (None, None)
    if arch != "gemma":
        if header.layers == _LARGEST[arch]:
            scale = (header.width // attention.heads) ** -0.5
        windows = gguf_windows(
            values, header.layers, period=_PERIOD[arch],
            window=4096 if arch == "gemma2" else None,
        )  # fmt: skip
        assert attention.rope is not None
        if arch == "gemma3":
            theta = values.number("rope.freq_base_swa", 10_000.0)
            local = replace(attention.rope, theta=theta, scaling=None)
            caps = None, values.number(_CAPS[1], 0.0, above=False) or None
        else:
            caps = values.number(_CAPS[0], 50.0), values.number(_CAPS[1], 30.0)
    return _gemma(model, arch, scale, windows, local, caps, rounded=False)


def _attention(model: ModelConfig) -> AttentionConfig:
    found = model.layers[0].attention
    assert found is not None
    return found


def _gemma(
    model: ModelConfig,
    kind: str,
    scale: float,
    windows: Sequence[int | None],
    local: RopeConfig | None,
    caps: _Caps,
    *,
    rounded: bool,
) -> ModelConfig:
    norm = NormConfig(kind="rms", eps=model.final_norm.eps, offset=1.0)

    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        window = windows[number]
        attention = replace(
            attention, scale=scale, window=window, cap=caps[0],
            qk_norm=norm if kind.startswith("gemma3") else None,
            rope=local if window is not None and local is not None else attention.rope,
        )  # fmt: skip
        if kind == "gemma":
            return sequential(attention, mlp, norm=norm)
        return LayerConfig(
            sublayers=tuple(
                (Branch(part=part, pre_norm=norm, post_norm=norm),) for part in (attention, mlp)
            )
        )

    return llama.rebuilt(
        model, block, family="gemma", model_type=kind, final_norm=norm,
        embedding=EmbeddingConfig(scale=model.width**0.5, rounded_scale=rounded),
        head=HeadConfig(tied=model.head.tied, cap=caps[1]),
    )  # fmt: skip


def rules_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """transformers' names."""
    if config.model_type == "gemma":
        return llama_rules.rules_hf(config)
    return llama_rules.rules_hf(config, norms=_NORMS_HF)


def rules_gguf(config: ModelConfig) -> tuple[Rule, ...]:
    """llama.cpp's names; rows of queries and keys lie as we rotate them."""
    if config.model_type == "gemma":
        return llama_rules.rules_gguf(config)
    return llama_rules.rules_gguf(config, norms=_NORMS_GGUF)


FAMILIES = (
    Family(
        name="gemma",
        words="norms of 1 + w, scaled embeddings; norms before and after (gemma2, gemma3), soft "
        "caps, windows by layer with rotary positions of their own",
        hf_types=("gemma", "gemma2", "gemma3_text"),
        gguf_archs=("gemma", "gemma2", "gemma3"),
        hf_multimodal=("gemma3",),
        gguf_windows=True,
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=rules_hf,
        rules_gguf=rules_gguf,
    ),
)
