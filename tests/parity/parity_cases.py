"""Tiny random checkpoints in the families' own names: one case per thing that can go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PROMPT = 330  # tokens of the long prompt; every model's context is longer, unless it is scaled

# What the rotary families share. Widths are no powers of two, and the vocabulary is a prime.
_ROPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_BASE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 211,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": _ROPE,
    "mistral": _ROPE | {"sliding_window": None},
    "qwen2": _ROPE,
    "qwen3": _ROPE | {"head_dim": 16},
    "olmo2": _ROPE,
    "lfm2": {
        key: value for key, value in _ROPE.items() if key != "rms_norm_eps"
    } | {
        "intermediate_size": 120, "block_multiple_of": 8, "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: `overrides` of its configuration, how it is stored, what is edited after."""

    name: str
    model_type: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"
    edit: Callable[[Path], None] | None = None
    # the tables depend on how many positions were seen so far: compare with the reference's own
    # piecewise run, not with its whole pass
    history: bool = False


def _rope(kind: str, theta: float = 10_000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


def _old_rope(path: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it: rope_theta, rope_scaling, torch_dtype."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))


def _oldest_rope(path: Path) -> None:
    """As the first releases wrote it: the kind of scaling under `type`, no head_dim."""
    _old_rope(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    scaling = config["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    config.pop("head_dim", None)
    file.write_text(json.dumps(config))


Tensors = dict[str, torch.Tensor]


def _retensor(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def _hub_gpt2(path: Path) -> None:
    """The names of the original `gpt2` repository: no prefix, and each layer's mask as a buffer."""

    def change(tensors: Tensors) -> Tensors:
        out = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        for layer in range(2):
            out[f"h.{layer}.attn.bias"] = torch.ones(512, 512).tril().view(1, 1, 512, 512)
            out[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        return out

    _retensor(path, change)


def _hub_llama(path: Path) -> None:
    """Early Llama checkpoints carry the rotary frequencies of every layer as tensors."""

    def change(tensors: Tensors) -> Tensors:
        extra = {
            f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4)
            for layer in range(2)
        }
        return tensors | extra

    _retensor(path, change)


def _stored_head(path: Path) -> None:
    """A tied checkpoint that stores its head all the same."""
    _retensor(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})


_YARN = {"factor": 4.0, "original_max_position_embeddings": 128}

CASES: tuple[Case, ...] = (
    # GPT-2
    Case("gpt2", "gpt2"),
    Case("gpt2-untied", "gpt2", {"tie_word_embeddings": False}),
    Case("gpt2-odd-heads", "gpt2", {"n_embd": 39, "n_head": 3, "n_inner": 50}),
    Case("gpt2-one-head", "gpt2", {"n_head": 1, "n_layer": 1}),
    Case(
        "gpt2-layer-scale",
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3, "layer_norm_epsilon": 1e-3},
    ),
    Case("gpt2-unscaled", "gpt2", {"scale_attn_weights": False, "n_embd": 12, "n_head": 3}),
    Case(
        "gpt2-upcast",
        "gpt2",
        {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    ),
    Case("gpt2-gelu", "gpt2", {"activation_function": "gelu"}),
    Case("gpt2-relu", "gpt2", {"activation_function": "relu"}),
    Case("gpt2-tanh-gelu", "gpt2", {"activation_function": "gelu_pytorch_tanh"}),
    Case("gpt2-bf16", "gpt2", dtype=torch.bfloat16),
    Case("gpt2-shards", "gpt2", {"n_layer": 3}, shard="40KB"),
    Case("gpt2-hub-names", "gpt2", edit=_hub_gpt2),
    # Llama
    Case("llama-gqa3", "llama"),
    Case("llama-tied", "llama", {"tie_word_embeddings": True}),
    Case("llama-tied-stored", "llama", {"tie_word_embeddings": True}, edit=_stored_head),
    Case("llama-mha", "llama", {"num_key_value_heads": 6}),
    Case("llama-mqa", "llama", {"num_key_value_heads": 1}),
    Case("llama-no-kv-heads", "llama", {"num_key_value_heads": None}),
    Case("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-attention-bias", "llama", {"attention_bias": True}),
    Case("llama-mlp-bias", "llama", {"mlp_bias": True, "num_hidden_layers": 3}),
    Case("llama-head10", "llama", {"head_dim": 10}),
    Case(
        "llama-wide-heads",
        "llama",
        {"hidden_size": 51, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 34},
    ),
    Case("llama-theta", "llama", _rope("default", 500_000.0)),
    # transformers' Llama rotates whole heads whatever this says
    Case("llama-partial", "llama", {"partial_rotary_factor": 0.5}),
    Case("llama-gelu", "llama", {"hidden_act": "gelu", "rms_norm_eps": 1e-2}),
    Case("llama-tanh-gelu", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Case("llama-relu", "llama", {"hidden_act": "relu"}),
    Case("llama-bf16", "llama", dtype=torch.bfloat16),
    Case("llama-fp16", "llama", {"tie_word_embeddings": True}, dtype=torch.float16),
    Case("llama-shards", "llama", {"num_hidden_layers": 3}, shard="30KB"),
    Case("llama-bf16-shards", "llama", dtype=torch.bfloat16, shard="20KB"),
    Case("llama-hub-tensors", "llama", edit=_hub_llama),
    # rotary scaling
    Case("rope-linear", "llama", _rope("linear", factor=4.0)),
    Case(
        "rope-dynamic",
        "llama",
        {"max_position_embeddings": 128} | _rope("dynamic", factor=2.0),
        history=True,
    ),
    Case("rope-yarn", "llama", _rope("yarn", **_YARN)),
    Case(
        "rope-yarn-mscale",
        "llama",
        _rope("yarn", **_YARN, mscale=1.3, mscale_all_dim=0.7, beta_fast=16.0, beta_slow=2.0),
    ),
    Case("rope-yarn-temperature", "llama", _rope("yarn", **_YARN, attention_factor=1.25)),
    Case(
        "rope-yarn-untruncated", "llama", {"head_dim": 32} | _rope("yarn", **_YARN, truncate=False)
    ),
    Case("rope-yarn-wide", "llama", {"head_dim": 32} | _rope("yarn", **_YARN)),
    Case(
        "rope-llama3",
        "llama",
        {"head_dim": 32}
        | _rope(
            "llama3",
            500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    Case(
        "rope-longrope-short",
        "llama",
        _rope(
            "longrope",
            factor=2.0,
            short_factor=[1.0, 1.1, 1.3, 1.7],
            long_factor=[1.0, 1.5, 2.5, 4.0],
            original_max_position_embeddings=400,
        ),
        history=True,
    ),
    Case(
        "rope-longrope",
        "llama",
        _rope(
            "longrope",
            factor=4.0,
            short_factor=[1.0, 1.1, 1.3, 1.7],
            long_factor=[1.0, 1.5, 2.5, 4.0],
            original_max_position_embeddings=128,
        ),
        history=True,
    ),
    Case("rope-linear-old", "llama", _rope("linear", 5_000.0, factor=2.5), edit=_oldest_rope),
    Case("rope-yarn-old", "qwen2", _rope("yarn", 1e6, **_YARN), edit=_oldest_rope),
    Case(
        "rope-llama3-old",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
        edit=_old_rope,
    ),
    # Mistral
    Case("mistral", "mistral"),
    Case("mistral-window", "mistral", {"sliding_window": 17}),
    Case("mistral-window1", "mistral", {"sliding_window": 1}),
    Case(
        "mistral-window-head",
        "mistral",
        {"sliding_window": 64, "head_dim": 12, "num_hidden_layers": 3},
    ),
    # Qwen2
    Case("qwen2", "qwen2"),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    Case(
        "qwen2-window",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 29,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    Case(
        "qwen2-window-off",
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 29, "max_window_layers": 0},
    ),
    Case(
        "qwen2-layer-types",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 23,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
    # Qwen3
    Case("qwen3", "qwen3"),
    Case("qwen3-tied-bf16", "qwen3", {"tie_word_embeddings": True}, dtype=torch.bfloat16),
    Case("qwen3-bias", "qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    Case(
        "qwen3-window",
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 31,
            "max_window_layers": 1,
            "head_dim": 10,
            "num_key_value_heads": 6,
        },
    ),
    # OLMo 2
    Case("olmo2", "olmo2"),
    Case("olmo2-bias-tied", "olmo2", {
        "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6,
    }),
    # LFM2
    Case("lfm2", "lfm2"),
    Case("lfm2-bias-tied", "lfm2", {
        "conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": True,
        "block_ffn_dim_multiplier": 1.3, "norm_eps": 1e-4,
    }),
)  # fmt: skip


def case(name: str) -> Case:
    """The case of that name."""
    return next(one for one in CASES if one.name == name)


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Random weights with enough spread that a wrong part shows.

    Attention is far from uniform, no norm weight is 1 and no bias 0. Much more spread would only
    amplify rounding: as it is, transformers moves by up to 5e-6 between float32 and float64.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(0.15 * noise)
            else:
                fan_in = parameter.shape[0 if model.config.model_type == "gpt2" else 1]
                gain = 0.9 if any(part in name for part in ("q_proj", "k_proj", "c_attn")) else 0.6
                parameter.copy_(gain * noise / fan_in**0.5)


def build(one: Case, seed: int = 0) -> PreTrainedModel:
    """A random model of the case in its own dtype."""
    config = AutoConfig.for_model(one.model_type, **_BASE[one.model_type] | dict(one.overrides))
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    return model.to(one.dtype)


def write(one: Case, folder: Path) -> Path:
    """Write the case's checkpoint into `folder`, as transformers does."""
    path = folder / one.name
    build(one).save_pretrained(path, max_shard_size=one.shard)
    if one.edit is not None:
        one.edit(path)
    return path


def prompt(batch: int = 1, tokens: int = PROMPT, vocab: int = 211, seed: int = 7) -> torch.Tensor:
    """Random ids `[batch, tokens]`."""
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))
