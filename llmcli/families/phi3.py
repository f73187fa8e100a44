"""Phi-3 and Phi-4 (Microsoft 2024, arXiv 2404.14219, 2412.08905): Llama with fused tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import QWEN
from llmcli.families.read import GGUF_WINDOWS, hf_window
from llmcli.families.values import MOST


def _longrope(settings: dict[str, Any]) -> Mapping[str, Any]:
    """Early files call longrope `su` or `yarn`."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = settings.get(key)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type"))
            kind = "longrope" if kind in ("su", "yarn") else kind
            own = {**rope, **({} if kind is None else {"rope_type": kind})}
            settings = {**settings, key: own}
    return settings


def _phi3(m: Draft) -> None:
    if m.hf:
        window = hf_window(m.values)
    else:  # 0 is none
        key = "attention.sliding_window"
        window = m.values.integer(key, 0, least=0, most=MOST["positions"]) or None
    m.set_attention(window=window)


FAMILIES = (
    llama_like(
        _phi3,
        name="phi3", words="as llama with fused projections, partial rotary positions, a window",
        hf=("phi3",), gguf=("phi3",), gguf_reads=GGUF_WINDOWS,
        prepare=_longrope, rotated=1.0, fixed={"attention_bias": False, "mlp_bias": False},
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1,
            "original_max_position_embeddings": 4096, "eos_token_id": 32000,
        },
        names=QWEN.but("""
            attn.q+attn.k+attn.v  self_attn.qkv_proj  attn_qkv
            mlp.gate+mlp.up       mlp.gate_up_proj    ffn_up
        """, without="mlp.gate mlp.up"),
    ),
)  # fmt: skip
