"""GLM-4 (Zhipu 2024, arXiv 2406.12793): RoPE on half of each head, adjacent dimensions paired.

`glm4` (GLM-4-0414) adds post-norms.
"""

from __future__ import annotations

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import LLAMA


def _glm(m: Draft) -> None:
    m.post = m.kind == "glm4"
    m.set_attention(out_bias=False)


FAMILIES = (
    llama_like(
        _glm,
        name="glm",
        words="half of each head rotated, biases of q, k, v; norms after the parts, too (glm4)",
        hf=("glm", "glm4"), gguf=("chatglm", "glm4"), rotated=0.5, fixed={"mlp_bias": False},
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
            "rms_norm_eps": 0.00000015625, "attention_bias": True, "bos_token_id": None,
            "eos_token_id": [151_329, 151_336, 151_338],
        },
        names=LLAMA.but("""
            ln1_post         post_self_attn_layernorm  post_attention_norm
            ln2_post         post_mlp_layernorm        post_ffw_norm
            mlp.gate+mlp.up  mlp.gate_up_proj          ffn_up
        """, without="mlp.gate mlp.up", interleaved="always"),
    ),
)  # fmt: skip
