"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): post-norms and per-head q/k norms.

In models with sliding windows, only the windowed layers use RoPE.
"""

from __future__ import annotations

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import AFTER, QWEN
from llmcli.families.read import GGUF_WINDOWS


def _exaone4(m: Draft) -> None:
    m.pre, m.post = False, True
    m.set_attention(qk_norm=m.norm)
    if m.hf and not m.values.has("sliding_window"):
        return
    windows = m.windows(4)
    if m.hf or any(windows):
        m.by_layer(window=windows, rope=[m.attention[0].rope if one else None for one in windows])


FAMILIES = (
    llama_like(
        _exaone4,
        name="exaone4",
        words="norms after the parts, normalized queries and keys; windows in three of four "
        "layers, which alone have rotary positions",
        hf=("exaone4",), gguf=("exaone4",), gguf_reads=GGUF_WINDOWS,
        fixed={"attention_bias": False, "mlp_bias": False},
        defaults={
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2,
            "sliding_window": 4096,
        },
        names=QWEN.but(AFTER, without="ln1 ln2"),
    ),
)  # fmt: skip
