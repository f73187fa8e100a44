"""Readers shared by all families: activations, end ids, windows, the GGUF header."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from llmcli.config.mlp import Activation
from llmcli.errors import CheckpointError, UnsupportedModel
from llmcli.families.rope import GGUF_YARN
from llmcli.families.unsupported import needs
from llmcli.families.values import LIMITS, ConfigReader, shortened

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# transformers' names, grouped by function.
_ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"), "gelu_tanh"
    ),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}

# Metadata read for every architecture: (neutral value, required part).
_GGUF_NEUTRAL: dict[str, tuple[float, str]] = {
    "expert_count": (0, "mixture of experts"),
    "attention.causal": (True, "bidirectional attention"),
}

# llama.cpp reads these for some architectures only, in their `load_arch_hparams` and not in
# `llama_model_base::load_hparams`. In groups, by which a family says what it reads (`gguf_reads`).
GGUF_READS = {
    "windows": ("attention.sliding_window", "attention.sliding_window_pattern"),
    # of scores, part outputs, embeddings and logits
    "scales": ("attention.scale", "residual_scale", "embedding_scale", "logit_scale"),
    "caps": ("attn_logit_softcapping", "final_logit_softcapping"),  # of scores and of logits
    "yarn": GGUF_YARN,
    "yarn_factors": ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
    "parallel": ("use_parallel_residual",),
    "clip": ("attention.clamp_kqv",),
    "alibi": ("attention.max_alibi_bias",),
}
# heads, groups, state (DeltaNet: a key's size), length of the convolution
GGUF_SIZES = ("ssm.time_step_rank", "ssm.group_count", "ssm.state_size", "ssm.conv_kernel")


def activation(values: ConfigReader, key: str, default: Activation) -> Activation:
    """Read an activation function; raises UnsupportedModel for an unknown one."""
    if not values.has(key):
        return default
    name = values.text(key)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"the activation `{shortened(name)}` is not supported",
            hint=f"supported activations: {', '.join(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[name]


def end_ids(
    values: ConfigReader, vocab: int, *, bos: int | None, eos: int | None
) -> tuple[int | None, tuple[int, ...]]:
    """Read `bos_token_id` and `eos_token_id` of a config.json, with the type's defaults."""
    begin = values.ids("bos_token_id", () if bos is None else (bos,), vocab=vocab)
    end = values.ids("eos_token_id", () if eos is None else (eos,), vocab=vocab)
    return (begin[0] if begin else None), end


def hf_window(
    values: ConfigReader, default: int | None = None, *, key: str = "sliding_window"
) -> int | None:
    """The number of keys that a query sees; None if null, `default` if absent."""
    if not values.has(key):
        return None if values.contains(key) else default
    return values.integer(key, most=LIMITS["positions"])


def hf_slides(values: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has a window, by `layer_types`."""
    kinds = values.layer_types(layers, ("full_attention", "sliding_attention"))
    return [kind == "sliding_attention" for kind in kinds]


def hf_windows(
    values: ConfigReader, layers: int, *, period: int, window: int | None
) -> list[int | None]:
    """The window of every layer, by `layer_types`, or all but the last of each `period` layers.

    `sliding_window_pattern` overrides the period. Raises CheckpointError if the size is missing.
    """
    if values.has("layer_types"):
        slides = hf_slides(values, layers)
    else:
        period = values.integer("sliding_window_pattern", period, most=LIMITS["layers"])
        slides = [(index + 1) % period != 0 for index in range(layers)]
    size = hf_window(values, window)
    if any(slides) and size is None:
        raise CheckpointError("layers have windows but `sliding_window` says no size")
    return [size if slide else None for slide in slides]


def hf_rotated(values: ConfigReader, layers: int, *, listed: bool = True) -> list[bool]:
    """Which layers have RoPE: `no_rope_layers` (1), or all but the last of each interval.

    Unless `listed`, an empty list counts as absent.
    """
    key = "no_rope_layers"
    if not values.has(key) or (not listed and values.raw(key) == []):
        interval = values.integer("no_rope_layer_interval", 4, most=LIMITS["layers"])
        return [(index + 1) % interval != 0 for index in range(layers)]
    expected = f"0 or 1 for each of {layers} layers"
    return [bool(one) for one in values.each(key, layers, (0, 1), expected)]


def hf_layer(values: ConfigReader, number: int, usual: Mapping[str, Any]) -> ConfigReader:
    """A layer's head settings, from `per_layer_config` by its number, else `usual`.

    This is how transformers 5 writes models with differing layers.
    """
    key = "per_layer_config"
    if not values.has(key):
        return ConfigReader(usual)
    layers, own = values.raw(key), values.raw(key)
    if isinstance(layers, Mapping):  # keys are zero-padded
        found = (layer for layer in layers if layer.lstrip("0") == f"{number or ''}")
        own = layers.get(next(found, ""), {})
    if not isinstance(own, Mapping) or own.keys() - {"head_dim", "num_key_value_heads"}:
        raise values.invalid(key, "an object of layers' `head_dim` and `num_key_value_heads`")
    return ConfigReader(own)


def gguf_windows(
    values: ConfigReader, layers: int, *, period: int, window: int | None
) -> list[int | None]:
    """The window of every layer of a GGUF file, whose pattern is a period or one flag per layer.

    All None if neither the file nor the architecture (`window`) gives a size.
    """
    key, most = "attention.sliding_window", LIMITS["positions"]
    size = values.integer(key, window or 0, least=0, most=most)
    key = "attention.sliding_window_pattern"
    pattern = values.raw(key)
    if isinstance(pattern, list):
        expected = f"a period, or true or false for each of {layers} layers"
        slides = values.each(key, layers, (True, False), expected)
    else:
        period = values.integer(key, period, most=LIMITS["layers"])
        slides = [index % period < period - 1 for index in range(layers)]
    return [size if slide and size else None for slide in slides]


def gguf_ends(general: ConfigReader, vocab: int) -> tuple[int | None, tuple[int, ...]]:
    """Read the BOS id and the ids that end a text (EOS, EOT, EOM) of GGUF metadata."""
    named = {
        key: general.ids(f"tokenizer.ggml.{key}_token_id", (), vocab=vocab)
        for key in ("eos", "eot", "eom", "bos")
    }
    begin = named.pop("bos")
    ends = dict.fromkeys(i for found in named.values() for i in found)
    return (begin[0] if begin else None), tuple(ends)


def refuse_other_parts(values: ConfigReader, *, mixtures: bool) -> None:
    """Raise UnsupportedModel if GGUF metadata needs an unsupported part; `mixtures` may be read."""
    for key, (neutral, part) in _GGUF_NEUTRAL.items():
        if values.raw(key) not in (None, neutral) and not (mixtures and key == "expert_count"):
            raise UnsupportedModel(
                f"`{values.name(key)}` = `{shortened(values.raw(key))}` is not supported"
                f"{needs([part])}"
            )


def gguf_layers(values: ConfigReader) -> int:
    """The number of layers, without those for multi-token prediction."""
    layers = values.integer("block_count", most=LIMITS["layers"])
    return layers - values.integer("nextn_predict_layers", 0, least=0, most=layers - 1)


def gguf_numbers(values: ConfigReader, key: str, most: int = LIMITS["hidden"]) -> list[int] | None:
    """A number per layer, 0 where it lacks the part; None if all layers have the same."""
    listed, layers = values.raw(key), gguf_layers(values)
    if not isinstance(listed, list):
        return None
    if len(listed) < layers:
        raise values.invalid(key, f"numbers for {layers} layers")
    each = (ConfigReader({key: number}) for number in listed[:layers])
    return [one.integer(key, least=0, most=most) for one in each]


def gguf_ignored(
    metadata: Mapping[str, Any], arch: str, *, reads: Container[str]
) -> dict[str, str]:
    """Metadata (key → value) that llama.cpp reads for other architectures but not for `arch`.

    `reads`: the exceptions that it does read for `arch`.
    """
    known = (key for keys in GGUF_READS.values() for key in keys)
    keys = [f"{arch}.{key}" for key in known if key not in reads]
    return {key: shortened(metadata[key]) for key in keys if metadata.get(key) is not None}


def gguf_vocab(
    metadata: Mapping[str, Any], values: ConfigReader, tensors: Mapping[str, TensorInfo]
) -> int:
    """Rows of the embedding, which may be padded beyond the tokenizer's vocabulary."""
    table = tensors.get("token_embd.weight")
    if table is not None:
        if len(table.shape) != 2 or not 0 < table.shape[0] <= LIMITS["vocab"]:
            raise CheckpointError(f"`token_embd.weight` has the shape {list(table.shape)}")
        return int(table.shape[0])
    listed = metadata.get("tokenizer.ggml.tokens")
    count = len(listed) if isinstance(listed, list) and listed else None
    return values.integer("vocab_size", count, most=LIMITS["vocab"])
