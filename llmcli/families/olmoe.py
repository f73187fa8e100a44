"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): experts, full-width q/k norms."""

from __future__ import annotations

from llmcli.errors import UnsupportedModel
from llmcli.families import mixture
from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import QWEN


def _olmoe(m: Draft) -> None:
    m.set_attention(qk_norm=m.norm, qk_norm_wide=True)
    if m.hf:
        if m.values.has("clip_qkv"):
            part = "clipped queries and keys"
            raise UnsupportedModel(f"`clip_qkv` is not supported: it needs `{part}`")
        norm = m.values.flag("norm_topk_prob", False)
        experts = mixture.read(
            m.values, "num_experts", m.ffn[0].activation, hidden="intermediate_size",
            renormalized=norm,
        )  # fmt: skip
        m.ffn = [experts] * len(m.ffn)


FAMILIES = (
    llama_like(
        _olmoe,
        name="olmoe", words="experts in every layer, queries and keys normalized over the width",
        hf=("olmoe",), gguf=("olmoe",), feed_forwards=("mixture of experts",),
        fixed={"mlp_bias": False},
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": None,
            "eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8,
        },
        names=QWEN,
    ),
)  # fmt: skip
