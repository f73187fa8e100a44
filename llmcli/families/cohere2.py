"""Command R7B and A (Cohere 2025, arXiv 2504.00698): parallel attention and feed-forward.

Both read one LayerNorm without bias. Three of four layers use a sliding window; only these have
RoPE, with adjacent dimensions paired.
"""

from __future__ import annotations

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import LLAMA
from llmcli.families.read import GGUF_WINDOWS
from llmcli.parts.embedding.config import HeadConfig


def _cohere2(m: Draft) -> None:
    windows = m.windows(4, hf_default=4096)
    m.layer_norms(bias=False)
    m.parallel = 1
    m.by_layer(window=windows, rope=[m.attention[0].rope if one else None for one in windows])
    scale = m.multiplier_of("logit_scale", "logit_scale", hf_default=0.0625)
    m.others["head"] = HeadConfig(tied=m.model.head.tied, scale=scale)


FAMILIES = (
    llama_like(
        _cohere2,
        name="cohere2",
        words="attention and feed-forward side by side, scaled logits; windows in three of four "
        "layers, which alone have rotary positions",
        hf=("cohere2",), gguf=("cohere2",), gguf_reads=(*GGUF_WINDOWS, "logit_scale"),
        eps="layer_norm_eps", fixed={"mlp_bias": False},
        defaults={
            "max_position_embeddings": 8192, "bos_token_id": 5, "eos_token_id": 255_001,
            "tie_word_embeddings": True,
        },
        names=LLAMA.but(without="ln2", interleaved="always"),
    ),
)  # fmt: skip
