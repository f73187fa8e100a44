"""The texts of a rung for one model, and the sizes that the letters of its formulas stand for."""

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


def wording(rung: type[Rung], config: ModelConfig) -> tuple[tuple[str, str], str]:
    """Formulas before and here, and the idea, of a rung, as far as they apply to a model.

    In these texts `[rotates:…]` is for models that rotate keys, `[shared:…]` where heads share
    keys, `[apart:…]` where they do not, `[gated:…]` with a gated feed-forward, and `[window:…]`
    with a window.
    """
    mixer, ffn = first_attention(config), first_mlp(config)
    shared = mixer.kv_heads < mixer.heads
    holds = {
        "rotates": mixer.rope is not None,
        "shared": shared,
        "apart": not shared,
        "gated": ffn is not None and ffn.gated,
        "window": mixer.window is not None,
    }

    def for_model(text: str) -> str:
        text = re.sub(r"\[(\w+):([^]]*)\]", lambda part: part[2] if holds[part[1]] else "", text)
        text = re.sub(r"(\w+(?: Kᵀ)?) / √\(d/h\)", lambda score: _scaled(score[1], mixer), text)
        return text.replace("{window}", str(mixer.window)).replace("d/h", head_size(config))

    return (for_model(rung.before), for_model(rung.here)), " ".join(for_model(rung.idea).split())


def _scaled(score: str, mixer: AttentionConfig) -> str:
    """`score / √(d/h)`, or times the model's own scale; soft-capped where the model does that."""
    usual = math.isclose(mixer.scale, mixer.head_dim**-0.5)
    scaled = f"{score} / √(d/h)" if usual else f"{score} · scale"
    return scaled if mixer.cap is None else f"cap · tanh({scaled} / cap)"


def head_size(config: ModelConfig) -> str:
    """The letter of a head's size: `d/h` if the heads divide the width among them, else `d_k`."""
    mixers = (layer.attention for layer in config.layers)
    divided = all(mixer.divides(config.width) for mixer in mixers if mixer is not None)
    return "d/h" if divided else "d_k"


def axis_sizes(config: ModelConfig, *, tokens: int, sequences: int) -> tuple[tuple[str, int], ...]:
    """The letters of the formulas and their sizes for this model and prompt."""
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
