"""Granite (IBM 2024, arXiv 2405.04324): Llama with multipliers."""

from __future__ import annotations

from llmcli.families.draft import Draft, llama_like
from llmcli.families.read import GGUF_SCALES
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig

# in the order of `GGUF_SCALES`; logits are divided by the last
_HF = ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling")


def _granite(m: Draft) -> None:
    """In GGUF `rope.scaling.finetuned` says whether queries and keys use RoPE."""
    defaults = (m.attention[0].scale, 1.0, 1.0, 1.0)
    scale, m.multiplier, embedding, logits = (
        m.multiplier_of(hf, gguf, gguf_default=default)
        for hf, gguf, default in zip(_HF, GGUF_SCALES, defaults, strict=True)
    )
    m.set_attention(scale=scale)
    if not m.hf and not m.values.flag("rope.scaling.finetuned", True):
        m.set_attention(rope=None)
    m.others["embedding"] = EmbeddingConfig(scale=embedding)
    m.others["head"] = HeadConfig(tied=m.model.head.tied, scale=1 / logits)


GRANITE = llama_like(
    _granite,
    name="granite",
    words="as llama with multipliers of embeddings, scores, residual parts and logits",
    hf=("granite",), gguf=("granite",), gguf_reads=GGUF_SCALES,
    defaults={"bos_token_id": 1, "eos_token_id": 2},
)  # fmt: skip
FAMILIES = (GRANITE,)
