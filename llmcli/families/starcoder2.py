"""StarCoder 2 (BigCode 2024, arXiv 2402.19173): LayerNorm, biases, no gate."""

from __future__ import annotations

from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import QWEN
from llmcli.families.read import hf_window


def _starcoder2(m: Draft) -> None:
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    if m.hf:  # llama.cpp has no window here
        biased = m.values.flag("use_bias", True)
        m.set_attention(qkv_bias=biased, out_bias=biased, window=hf_window(m.values))
        m.set_ffn(bias=biased)


FAMILIES = (
    llama_like(
        _starcoder2,
        name="starcoder2",
        words="LayerNorm and biases, rotary positions, grouped queries, a feed-forward without "
        "a gate",
        hf=("starcoder2",), gguf=("starcoder2",), feed_forwards=("MLP",), function="gelu_tanh",
        eps="norm_epsilon", fixed={"attention_bias": None, "mlp_bias": None},
        defaults={
            "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 50_256,
            "eos_token_id": 50_256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
        },
        names=QWEN.but("""
            mlp.up    mlp.c_fc    ffn_up
            mlp.down  mlp.c_proj  ffn_down
        """, without="mlp.gate"),
    ),
)  # fmt: skip
