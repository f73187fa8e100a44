"""What a rung says of one model, and what the letters of its formulas are there."""

from __future__ import annotations

import math
import re

from llmcli.commands.ladder.measure.walk import Rung
from llmcli.config import ModelConfig
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig


def first_attention(config: ModelConfig) -> AttentionConfig:
    """The attention whose axes the letters are: that of the first block which has one."""
    return next(layer.attention for layer in config.layers if layer.attention is not None)


def first_mlp(config: ModelConfig) -> MlpConfig | None:
    """The first feed-forward of the model, None where it has none."""
    parts = (part for layer in config.layers for part in layer.parts)
    return next((part for part in parts if isinstance(part, MlpConfig)), None)


def wording(rung: Rung) -> tuple[tuple[str, str], str]:
    """The rung's `change` and `idea`, as far as its model has what they speak of."""
    config = rung.config
    mixer, ffn = first_attention(config), first_mlp(config)
    shared, rotates = mixer.kv_heads < mixer.heads, mixer.rope is not None
    gates = ffn is not None and ffn.gated
    has = {"shared": shared, "rotates": rotates, "window": mixer.window is not None}
    parts = {
        "rotated_q": " and q = R(position) q" if rotates else "",
        "rotated_k": " and k = R(position) k" if rotates else "",
        "rotation": "; Q = R(position) Q, K = R(position) K" if rotates else "",
        "kept_rotated": " (rotated)" if rotates else "",
        "turned": ", rotated by their positions," if rotates else "",
        "gates": "\nG and U in one product, too" if gates else "",
        "gate_up": ", and of gate and up," if gates else "",
        "kv_heads": "h_kv" if shared else "h",
        "window": mixer.window,
    }

    def said(text: str) -> str:
        text = re.sub(r"(\w+(?: Kᵀ)?) / √\(d/h\)", lambda score: _scaled(score[1], mixer), text)
        return text.format(**parts).replace("d/h", head_size(config))

    idea = " ".join([rung.idea, *(text for name, text in rung.more.items() if has[name])])
    return (said(rung.change[0]), said(rung.change[1])), said(idea)


def _scaled(score: str, mixer: AttentionConfig) -> str:
    """`score / √(d/h)`, or times the model's own scale; soft-capped where the model does that."""
    usual = math.isclose(mixer.scale, mixer.head_dim**-0.5)
    scaled = f"{score} / √(d/h)" if usual else f"{score} · scale"
    return scaled if mixer.cap is None else f"cap · tanh({scaled} / cap)"


def head_size(config: ModelConfig) -> str:
    """What a head's size is called: `d/h`, as long as the heads share the width among them."""
    mixers = (layer.attention for layer in config.layers)
    divided = all(mixer.divides(config.width) for mixer in mixers if mixer is not None)
    return "d/h" if divided else "d_k"


def axis_sizes(config: ModelConfig, *, tokens: int, sequences: int) -> tuple[tuple[str, int], ...]:
    """What the letters of the formulas are for this model and prompt."""
    mixer, ffn = first_attention(config), first_mlp(config)
    return (
        ("n", tokens),
        ("d", config.width),
        ("h", mixer.heads),
        *((("h_kv", mixer.kv_heads),) if mixer.kv_heads != mixer.heads else ()),
        (head_size(config), mixer.head_dim),
        *((("d_v", mixer.value_dim),) if mixer.value_dim != mixer.head_dim else ()),
        *((("F", ffn.hidden),) if ffn is not None else ()),
        ("v", config.vocab),
        ("b", sequences),
        ("layers", len(config.layers)),
    )
