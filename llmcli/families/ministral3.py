"""Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.families.draft import Draft, llama_like
from llmcli.families.read import hf_window
from llmcli.families.rope import GGUF_YARN, yarn_as_written
from llmcli.families.values import MOST, Values
from llmcli.parts.attention.config import QueryGrowth

_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _with_rope(settings: dict[str, Any]) -> Mapping[str, Any]:
    rope = settings["rope_parameters"]
    return {**settings, "rope_parameters": _ROPE if rope is None else rope}


def _ministral3(m: Draft) -> None:
    if m.hf:
        rope = Values(_with_rope(m.values.all())).section("rope_parameters") or Values({})
        growth = QueryGrowth(
            beta=rope.number("llama_4_scaling_beta", above=False),
            original=rope.integer("original_max_position_embeddings", most=MOST["positions"]),
        )
        m.set_attention(window=hf_window(m.values), growth=growth)
        return
    rotation = m.attention[0].rope
    assert rotation is not None
    m.set_attention(rope=yarn_as_written(rotation, m.values))  # llama.cpp has no window here
    if beta := m.values.number("attention.temperature_scale", 0.0, above=False):
        key = "rope.scaling.original_context_length"
        original = m.values.integer(key, m.model.context, most=MOST["positions"])
        m.set_attention(growth=QueryGrowth(beta=beta, original=original))


FAMILIES = (
    llama_like(
        _ministral3,
        name="ministral3", words="as mistral with queries that grow with their position",
        hf=("ministral3",), hf_multimodal=("mistral3",), gguf=("mistral3",), gguf_reads=GGUF_YARN,
        prepare=_with_rope, fixed={"attention_bias": False, "mlp_bias": False},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": _ROPE,
        },
    ),
)  # fmt: skip
