"""A model's configuration as nested frozen values: parts' configurations, layers unrolled.

No torch, and independent of families: a family translates its configuration into these values, and
no other code depends on the family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmcli.config.attention import AttentionConfig, most_keys
from llmcli.config.embedding import EmbeddingConfig, HeadConfig
from llmcli.config.norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class Branch:
    """`multiplier · post_norm(part(pre_norm(x)))`: one term of a sublayer.

    `part`: a configuration of any kind in `graph.parts.registry`. `shares_norm`: the part has the
    same input as the branch before, so that parallel branches share one norm.
    """

    part: object
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    multiplier: float = 1.0
    shares_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One block: one to three sublayers `x + Σ branches`, in sequence.

    `scale` multiplies the block's output, as does a scalar parameter if `scaled`. With parallel
    branches, `sum_norm` normalizes their sum before it is added; these have no multipliers. With
    `normed_residual` a sublayer is `norm(x) + Σ branches`, if its first branch has a pre-norm. A
    post-norm block `norm(x + part(x))` is this with each norm in the next sublayer, and the last
    one as the model's final norm.
    """

    sublayers: tuple[tuple[Branch, ...], ...]
    sum_norm: NormConfig | None = None
    normed_residual: bool = False
    scale: float = 1.0
    scaled: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if a branch has a multiplier and the sum a norm."""
        if self.sum_norm is not None and any(one.multiplier != 1 for one in self.branches):
            raise ValueError("branches whose sum is normalized have no multipliers")

    @property
    def branches(self) -> Iterator[Branch]:
        """The branches of all sublayers, in execution order."""
        return (branch for sublayer in self.sublayers for branch in sublayer)

    @property
    def parts(self) -> tuple[object, ...]:
        """Configurations of the parts, in execution order."""
        return tuple(branch.part for branch in self.branches)

    @property
    def attention(self) -> AttentionConfig | None:
        """The layer's softmax attention, or None."""
        return next((part for part in self.parts if isinstance(part, AttentionConfig)), None)

    @property
    def window(self) -> int | None:
        """The most keys that a query of its attention sees; None: all earlier ones."""
        return None if self.attention is None else most_keys(self.attention.scores.window)

    def with_attention(self, attention: AttentionConfig) -> LayerConfig:
        """The layer with its attention replaced."""
        sublayers = tuple(
            tuple(
                replace(branch, part=attention) if branch.part is self.attention else branch
                for branch in sublayer
            )
            for sublayer in self.sublayers
        )
        return replace(self, sublayers=sublayers)


def sequential(
    *parts: object,
    norm: NormConfig | None,
    after: NormConfig | None = None,
    multiplier: float = 1.0,
) -> LayerConfig:
    """The usual block: `x + multiplier · after(part(norm(x)))` for each part in sequence."""
    return LayerConfig(
        sublayers=tuple(
            (Branch(part=part, pre_norm=norm, post_norm=after, multiplier=multiplier),)
            for part in parts
        )
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model.

    `context`: the trained length; `bos`/`eos`: token ids. `family` and `model_type` are for
    display; no code branches on them.
    """

    family: str
    model_type: str
    vocab: int
    width: int
    context: int
    layers: tuple[LayerConfig, ...]
    embedding: EmbeddingConfig
    final_norm: NormConfig
    head: HeadConfig
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def post_norm(self) -> bool:
        """Whether its blocks are post-norm, see `LayerConfig`: the first part has no norm."""
        firsts = ((one, next(one.branches)) for one in self.layers[:1])
        return any(one.normed_residual and first.pre_norm is None for one, first in firsts)

    def room(self, wanted: int | None = None) -> int:
        """Tokens that it may read: `wanted`, else its context, and at most its learned positions.
        """
        room, positions = self.context if wanted is None else wanted, self.embedding.positions
        return room if positions is None else min(room, positions)

    def __hash__(self) -> int:
        """Hash few fields: hashing layers takes milliseconds, and graphs are looked up by it."""
        return hash((self.model_type, self.vocab, self.width, self.context, len(self.layers)))
