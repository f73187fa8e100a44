"""GPT-NeoX and Pythia (EleutherAI 2022 and 2023, arXiv 2204.06745, 2304.01373).

Parallel attention and feed-forward, each with a LayerNorm; RoPE on a quarter of each head; q, k and
v of a head are stored together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import QWEN
from llmcli.families.read import GGUF_PARALLEL
from llmcli.families.values import Values


def _rope_settings(settings: dict[str, Any]) -> Mapping[str, Any]:
    """Early files have other names for the RoPE settings."""
    found: dict[str, Any] = {}
    for old, new in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        if Values(settings).has(old):
            found[new] = Values(settings).number(old)
    return found | settings


def _neox(m: Draft) -> None:
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    if not m.hf:
        m.set_attention(qkv_bias="blk.0.attn_qkv.bias" in m.tensors)
    m.parallel = 2 if m.values.flag(GGUF_PARALLEL, True) else 0


FAMILIES = (
    llama_like(
        _neox,
        name="gpt_neox",
        words="attention and feed-forward side by side, LayerNorm and biases, a part of each head "
        "rotated",
        hf=("gpt_neox",), gguf=("gptneox",), gguf_reads=(GGUF_PARALLEL,), feed_forwards=("MLP",),
        eps="layer_norm_eps", rotated=0.25, function="gelu", prepare=_rope_settings,
        fixed={"mlp_bias": True, "head_dim": None, "num_key_value_heads": None},
        defaults={
            "max_position_embeddings": 2048, "hidden_act": "gelu", "bos_token_id": 0,
            "eos_token_id": 2, "attention_bias": True,
        },
        names=QWEN.but("""
            embed                      embed_in                   token_embd
            ln_final                   final_layer_norm           output_norm
            head                       embed_out                  output
            head                       lm_head                    -
            attn.q+attn.k+attn.v@head  attention.query_key_value  -
            attn.q+attn.k+attn.v       -                          attn_qkv
            attn.o                     attention.dense            attn_output
            mlp.up                     mlp.dense_h_to_4h          ffn_up
            mlp.down                   mlp.dense_4h_to_h          ffn_down
        """, without="attn.q attn.k attn.v mlp.gate", prefixes=("gpt_neox.", ""), buffers=tuple(
            (f"attention.{one}", "masks and frequencies are computed")
            for one in ("bias", "masked_bias", "rotary_emb.inv_freq")
        )),
    ),
)  # fmt: skip
