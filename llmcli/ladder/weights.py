"""A model's parameters as the formulas write them, for every rung the same tensors.

Letters: V vocabulary, d width (the design's D), h heads, k key/value heads, d/h size of a head
(where a model has its own head size, that), F hidden size of the feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llmcli.config import ModelConfig
from llmcli.errors import UnsupportedModel
from llmcli.ladder.block import PlainBlock, plain_blocks
from llmcli.ladder.letters import head_size
from llmcli.nn.decoder import Decoder
from llmcli.ops.rope import frequencies
from llmcli.parts.attention.config import DynamicScaling, LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One block. Matrices are `[in, out]`, so that `Q = T W_q`; None where a part has none.

    `W_q` `[d, h·d/h]`, `W_k`, `W_v` `[d, k·d/h]`, `W_o` `[h·d/h, d]`, `W_up`, `W_gate` `[d, F]`,
    `W_down` `[F, d]`; a bias `b_…` has as many numbers as its matrix has columns. `ln1_w`,
    `ln2_w` `[d]`; `q_norm`, `k_norm` `[d/h]` normalize each head's query and key.
    """

    config: PlainBlock
    ln1_w: Tensor
    ln1_b: Tensor | None
    W_q: Tensor
    b_q: Tensor | None
    W_k: Tensor
    b_k: Tensor | None
    W_v: Tensor
    b_v: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    W_o: Tensor
    b_o: Tensor | None
    ln2_w: Tensor
    ln2_b: Tensor | None
    W_up: Tensor
    b_up: Tensor | None
    W_gate: Tensor | None
    b_gate: Tensor | None
    W_down: Tensor
    b_down: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The whole model. `W_E` `[V, d]`, `W_P` `[positions, d]` or None, `W_head` `[d, V]`.

    `decoder` is the model that these parameters were taken from: views, no copies.
    """

    decoder: Decoder
    config: ModelConfig
    W_E: Tensor
    W_P: Tensor | None
    layers: tuple[LayerWeights, ...]
    ln_w: Tensor
    ln_b: Tensor | None
    W_head: Tensor
    b_head: Tensor | None

    @classmethod
    def of(cls, decoder: Decoder) -> Weights:
        """Views of the decoder's parameters in the formulas' orientation.

        Raises UnsupportedModel for a part that the rungs have no formula for.
        """
        named = _Oriented(decoder)
        layers = tuple(
            _layer(config, f"blocks.{i}", named)
            for i, config in enumerate(plain_blocks(decoder.config))
        )
        found = cls(
            decoder=decoder,
            config=decoder.config,
            W_E=named["embed.W"],
            W_P=named.get("pos_embed.W"),
            layers=layers,
            ln_w=named["ln_final.w"],
            ln_b=named.get("ln_final.b"),
            W_head=named["embed.W"].t() if decoder.config.head.tied else named["head.W"],
            b_head=named.get("head.b"),
        )
        if named.unused():
            raise UnsupportedModel(f"the ladder has no formula for `{named.unused()[0]}`")
        return found

    def angles(self, layer: LayerWeights, length: int) -> tuple[list[float], float] | None:
        """Radians per position of each pair of a head, and the factor on cos and sin.

        None where the layer does not rotate. `length` matters to the dynamic kinds only.
        """
        rope = layer.config.mixer.rope
        if rope is None:
            return None
        per_position, factor = frequencies(rope, length)
        return per_position.tolist(), factor


def steady_tokens(config: ModelConfig) -> int | None:
    """Up to how many tokens the rotation does not depend on the length; None: it never does.

    Beyond, keys that a cache has kept are rotated as in a shorter sequence (dynamic NTK, LongRoPE),
    and the rungs without a cache compute something else.
    """
    ropes = (layer.mixer.rope for layer in plain_blocks(config))
    scalings = [rope.scaling for rope in ropes if rope is not None]
    return min(
        (s.original for s in scalings if isinstance(s, DynamicScaling | LongRopeScaling)),
        default=None,
    )


def letters(weights: Weights, *, tokens: int, sequences: int) -> tuple[tuple[str, int], ...]:
    """What the letters of the formulas are for this model and prompt."""
    config, first = weights.config, weights.layers[0].config
    grouped = first.mixer.kv_heads != first.mixer.heads
    return (
        ("n", tokens),
        ("d", config.width),
        ("h", first.mixer.heads),
        *((("h_kv", first.mixer.kv_heads),) if grouped else ()),
        (head_size(config), first.mixer.head_dim),
        ("F", first.ffn.hidden),
        ("v", config.vocab),
        ("b", sequences),
        ("layers", len(config.layers)),
    )


class _Oriented:
    """The decoder's parameters by name, the matrices of projections transposed to `[in, out]`.

    Remembers what was asked for: a parameter that no formula uses is a rung that is wrong.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._used: set[str] = set()

    def get(self, name: str) -> Tensor | None:
        """The parameter, None where the model has none of that name."""
        return self[name] if name in self._decoder.weight_names else None

    def __getitem__(self, name: str) -> Tensor:
        self._used.add(name)
        stored = self._decoder.weight(name).dense()
        return stored.t() if name == "head.W" or ".W_" in name else stored

    def unused(self) -> list[str]:
        """Parameters that were never requested."""
        return [name for name in self._decoder.weight_names if name not in self._used]


def _layer(config: PlainBlock, prefix: str, named: _Oriented) -> LayerWeights:
    def maybe(name: str) -> Tensor | None:
        return named.get(f"{prefix}.{name}")

    return LayerWeights(
        config=config,
        ln1_w=named[f"{prefix}.ln1.w"],
        ln1_b=maybe("ln1.b"),
        W_q=named[f"{prefix}.attn.W_q"],
        b_q=maybe("attn.b_q"),
        W_k=named[f"{prefix}.attn.W_k"],
        b_k=maybe("attn.b_k"),
        W_v=named[f"{prefix}.attn.W_v"],
        b_v=maybe("attn.b_v"),
        q_norm=maybe("attn.q_norm.w"),
        k_norm=maybe("attn.k_norm.w"),
        W_o=named[f"{prefix}.attn.W_o"],
        b_o=maybe("attn.b_o"),
        ln2_w=named[f"{prefix}.ln2.w"],
        ln2_b=maybe("ln2.b"),
        W_up=named[f"{prefix}.mlp.W_up"],
        b_up=maybe("mlp.b_up"),
        W_gate=maybe("mlp.W_gate"),
        b_gate=maybe("mlp.b_gate"),
        W_down=named[f"{prefix}.mlp.W_down"],
        b_down=maybe("mlp.b_down"),
    )
