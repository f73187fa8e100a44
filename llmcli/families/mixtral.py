"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral with experts in every layer."""

from __future__ import annotations

from llmcli.families import mixture
from llmcli.families.dense import MISTRAL, NO_BIASES
from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import LLAMA, experts
from llmcli.families.read import hf_window


def _mixtral(m: Draft) -> None:
    m.set_attention(window=hf_window(m.values))
    function = m.ffn[0].activation
    m.ffn = [mixture.read(
        m.values, "num_local_experts", function, hidden="intermediate_size", renormalized=True
    )] * len(m.ffn)  # fmt: skip


FAMILIES = (
    llama_like(
        _mixtral,
        name="mixtral",
        words="as mistral, with a mixture of experts in every layer (in GGUF a llama)",
        hf=("mixtral",), gguf=(), feed_forwards=("mixture of experts",),
        fixed=NO_BIASES, defaults={
            **MISTRAL,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        names=LLAMA.but(experts=experts("block_sparse_moe", "w1", "w3", "w2")),
    ),
)  # fmt: skip
