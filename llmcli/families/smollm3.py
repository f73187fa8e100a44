"""SmolLM3 (Hugging Face 2025): Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import LLAMA
from llmcli.families.read import hf_window
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo

# defaults of `SmolLM3Config` that differ from LlamaConfig's
_DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
    "bos_token_id": 128_000, "eos_token_id": 128_001, "tie_word_embeddings": True,
}  # fmt: skip
_INTERVAL = 4


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig."""
    settings = {**_DEFAULTS, **config, "model_type": "llama"}
    model, values = llama.from_hf(settings), Values(settings)
    count = len(model.layers)
    if values.has("no_rope_layers"):  # 1: a layer with rotary positions
        listed = values.raw("no_rope_layers")
        if not isinstance(listed, list) or len(listed) != count or not all(
            isinstance(one, int) and one in (0, 1) for one in listed
        ):  # fmt: skip
            raise values.wrong("no_rope_layers", f"0 or 1 for each of {count} layers")
        rotated = [bool(one) for one in listed]
    else:
        interval = values.integer("no_rope_layer_interval", _INTERVAL, most=MOST["layers"])
        rotated = [(index + 1) % interval != 0 for index in range(count)]
    window = hf_window(values) if values.flag("use_sliding_window", False) else None
    slides = [window is not None and not one for one in rotated]
    if values.has("layer_types"):
        kinds = values.layer_types(count, ("full_attention", "sliding_attention"))
        slides = [kind == "sliding_attention" for kind in kinds]
    return _smollm3(model, rotated, [window if one else None for one in slides])


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig; files do not record which layers lack RoPE."""
    model = llama.from_gguf(metadata, tensors)
    count = len(model.layers)
    rotated = [(index + 1) % _INTERVAL != 0 for index in range(count)]
    return _smollm3(model, rotated, [None] * count)


def _smollm3(
    model: ModelConfig, rotated: Sequence[bool], windows: Sequence[int | None]
) -> ModelConfig:
    def block(number: int, attention: AttentionConfig, mlp: MlpConfig) -> LayerConfig:
        rope = attention.rope if rotated[number] else None
        attention = replace(attention, rope=rope, window=windows[number])
        return sequential(attention, mlp, norm=model.final_norm)

    return llama.rebuilt(model, block, family="smollm3", model_type="smollm3")


FAMILIES = (
    Family(
        name="smollm3",
        words="as llama, some layers without rotary positions",
        hf_types=("smollm3",),
        gguf_archs=("smollm3",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=LLAMA.hf,
        rules_gguf=LLAMA.gguf,
    ),
)
