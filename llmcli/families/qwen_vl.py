"""The text model of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (Alibaba 2024 and 2025, arXiv 2502.13923).

These are Qwen 2 and 3 with multimodal RoPE sections, one for time and two for image coordinates.
For text all three positions are equal, so sections have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.config import ModelConfig
from llmcli.families import llama
from llmcli.families.family import Family
from llmcli.families.names import QWEN

# the equivalent text model, and the defaults that differ from it
_TYPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {"num_key_value_heads": 8, "rope_theta": 1e6}),
    "qwen2_5_vl_text": ("qwen2", {"num_key_value_heads": 8, "rope_theta": 1e6}),
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}),
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The text model's section of config.json → ModelConfig."""
    kind, defaults = _TYPES[config["model_type"]]
    return llama.from_hf(without_sections({**defaults, **config, "model_type": kind}))


def without_sections(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with `mrope` replaced by default RoPE."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = settings.get(key)
        if isinstance(rope, Mapping):
            named = rope.get("rope_type", rope.get("type", "default"))
            own = {**rope, "rope_type": "default" if named == "mrope" else named}
            settings = {**settings, key: own}
    return settings


FAMILIES = (
    Family(
        name="qwen_vl",
        words="the text model of qwen2_vl, qwen2_5_vl and qwen3_vl: qwen2 and qwen3",
        hf_types=(),
        hf_texts=tuple(_TYPES),
        hf_multimodal=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        gguf_archs=("qwen2vl", "qwen3vl"),
        from_hf=from_hf,
        from_gguf=llama.from_gguf,
        rules_hf=QWEN.hf,
        rules_gguf=QWEN.gguf,
    ),
)
