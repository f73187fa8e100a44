"""GLM-4.5 and its successors (Zhipu 2025, arXiv 2508.06471): sigmoid routing, dense first layers.

RoPE on half of each head, as in other GLMs, but pairing its two halves.
"""

from __future__ import annotations

from llmcli.families import mixture
from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import POST_NORM_2
from llmcli.families.values import MOST


def _glm4_moe(m: Draft) -> None:
    if not m.hf:
        return
    dense = m.values.integer("first_k_dense_replace", 1, least=0, most=MOST["layers"])
    normed = m.values.flag("use_qk_norm", False)
    m.set_attention(out_bias=False, qk_norm=m.norm if normed else None)
    m.ffn[dense:] = [mixture.read_deepseek(m.values, mlp.activation) for mlp in m.ffn[dense:]]


FAMILIES = (
    llama_like(
        _glm4_moe,
        name="glm4_moe",
        words="half of each head rotated, sigmoid routing by groups with a correction, a shared "
        "expert, dense first layers",
        hf=("glm4_moe",), gguf=("glm4moe",), feed_forwards=("mixture of experts", "gated MLP"),
        rotated=0.5, fixed={"mlp_bias": False},
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "bos_token_id": None, "eos_token_id": None, "n_routed_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        },
        names=POST_NORM_2.but(predicts=True),
    ),
)  # fmt: skip
