"""Families without RoPE that change a Llama: learned positions, or ALiBi."""

from __future__ import annotations

from dataclasses import replace

from llmcli.config.embedding import EmbeddingConfig
from llmcli.config.model import LayerConfig
from llmcli.errors import UnsupportedModel
from llmcli.families.draft import Draft
from llmcli.families.record import family
from llmcli.families.unsupported import needs
from llmcli.families.values import LIMITS


@family("""
    gpt_neo: LayerNorm, learned positions, unscaled scores, a window in every other layer
    types: gpt_neo |
    feed_forwards: MLP
    options: function=gelu_tanh rotary=false expansion=4
    keys: rms_norm_eps=layer_norm_epsilon num_hidden_layers=num_layers num_attention_heads=num_heads
        hidden_act=activation_function
    fixed: num_key_value_heads=null head_dim=null attention_bias=false mlp_bias=true
    defaults: layer_norm_epsilon=1e-5 bos_token_id=50256 eos_token_id=50256 tie_word_embeddings=true
        activation_function=gelu_new
    names: qwen
        embed      wte                      token_embd
        pos_embed  wpe                      position_embd
        ln_final   ln_f                     output_norm
        ln1        ln_1                     attn_norm
        ln2        ln_2                     ffn_norm
        attn.q     attn.attention.q_proj    attn_q
        attn.k     attn.attention.k_proj    attn_k
        attn.v     attn.attention.v_proj    attn_v
        attn.o     attn.attention.out_proj  attn_output
        mlp.up     mlp.c_fc                 ffn_up
        mlp.down   mlp.c_proj               ffn_down
        without: mlp.gate
        prefixes: transformer. -
        layer: h.{layer}
        rotary: false
        buffers: attn.attention.bias attn.attention.masked_bias: the mask, which is computed
""")
def gpt_neo(m: Draft) -> None:
    """GPT-Neo (EleutherAI 2021): GPT-2 with a window in every other layer and unscaled scores."""
    m.layer_norms(bias=True)
    m.set_ffn(gated=False)
    m.learned_positions()
    m.set_attention(scale=1.0, out_bias=True)
    key, count, kinds = "attention_types", len(m.attention), list[str]()
    listed = m.values.raw(key) or [[["global", "local"], 12]]
    for item in listed if isinstance(listed, list) else ():
        match item:
            case [list(group), int(times)] if len(group) <= count and times <= count:
                kinds += group * times
    if len(kinds) != count or not all(kind in ("global", "local") for kind in kinds):
        expected = "lists of `global` and `local`, and how often each is repeated"
        raise m.values.invalid(key, f"{expected}, for {count} layers in all")
    window = m.values.integer("window_size", 256, most=LIMITS["positions"])
    m.by_layer(window=[window if kind == "local" else None for kind in kinds])


@family("""
    opt: LayerNorm (350m: after the residual sum), learned positions, ReLU, biases, tied head
    types: opt |
    feed_forwards: MLP
    options: function=relu rotary=false
    keys: intermediate_size=ffn_dim hidden_act=activation_function
    fixed: num_key_value_heads=null head_dim=null rms_norm_eps=1e-5
    defaults: bos_token_id=2 eos_token_id=2 tie_word_embeddings=true
    names: qwen
        pos_embed   embed_positions       position_embd
        embed_proj  project_in            -
        ln_final    final_layer_norm      output_norm
        head_proj   project_out           -
        ln1         self_attn_layer_norm  attn_norm
        ln2         final_layer_norm      ffn_norm
        attn.o      self_attn.out_proj    attn_output
        mlp.up      fc1                   ffn_up
        mlp.down    fc2                   ffn_down
        without: mlp.gate
        prefixes: model.decoder. decoder.
        rotary: false
        buffers: -
        first_position: 2
""")
def opt(m: Draft) -> None:
    """OPT (Meta 2022, arXiv 2205.01068): LayerNorm, learned positions, ReLU.

    Its 350M is post-norm, and has embeddings of another width than its blocks.
    """
    values = m.values
    if not values.flag("do_layer_norm_before", True):
        m.change = _post_norm
    elif values.flag("_remove_final_layer_norm", False):
        named = needs(["a model without a final norm"])
        raise UnsupportedModel(f"this `opt` is not supported{named}")
    affine = values.flag("layer_norm_elementwise_affine", True)
    m.layer_norms(bias=affine, weights=affine)
    biased = values.flag("enable_bias", True)
    m.set_ffn(gated=False, bias=biased)
    m.set_attention(qkv_bias=biased, out_bias=biased)
    size = values.integer("word_embed_proj_dim", m.model.width, most=LIMITS["width"])
    own = None if size == m.model.width else size
    m.others["embedding"] = EmbeddingConfig(positions=m.model.context, size=own)


def _post_norm(number: int, layer: LayerConfig) -> LayerConfig:
    """A post-norm block, see `LayerConfig`: the embeddings enter the first part as they are."""
    (attention,), feed_forward = layer.sublayers
    attention = attention if number else replace(attention, pre_norm=None)
    return replace(layer, sublayers=((attention,), feed_forward), normed_residual=True)


def slopes(heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """ALiBi's slopes (Press et al. 2021): 2^(−largest · i / heads) for i = 1 … heads.

    Beyond the largest power of two heads have every second slope of twice as many.
    """
    power = 1 << heads.bit_length() - 1
    first = [2 ** (-largest * i / power) for i in range(1, power + 1)]
    return (*first, *(2 ** (-largest * i / 2 / power) for i in range(1, 2 * power, 2)))[:heads]


@family("""
    bloom: LayerNorm, of the embeddings, too; scores lowered by distance (ALiBi)
    types: bloom | bloom
    feed_forwards: MLP
    options: function=gelu_tanh expansion=4
    keys: rms_norm_eps=layer_norm_epsilon hidden_size=n_embed num_hidden_layers=n_layer
        num_attention_heads=n_head max_position_embeddings=seq_length
    fixed: num_key_value_heads=null head_dim=null hidden_act=null intermediate_size=null
    defaults: layer_norm_epsilon=1e-5 bos_token_id=1 eos_token_id=2 tie_word_embeddings=true
        max_position_embeddings=2048
    names: qwen
        embed                      word_embeddings                 token_embd
        embed_norm                 word_embeddings_layernorm       token_embd_norm
        ln_final                   ln_f                            output_norm
        attn.q+attn.k+attn.v@head  self_attention.query_key_value  -
        attn.q+attn.k+attn.v       -                               attn_qkv
        attn.o                     self_attention.dense            attn_output
        mlp.up                     mlp.dense_h_to_4h               ffn_up
        mlp.down                   mlp.dense_4h_to_h               ffn_down
        without: attn.q attn.k attn.v mlp.gate
        prefixes: transformer. -
        layer: h.{layer}
        rotary: false
        buffers: -
""")
def bloom(m: Draft) -> None:
    """BLOOM (BigScience 2022, arXiv 2211.05100): ALiBi, and a norm of the embeddings."""
    if m.hf and m.values.flag("apply_residual_connection_post_layernorm", False):
        m.change = lambda number, layer: replace(layer, normed_residual=True)
    m.layer_norms(bias=True)
    m.set_ffn(gated=False, bias=True)
    heads = m.attention[0].heads
    m.set_attention(rope=None, qkv_bias=True, out_bias=True, slopes=slopes(heads))
    m.others["embedding"] = EmbeddingConfig(norm=m.norm)
