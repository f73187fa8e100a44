"""How the formulas write one model: the letters of its axes, the names of its tensors, its norms.

Letters are the documents': n tokens, d width, h heads, d/h size of a head, F hidden size, v
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmcli.config import ModelConfig
from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig

FIRST_RESIDUAL = "O = X + MHA(LN(X)): T³ is that O"
SECOND_RESIDUAL = "H = O + FFN(LN(O)), with O = T³"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def numbered(number: int) -> str:
    """`T¹`, `T²`, …: the steps of a block in execution order."""
    return f"T{number}".translate(_SUPERSCRIPTS)


def first_attention(config: ModelConfig) -> AttentionConfig:
    """The attention whose axes the letters are: that of the first block which has one."""
    return next(layer.attention for layer in config.layers if layer.attention is not None)


def first_mlp(config: ModelConfig) -> MlpConfig | None:
    """The first feed-forward of the model, None where it has none."""
    parts = (part for layer in config.layers for part in layer.parts)
    return next((part for part in parts if isinstance(part, MlpConfig)), None)


@dataclass(frozen=True, kw_only=True)
class Notation:
    """How the first block's formulas write its axes, and its queries, keys and values.

    `h_kv`: the number of key/value heads; `dv`: size of a head's value; `Q`, `K`, `V`, `C`,
    `QKV`: the columns of all heads side by side; `F`: the hidden size; `T`: what attention reads.
    Equal sizes have one letter.
    """

    h_kv: str
    dv: str
    Q: str
    K: str
    V: str
    C: str
    QKV: str
    F: str
    T: str
    mixer: AttentionConfig
    gated: bool

    @classmethod
    def of(cls, config: ModelConfig) -> Notation:
        """That of a model with attention, whose rows are d = `config.width` wide."""
        mixer, ffn, width = first_attention(config), first_mlp(config), config.width
        h_kv = "h" if mixer.kv_heads == mixer.heads else "h_kv"
        dv = "d/h" if mixer.value_dim == mixer.head_dim else "d_v"

        def wide(h: str, heads: int, letter: str, size: int) -> str:
            return "d" if heads * size == width else f"{h}·{letter}"

        Q = wide("h", mixer.heads, "d/h", mixer.head_dim)
        K = wide(h_kv, mixer.kv_heads, "d/h", mixer.head_dim)
        V = wide(h_kv, mixer.kv_heads, dv, mixer.value_dim)
        branches = (branch for layer in config.layers for branch in layer.branches)
        reader = next(branch for branch in branches if branch.part == mixer)
        return cls(
            h_kv=h_kv,
            dv=dv,
            Q=Q,
            K=K,
            V=V,
            C=wide("h", mixer.heads, dv, mixer.value_dim),
            QKV="3d" if Q == K == V == "d" else "d_qkv",
            F="4d" if ffn is not None and 4 * width == ffn.hidden else "F",
            T="X" if reader.pre_norm is None else numbered(1),
            mixer=mixer,
            gated=ffn is not None and ffn.gated,
        )

    @property
    def shared(self) -> bool:
        """Whether several heads share a key and a value."""
        return self.h_kv != "h"

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated by their position."""
        return self.mixer.rope is not None

    @property
    def wide_norms(self) -> tuple[str, str]:
        """The columns of queries and of keys that one norm covers: a head's, or those of all."""
        return (self.Q, self.K) if self.mixer.qk_norm_wide else ("d/h", "d/h")

    def placed(self, letter: str) -> str:
        """What enters the products of attention: `Q_rot`, `V_norm`, or the letter alone."""
        return placed(letter, self.mixer)

    @property
    def rotation(self) -> str:
        """A line `Q_rot = R(position) Q, …` where the model rotates, empty where it does not."""
        return "\nQ_rot = R(position) Q, K_rot = R(position) K" if self.rotates else ""

    def scaled(self, product: str) -> str:
        """`product / √(d/h)`, or times the model's own scale, soft-capped where the model does."""
        return capped(scaled(product, self.mixer), self.mixer)


def placed(letter: str, mixer: AttentionConfig) -> str:
    """What enters the products of attention: a query or key rotated, normalized, or as it is."""
    if letter in "vV":
        return f"{letter}_norm" if mixer.kv.norm is not None else letter
    if letter in "qQ" and mixer.growth is not None:
        return f"{letter}_grown"
    if mixer.rope is not None:
        return f"{letter}_rot"
    return f"{letter}_norm" if mixer.qk_norm is not None else letter


def usual(mixer: AttentionConfig) -> bool:
    """Whether scores are divided by √(d/h)."""
    return math.isclose(mixer.scale, mixer.head_dim**-0.5)


def scaled(product: str, mixer: AttentionConfig) -> str:
    """`product / √(d/h)`, or times the model's own scale."""
    return f"{product} / √(d/h)" if usual(mixer) else f"{product} · scale"


def capped(score: str, mixer: AttentionConfig) -> str:
    """`cap · tanh(score / cap)` where scores are soft-capped."""
    return score if mixer.cap is None else f"cap · tanh({score} / cap)"


def scale(mixer: AttentionConfig) -> str:
    """The scale's value, and why it is that."""
    if not usual(mixer):
        return f"scale = {mixer.scale:.4g}: the model's own, where others take 1/√(d/h)"
    root = f"√(d/h) = √{mixer.head_dim} = {math.sqrt(mixer.head_dim):.4g}"
    return f"{root}: not √d, for a head's queries and keys are d/h wide"


def softmax_formula(a: str, scores: str, mixer: AttentionConfig) -> str:
    """`A = softmax(S + M)`; with sinks one more score in each row, which no key belongs to."""
    return f"{a} = softmax([{scores}, sink])" if mixer.sinks else f"{a} = softmax({scores})"


def growth_formula(q: str, before: str, mixer: AttentionConfig) -> str:
    """Queries that grow with their position: the factor on `before`."""
    assert mixer.growth is not None
    beta, original = mixer.growth.beta, mixer.growth.original
    return f"{q} = {before} · (1 + {beta:g} ln(1 + ⌊position / {original}⌋))"


def norm_formulas(y: str, x: str, config: NormConfig) -> tuple[str, str, str]:
    """Of `y = norm(x)`: the mean (empty for RMSNorm, which has none), the square, the norm."""
    weight = f" · ({config.offset:g} + w)" if config.offset else " · w"
    weight = weight if config.weights else ""
    if config.kind == "layer":
        shift = " + b" if config.bias else ""
        out = f"{y} = LayerNorm({x}) = ({x} − μ)/√(σ² + ε){weight}{shift}"
        return f"μ = mean({x})", f"σ² = mean(({x} − μ)²)", out
    square = f"mean({x}²)" if len(x) == 1 else f"mean(({x})²)"
    return "", square, f"{y} = RMSNorm({x}) = {x}/√({square} + ε){weight}"


def layer_formula(L: str, U: str, G: str, config: MlpConfig) -> str:
    """The hidden layer after its activation: of U, or of the gates G times U."""
    kind = f", Activation = {config.activation}"
    if not config.gated:
        return f"{L} = Activation({U}){kind}"
    if (clamp := config.clamp) is not None:
        limit = f"{clamp.limit:g}"
        up = f"(clip({U}, ±{limit}) + {clamp.offset:g})"
        return f"{L} = Activation(min({G}, {limit})) ∘ {up}{kind}"
    return f"{L} = Activation({G}) ∘ {U}{kind}"


def embedding_formula(config: ModelConfig, id: str, position: str) -> str:
    """`W_E[ids] · scale + W_P[positions]`, as far as the model has it."""
    factor = config.embedding.scale
    scaled = "" if factor == 1 else f" · {factor:.5g}"
    learned = "" if config.embedding.positions is None else f" + W_P[{position}]"
    return f"W_E[{id}]{scaled}{learned}"


def finished_logits(raw: str, config: ModelConfig) -> str:
    """The formula of logits that are soft-capped or scaled, empty where they are neither."""
    head = config.head
    if head.cap is not None:
        return f"logits = {head.cap:g} · tanh({raw} / {head.cap:g})"
    return "" if head.scale == 1 else f"logits = {raw} · {head.scale:.4g}"


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
