"""The letters of the formulas that the rungs show: one block's axes, names and norms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmcli.config import ModelConfig
from llmcli.ladder.block import PlainBlock, plain_blocks
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import Activation
from llmcli.parts.norm.config import NormConfig

FIRST_RESIDUAL = "O = X + MHA(LN(X)): T³ is that O"
SECOND_RESIDUAL = "H = O + FFN(LN(O)), with O = T³"


@dataclass(frozen=True, kw_only=True)
class Letters:
    """How one block's formulas write its axes, and its queries and keys.

    `h_kv`: the number of key/value heads; `dv`: size of a head's value; `Q`, `K`, `V`, `C`,
    `QKV`: the columns of all heads side by side; `F`: the hidden size.
    """

    h_kv: str
    dv: str
    Q: str
    K: str
    V: str
    C: str
    QKV: str
    F: str
    mixer: AttentionConfig
    gated: bool

    @classmethod
    def of(cls, layer: PlainBlock, width: int) -> Letters:
        """The letters of a block whose rows are `width` = d wide; equal sizes have one letter."""
        mixer, F = layer.mixer, layer.ffn.hidden
        h_kv = "h" if mixer.kv_heads == mixer.heads else "h_kv"
        dv = "d/h" if mixer.value_dim == mixer.head_dim else "d_v"

        def wide(h: str, heads: int, letter: str, size: int) -> str:
            return "d" if heads * size == width else f"{h}·{letter}"

        Q = wide("h", mixer.heads, "d/h", mixer.head_dim)
        K = wide(h_kv, mixer.kv_heads, "d/h", mixer.head_dim)
        V = wide(h_kv, mixer.kv_heads, dv, mixer.value_dim)
        return cls(
            h_kv=h_kv,
            dv=dv,
            Q=Q,
            K=K,
            V=V,
            C=wide("h", mixer.heads, dv, mixer.value_dim),
            QKV="3d" if Q == K == V == "d" else "d_qkv",
            F="4d" if 4 * width == F else "F",
            mixer=mixer,
            gated=layer.ffn.gated,
        )

    @property
    def shared(self) -> bool:
        """Whether several heads share a key and a value."""
        return self.h_kv != "h"

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are turned by their position."""
        return self.mixer.rope is not None

    def placed(self, letter: str) -> str:
        """What enters the scores: `Q_rot` where a model rotates, `Q_norm` where it normalizes."""
        return placed(letter, self.mixer)

    @property
    def rotation(self) -> str:
        """A line `Q_rot = R(position) Q, …` where the model rotates, empty where it does not."""
        return "\nQ_rot = R(position) Q, K_rot = R(position) K" if self.rotates else ""

    def scaled(self, product: str) -> str:
        """`product / √(d/h)`, or times the model's own scale."""
        return scaled(product, self.mixer)


def placed(letter: str, mixer: AttentionConfig) -> str:
    """What enters the scores: `Q_rot` where a model rotates, `Q_norm` where it normalizes."""
    if mixer.rope is not None:
        return f"{letter}_rot"
    return f"{letter}_norm" if mixer.qk_norm is not None else letter


def usual(mixer: AttentionConfig) -> bool:
    """Whether scores are divided by √(d/h)."""
    return math.isclose(mixer.scale, mixer.head_dim**-0.5)


def scaled(product: str, mixer: AttentionConfig) -> str:
    """`product / √(d/h)`, or times the model's own scale."""
    return f"{product} / √(d/h)" if usual(mixer) else f"{product} · scale"


def scale(mixer: AttentionConfig) -> str:
    """The scale's value, and why it is that."""
    if not usual(mixer):
        return f"scale = {mixer.scale:.4g}: the model's own, where others take 1/√(d/h)"
    root = f"√(d/h) = √{mixer.head_dim} = {math.sqrt(mixer.head_dim):.4g}"
    return f"{root}: not √d, for a head's queries and keys are d/h wide"


def norm_formulas(formula: str, config: NormConfig) -> tuple[str, str, str]:
    """Of `T¹ = norm(X)`: the mean (empty for RMSNorm, which has none), the square, the norm."""
    name, _, of = formula.removesuffix(")").partition(" = norm(")
    if config.kind == "layer":
        shift = " + b" if config.bias else ""
        out = f"{name} = LayerNorm({of}) = ({of} − μ)/√(σ² + ε) · w{shift}"
        return f"μ = mean({of})", f"σ² = mean(({of} − μ)²)", out
    square = f"mean({of}²)" if len(of) == 1 else f"mean(({of})²)"
    return "", square, f"{name} = RMSNorm({of}) = {of}/√({square} + ε) · w"


def layer_formula(kind: Activation, *, gated: bool, row: str = "", small: bool = False) -> str:
    """The feed-forward's hidden layer after its activation; `small` letters for a vector."""
    L, U, G = ("l", "u", "g") if small else ("L", "U", "G")
    if gated:
        return f"{L}{row} = Activation({G}{row}) ∘ {U}{row}, Activation = {kind}"
    return f"{L}{row} = Activation({U}{row}), Activation = {kind}"


def head_size(config: ModelConfig) -> str:
    """What a head's size is called: `d/h`, as long as the heads share the width among them."""
    divided = all(layer.mixer.divides(config.width) for layer in plain_blocks(config))
    return "d/h" if divided else "d_k"
