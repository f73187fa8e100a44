"""A dense model's parameters as the formulas write them, for every rung the same tensors.

Letters: v vocabulary, d width, h heads, k key/value heads, d/h size of a head (where a model has
its own head size, that), d_v of its value, F hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.commands.ladder.measure.record import shown
from llmcli.config.attention import AttentionConfig, Chunk, DynamicScaling, LongRopeScaling
from llmcli.config.latent import LatentConfig
from llmcli.config.mlp import MlpConfig
from llmcli.config.model import Branch, LayerConfig, ModelConfig
from llmcli.config.norm import HeadNorm, JoinedNorm, NormConfig
from llmcli.config.ple import PleConfig
from llmcli.decoder.decoder import Decoder
from llmcli.errors import UnsupportedModel
from llmcli.graph.block import block_names
from llmcli.graph.parts.registry import part_of


@dataclass(frozen=True)
class Matrix:
    """`W` `[in, out]`, so that `Y = X W`, and a bias `b` `[out]` or None."""

    W: Tensor
    b: Tensor | None = None


@shown
def side_by_side(matrices: Sequence[Matrix]) -> Matrix:
    """`W = W¹ ⊕ W² ⊕ …`: the columns of all matrices in one, made as the model is built."""
    w_ij = torch.cat([matrix.W for matrix in matrices], 1)
    b = [matrix.b for matrix in matrices if matrix.b is not None]
    return Matrix(w_ij, torch.cat(b) if b else None)


@dataclass(frozen=True, kw_only=True)
class NormWeights:
    """A norm over the last axis: `w`, `b` as wide as that, None where it has none."""

    config: NormConfig
    w: Tensor | None
    b: Tensor | None

    @property
    def factor(self) -> Tensor | None:
        """What a normalized row is multiplied by, `offset + w`; None where by nothing."""
        return self.w if self.w is None or not self.config.offset else self.config.offset + self.w


@dataclass(frozen=True, kw_only=True)
class Projection(Matrix):
    """The matrix of all `heads` side by side.

    What it makes is normalized by `norm`, each head by itself, or the heads `together`.
    """

    heads: int
    norm: NormWeights | None
    together: bool

    def split(self) -> list[Matrix]:
        """The columns of each head, views."""
        biases = [None] * self.heads if self.b is None else self.b.chunk(self.heads)
        return [Matrix(W, b) for W, b in zip(self.W.chunk(self.heads, 1), biases, strict=True)]


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """`q` `[d, h·d/h]`, `k` `[d, k·d/h]`, `v` `[d, k·d_v]`, `gate` `[d, h·d_v]`, `o` `[h·d_v, d]`.

    `block`: the block that it is in. `sinks` `[h]`.
    """

    config: AttentionConfig
    block: int
    q: Projection
    k: Projection
    v: Projection
    gate: Matrix | None
    o: Matrix
    sinks: Tensor | None

    @property
    def entering(self) -> tuple[Projection, Projection, Projection]:
        """The matrices that queries, keys and values are made with."""
        return self.q, self.k, self.v


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    """`up` and `gate` `[d, F]`, the latter None where nothing is gated, `down` `[F, d]`."""

    config: MlpConfig
    up: Matrix
    gate: Matrix | None
    down: Matrix


@dataclass(frozen=True, kw_only=True)
class BranchWeights:
    """`multiplier · post(part(norm(x)))`, `norm` None where there is none or it is shared."""

    config: Branch
    part: AttentionWeights | MlpWeights
    norm: NormWeights | None
    post: NormWeights | None


@dataclass(frozen=True, kw_only=True)
class SublayerWeights:
    """`Σ branches + stream`; `sum_norm` normalizes that sum before the stream is added."""

    branches: tuple[BranchWeights, ...]
    sum_norm: NormWeights | None


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """One block; `scale` multiplies what leaves it."""

    sublayers: tuple[SublayerWeights, ...]
    scale: float

    @property
    def parts(self) -> Iterator[AttentionWeights | MlpWeights]:
        """The parts of all branches, in execution order."""
        for sublayer in self.sublayers:
            yield from (branch.part for branch in sublayer.branches)

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All matrices of its parts."""
        for part in self.parts:
            yield from (one for one in vars(part).values() if isinstance(one, Matrix))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The whole model. `W_E` `[v, d]`, `W_P` `[positions, d]` or None, `head` `[d, v]`.

    `decoder` is the model that these parameters were taken from: views, no copies.
    """

    decoder: Decoder
    config: ModelConfig
    W_E: Tensor
    W_P: Tensor | None
    blocks: tuple[BlockWeights, ...]
    final_norm: NormWeights
    head: Matrix

    @classmethod
    def of(cls, decoder: Decoder) -> Weights:
        """Views of the decoder's parameters in the formulas' orientation.

        Raises UnsupportedModel where a block has a part that the rungs have no formula for.
        """
        config = decoder.config
        require_supported(config)
        named = _Named(decoder)
        final_norm = named.norm("ln_final", config.final_norm)
        assert final_norm is not None
        found = cls(
            decoder=decoder,
            config=config,
            W_E=named.tensor("embed.W"),
            W_P=named.maybe("pos_embed.W"),
            blocks=tuple(named.block(layer, i) for i, layer in enumerate(config.layers)),
            final_norm=final_norm,
            head=Matrix(
                named.tensor("embed.W" if config.head.tied else "head.W").t(), named.maybe("head.b")
            ),
        )
        if named.unused:
            raise UnsupportedModel(f"the ladder has no formula for `{named.unused[0]}`")
        return found

    @property
    def attentions(self) -> list[AttentionWeights]:
        """The attention of all blocks, in execution order."""
        parts = (part for block in self.blocks for part in block.parts)
        return [part for part in parts if isinstance(part, AttentionWeights)]


def require_supported(config: ModelConfig) -> None:
    """Raises UnsupportedModel for what the rungs have no formulas for."""
    dense = "the ladder takes dense models, for example `-m smollm2`"
    others = "`llmcli shapes` and `llmcli explain` show this model's formulas"
    for number, layer in enumerate(config.layers):
        for part in layer.parts:
            match part:
                case PleConfig():
                    what, hint = "per-layer embeddings", others
                case AttentionConfig() if part.kv.layer is not None:
                    what, hint = f"the keys and values of block {part.kv.layer}", others
                case AttentionConfig() if part.kv.equal:
                    what, hint = "values that are the keys", others
                case AttentionConfig() if isinstance(part.scores.window, Chunk):
                    what, hint = "attention within chunks", others
                case AttentionConfig() if part.scores.slopes:
                    what, hint = "scores lowered by distance", others
                case AttentionConfig() if part.clip is not None:
                    what, hint = "clipped queries, keys and values", others
                case AttentionConfig(qk_norm=HeadNorm()):
                    what, hint = "norms with weights for each head", others
                case AttentionConfig() | MlpConfig():
                    continue
                case _:
                    latent = "latent " if isinstance(part, LatentConfig) else ""
                    what, hint = f"{latent}{part_of(part).noun}", dense
            raise UnsupportedModel(
                f"the ladder has no rungs for {what}, which block {number} has", hint=hint
            )
    for what, there in (
        ("a normalized residual stream", any(layer.normed_residual for layer in config.layers)),
        ("embeddings of another width", config.embedding.size is not None),
    ):
        if there:
            raise UnsupportedModel(f"the ladder has no rungs for {what}", hint=others)
    if all(layer.attention is None for layer in config.layers):
        raise UnsupportedModel("the ladder has no rungs for a model without attention", hint=dense)


def steady_tokens(config: ModelConfig) -> int | None:
    """Up to how many tokens the rotation does not depend on the length; None: it never does.

    Beyond, keys that a cache has kept are rotated as in a shorter sequence (dynamic NTK, LongRoPE),
    and the rungs without a cache compute something else.
    """
    mixers = (layer.attention for layer in config.layers)
    scalings = (mixer.rope.scaling for mixer in mixers if mixer is not None and mixer.rope)
    return min(
        (s.original for s in scalings if isinstance(s, DynamicScaling | LongRopeScaling)),
        default=None,
    )


class _Named:
    """The decoder's parameters by name. `unused`: those that were never read.

    A parameter that no formula uses is a rung that is wrong.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.unused = list(decoder.weight_names)

    def tensor(self, name: str) -> Tensor:
        """The parameter as it is stored, projections `[out, in]`. Raises KeyError."""
        if name in self.unused:  # tied weights are read twice
            self.unused.remove(name)
        return self._decoder.weight(name).dense().to(self._decoder.device)

    def maybe(self, name: str) -> Tensor | None:
        """The parameter, None where the model has none of that name."""
        return self.tensor(name) if name in self._decoder.weight_names else None

    def matrix(self, part: str, leaf: str) -> Matrix:
        """`W_leaf` of a part, `[in, out]`, with its bias."""
        return Matrix(self.tensor(f"{part}.W_{leaf}").t(), self.maybe(f"{part}.b_{leaf}"))

    def norm(self, name: str | None, config: NormConfig | None) -> NormWeights | None:
        """The norm of that name, None where there is none."""
        if name is None or config is None:
            return None
        return NormWeights(config=config, w=self.maybe(f"{name}.w"), b=self.maybe(f"{name}.b"))

    def block(self, layer: LayerConfig, number: int) -> BlockWeights:
        """The weights of block `number`."""
        name = f"blocks.{number}"
        sublayers = tuple(
            SublayerWeights(
                branches=tuple(
                    BranchWeights(
                        config=one.config,
                        part=self.part(one.config.part, one.part, number),
                        norm=self.norm(one.norm, one.config.pre_norm),
                        post=self.norm(one.post, one.config.post_norm),
                    )
                    for one in names.branches
                ),
                sum_norm=None if (one := names.summed) is None else self.norm(one.norm, one.config),
            )
            for names in block_names(layer, name)
        )
        factor = float(self.tensor(f"{name}.out_scale.w")) if layer.scaled else 1.0
        return BlockWeights(sublayers=sublayers, scale=layer.scale * factor)

    def part(self, config: object, name: str, number: int) -> AttentionWeights | MlpWeights:
        """The weights of a part of block `number`."""
        assert isinstance(config, AttentionConfig | MlpConfig)  # require_supported
        gate = self.matrix(name, "gate") if config.gated else None
        if isinstance(config, MlpConfig):
            up, down = self.matrix(name, "up"), self.matrix(name, "down")
            return MlpWeights(config=config, up=up, gate=gate, down=down)

        def projection(leaf: str, heads: int, norm: NormConfig | None) -> Projection:
            return Projection(
                **vars(self.matrix(name, leaf)),
                heads=heads,
                norm=self.norm(f"{name}.{leaf}_norm", norm),
                together=isinstance(norm, JoinedNorm),
            )

        return AttentionWeights(
            config=config,
            block=number,
            q=projection("q", config.heads, config.qk_norm),
            k=projection("k", config.kv_heads, config.qk_norm),
            v=projection("v", config.kv_heads, config.kv.norm),
            gate=gate,
            o=self.matrix(name, "o"),
            sinks=self.maybe(f"{name}.sink"),
        )
