"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU MLP, biases, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcli.config import LayerConfig, ModelConfig, sequential
from llmcli.errors import UnsupportedModel
from llmcli.families.family import Family
from llmcli.families.names import QWEN
from llmcli.families.read import activation, end_ids, gguf_header
from llmcli.families.values import MOST, Values, require_divisible
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.mlp.config import Activation, MlpConfig
from llmcli.parts.norm.config import NormConfig

if TYPE_CHECKING:
    from llmcli.checkpoints import TensorInfo


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """config.json → ModelConfig. Sizes are required; other defaults are `GPT2Config`'s."""
    values = Values(_with_aliases(config))
    if values.flag("add_cross_attention", False):
        raise UnsupportedModel("GPT-2 with cross-attention is not supported")
    vocab = values.integer("vocab_size", most=MOST["vocab"])
    width = values.integer("n_embd", most=MOST["width"])
    layers = values.integer("n_layer", most=MOST["layers"])
    heads = values.integer("n_head", most=MOST["heads"])
    positions = values.integer("n_positions", most=MOST["positions"])
    head_dim = require_divisible("`n_embd`", width, "`n_head`", heads)
    scale = head_dim**-0.5 if values.flag("scale_attn_weights", True) else 1.0
    by_layer = values.flag("scale_attn_by_inverse_layer_idx", False)
    bos, eos = end_ids(values, vocab, bos=50256, eos=50256)
    return _build(
        vocab=vocab,
        width=width,
        positions=positions,
        heads=heads,
        hidden=values.integer("n_inner", 4 * width, most=MOST["hidden"]),
        eps=values.number("layer_norm_epsilon", 1e-5, above=False),
        kind=activation(values, "activation_function", "gelu_new"),
        scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(layers)),
        tied=values.flag("tie_word_embeddings", True),
        bos=bos,
        eos=eos,
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """GGUF metadata → ModelConfig; llama.cpp uses the tanh GELU for this architecture."""
    header = gguf_header(metadata, tensors)
    values = header.values
    heads = values.integer("attention.head_count", most=MOST["heads"])
    head_dim = require_divisible("the width", header.width, "the number of heads", heads)
    return _build(
        vocab=header.vocab,
        width=header.width,
        positions=header.context,
        heads=heads,
        hidden=values.integer("feed_forward_length", most=MOST["hidden"]),
        eps=values.number("attention.layer_norm_epsilon", above=False),
        kind="gelu_tanh",
        scales=(head_dim**-0.5,) * header.layers,
        tied=header.tied,
        bos=header.bos,
        eos=header.eos,
    )


def _build(
    *,
    vocab: int,
    width: int,
    positions: int,
    heads: int,
    hidden: int,
    eps: float,
    kind: Activation,
    scales: tuple[float, ...],
    tied: bool,
    bos: int | None,
    eos: tuple[int, ...],
) -> ModelConfig:
    norm = NormConfig(kind="layer", eps=eps, bias=True)
    mlp = MlpConfig(hidden=hidden, activation=kind, gated=False, bias=True)

    def layer(scale: float) -> LayerConfig:
        attention = AttentionConfig(
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            value_dim=width // heads,
            scale=scale,
            rope=None,
            qkv_bias=True,
            out_bias=True,
        )
        return sequential(attention, mlp, norm=norm)

    return ModelConfig(
        family="gpt2",
        model_type="gpt2",
        vocab=vocab,
        width=width,
        context=positions,
        layers=tuple(layer(scale) for scale in scales),
        embedding=EmbeddingConfig(positions=positions),
        final_norm=norm,
        head=HeadConfig(tied=tied),
        bos=bos,
        eos=eos,
    )


def _with_aliases(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with generic names mapped to `GPT2Config`'s own."""
    aliases = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    renamed = {own: config[name] for name, own in aliases.items() if name in config}
    return {**renamed, **config}


_NAMES = QWEN.but("""
    embed                 wte          token_embd
    pos_embed             wpe          position_embd
    ln_final              ln_f         output_norm
    ln1                   ln_1         attn_norm
    ln2                   ln_2         ffn_norm
    attn.q+attn.k+attn.v  attn.c_attn  attn_qkv
    attn.o                attn.c_proj  attn_output
    mlp.up                mlp.c_fc     ffn_up
    mlp.down              mlp.c_proj   ffn_down
""", without="attn.q attn.k attn.v attn.q_norm attn.k_norm mlp.gate", conv1d=True, rotary=False,
    prefixes=("transformer.", ""), layer="h.{layer}", buffers=(
        ("attn.bias", "the causal mask, which is computed"),
        ("attn.masked_bias", "the mask's value, which is computed"),
    ),
)  # fmt: skip
FAMILIES = (
    Family(
        name="gpt2",
        words="LayerNorm, learned positions, GELU MLP, biases, tied head",
        hf_types=("gpt2",),
        gguf_archs=("gpt2",),
        ran=("tiny",),
        from_hf=from_hf,
        from_gguf=from_gguf,
        rules_hf=_NAMES.hf,
        rules_gguf=_NAMES.gguf,
        feed_forwards=("MLP",),
    ),
)
