"""GPT-2."""

from __future__ import annotations

from llmcli.errors import UnsupportedModel
from llmcli.families.draft import Draft
from llmcli.families.record import family
from llmcli.families.values import LIMITS


@family("""
    gpt2: LayerNorm, learned positions, GELU MLP, biases, tied head
    types: gpt2 | gpt2
    ran: tiny
    feed_forwards: MLP
    options: function=gelu_tanh rotary=false expansion=4
    keys: rms_norm_eps=layer_norm_epsilon hidden_size=n_embd max_position_embeddings=n_positions
        intermediate_size=n_inner num_attention_heads=n_head num_hidden_layers=n_layer
        hidden_act=activation_function
    metadata: attention.head_count_kv=null attention.key_length=null attention.value_length=null
    fixed: num_key_value_heads=null head_dim=null attention_bias=true mlp_bias=true
    defaults: layer_norm_epsilon=1e-5 bos_token_id=50256 eos_token_id=50256 tie_word_embeddings=true
    names: qwen
        embed                 wte          token_embd
        pos_embed             wpe          position_embd
        ln_final              ln_f         output_norm
        ln1                   ln_1         attn_norm
        ln2                   ln_2         ffn_norm
        attn.q+attn.k+attn.v  attn.c_attn  attn_qkv
        attn.o                attn.c_proj  attn_output
        mlp.up                mlp.c_fc     ffn_up
        mlp.down              mlp.c_proj   ffn_down
        without: attn.q attn.k attn.v attn.q_norm attn.k_norm mlp.gate
        conv1d: true
        rotary: false
        prefixes: transformer. -
        layer: h.{layer}
        buffers: attn.bias: the causal mask, which is computed
        buffers: attn.masked_bias: the mask's value, which is computed
""")
def gpt2(m: Draft) -> None:
    """GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU MLP, biases, tied head."""
    m.layer_norms(bias=True)
    m.learned_positions()
    m.set_attention(qkv_bias=True, out_bias=True)
    m.set_ffn(gated=False, bias=True)
    if not m.hf:
        return
    if m.values.flag("add_cross_attention", False):
        raise UnsupportedModel("GPT-2 with cross-attention is not supported")
    m.values.integer("max_position_embeddings", most=LIMITS["positions"])  # is required
    scale = m.attention[0].scores.scale if m.values.flag("scale_attn_weights", True) else 1.0
    by_layer = m.values.flag("scale_attn_by_inverse_layer_idx", False)
    m.by_layer(scale=[scale / (i + 1 if by_layer else 1) for i in range(len(m.attention))])
