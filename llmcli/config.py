"""What a model is, as nested frozen values: the parts' own configurations, layers fully unrolled.

No torch here, and no family's name: a family translates its own configuration into these values and
nothing else asks who it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmcli.parts.attention.config import AttentionConfig
from llmcli.parts.embedding.config import EmbeddingConfig, HeadConfig
from llmcli.parts.norm.config import NormConfig


@dataclass(frozen=True, kw_only=True)
class Branch:
    """`multiplier · post_norm(part(pre_norm(x)))`: one of the terms that a sublayer adds.

    `part` is a configuration of any kind in `parts.registry`. `shares_norm`: the part reads what
    the branch before it reads, so that parallel branches have one norm.
    """

    part: object
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    multiplier: float = 1.0
    shares_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One block: one to three sublayers `x + Σ branches`, each reading what the last one left.

    `scale` multiplies what leaves the block, and so does a number among its parameters where it is
    `scaled`. Where several branches stand side by side, `sum_norm` normalizes their sum before it
    is added; these have no multipliers.
    """

    sublayers: tuple[tuple[Branch, ...], ...]
    sum_norm: NormConfig | None = None
    scale: float = 1.0
    scaled: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where a branch has a multiplier beside the norm of the sum."""
        if self.sum_norm is not None and any(one.multiplier != 1 for one in self.branches):
            raise ValueError("branches whose sum is normalized have no multipliers")

    @property
    def branches(self) -> Iterator[Branch]:
        """Those of all sublayers, in execution order."""
        return (branch for sublayer in self.sublayers for branch in sublayer)

    @property
    def parts(self) -> tuple[object, ...]:
        """Configurations of the parts, in execution order."""
        return tuple(branch.part for branch in self.branches)

    @property
    def attention(self) -> AttentionConfig | None:
        """Its softmax attention, where it has one."""
        return next((part for part in self.parts if isinstance(part, AttentionConfig)), None)

    @property
    def window(self) -> int | None:
        """How many keys a query of its attention sees at most; None for all before it."""
        return None if self.attention is None else self.attention.window

    def with_attention(self, attention: AttentionConfig) -> LayerConfig:
        """The same with another attention in the place of its own."""
        sublayers = tuple(
            tuple(
                replace(branch, part=attention) if branch.part is self.attention else branch
                for branch in sublayer
            )
            for sublayer in self.sublayers
        )
        return replace(self, sublayers=sublayers)


def sequential(
    *parts: object, norm: NormConfig | None, after: NormConfig | None = None,
    multiplier: float = 1.0,
) -> LayerConfig:  # fmt: skip
    """The usual block: `x + multiplier · after(part(norm(x)))`, one part after the other."""
    return LayerConfig(
        sublayers=tuple(
            (Branch(part=part, pre_norm=norm, post_norm=after, multiplier=multiplier),)
            for part in parts
        )
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `context` is the length it was trained for; `bos`/`eos` are token ids.

    `family` and `model_type` are for people to read; no code branches on them.
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

    def __hash__(self) -> int:
        """Of little: hashing every layer takes milliseconds, and graphs are looked up by it."""
        return hash((self.model_type, self.vocab, self.width, self.context, len(self.layers)))
