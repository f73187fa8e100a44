"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcli.errors import UnsupportedModel
from llmcli.families.draft import Draft, llama_like
from llmcli.families.names import QWEN
from llmcli.families.values import MOST, Values

_KEYS = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer", "hidden_act": "activation_function",
}  # fmt: skip


def _gpt2(m: Draft) -> None:
    """GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU MLP, biases, tied head."""
    m.layer_norms(bias=True)
    m.learned_positions()
    m.set_attention(qkv_bias=True, out_bias=True)
    m.set_ffn(gated=False, bias=True)
    if not m.hf:
        return
    if m.values.flag("add_cross_attention", False):
        raise UnsupportedModel("GPT-2 with cross-attention is not supported")
    m.values.integer("max_position_embeddings", most=MOST["positions"])  # is required
    scale = m.attention[0].scores.scale if m.values.flag("scale_attn_weights", True) else 1.0
    by_layer = m.values.flag("scale_attn_by_inverse_layer_idx", False)
    m.by_layer(scale=[scale / (i + 1 if by_layer else 1) for i in range(len(m.attention))])


def _with_sizes(settings: dict[str, Any]) -> Mapping[str, Any]:
    width = Values(settings, keys=_KEYS).integer("hidden_size", most=MOST["width"])
    hidden = Values(settings).integer("n_inner", 4 * width, most=MOST["hidden"])
    function = Values(settings).text("activation_function", "gelu_new")
    return {**settings, "n_inner": hidden, "activation_function": function}


GPT2 = llama_like(
    _gpt2,
    name="gpt2", words="LayerNorm, learned positions, GELU MLP, biases, tied head",
    hf=("gpt2",), gguf=("gpt2",), ran=("tiny",), feed_forwards=("MLP",), function="gelu_tanh",
    keys=_KEYS, eps="layer_norm_epsilon", rotary=False, prepare=_with_sizes,
    fixed={"num_key_value_heads": None, "head_dim": None, "attention_bias": True,
           "mlp_bias": True},
    fill=lambda values: dict.fromkeys(
        ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    ),
    defaults={
        "bos_token_id": 50_256, "eos_token_id": 50_256, "tie_word_embeddings": True,
    },
    names=QWEN.but("""
        embed                 wte          token_embd
        pos_embed             wpe          position_embd
        ln_final              ln_f         output_norm
        ln1                   ln_1         attn_norm
        ln2                   ln_2         ffn_norm
        attn.q+attn.k+attn.v  attn.c_attn  attn_qkv
        attn.o                attn.c_proj  attn_output
        mlp.up                mlp.c_fc     ffn_up
        mlp.down              mlp.c_proj   ffn_down
    """, without="attn.q attn.k attn.v attn.q_norm attn.k_norm mlp.gate", conv1d=True,
        rotary=False, prefixes=("transformer.", ""), layer="h.{layer}", buffers=(
            ("attn.bias", "the causal mask, which is computed"),
            ("attn.masked_bias", "the mask's value, which is computed"),
        ),
    ),
)  # fmt: skip
FAMILIES = (GPT2,)
