"""OLMo 2 and 3 (OLMo et al. 2024, arXiv 2501.00656; 2025, arXiv 2512.13961): post-norms, windows.

Each part has a post-norm and no pre-norm; queries and keys are normalized over their full width. In
OLMo 3 three of four layers have a sliding window and unscaled RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import AFTER, QWEN
from llmcli.families.read import GGUF_WINDOWS
from llmcli.families.rope import of_layer_type

_THETA = 500_000.0


def _olmo(m: Draft) -> None:
    m.pre, m.post = False, True
    m.set_attention(qk_norm=m.norm, qk_norm_wide=True)
    if m.kind == "olmo2" and m.hf:
        return
    rope = m.attention[0].rope
    assert rope is not None
    local = m.hf_rope_of_windows(_THETA) if m.hf else replace(rope, scaling=None)
    windows = m.windows(4, hf_default=4096)
    m.by_layer(window=windows, rope=[rope if one is None else local for one in windows])


def _full_attention(settings: dict[str, Any]) -> Mapping[str, Any]:
    if settings["model_type"] == "olmo2":
        return settings
    return of_layer_type(settings, "full_attention", theta=_THETA)


FAMILIES = (
    llama_like(
        _olmo,
        name="olmo",
        words="norms after the parts, queries and keys normalized over the width (olmo2); windows "
        "in three of four layers (olmo3)",
        hf=("olmo2", "olmo3"), gguf=("olmo2",), gguf_reads=GGUF_WINDOWS,
        prepare=_full_attention, fixed={"mlp_bias": False},
        defaults={"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279},
        names=QWEN.but(AFTER, without="ln1 ln2"),
    ),
)  # fmt: skip
