"""A dense model's parameters as the formulas write them, for every rung the same tensors.

Letters: v vocabulary, d width, h heads, k key/value heads, d/h size of a head (where a model has
its own head size, that), d_v of its value, F hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcli.anatomy.block import BranchNames, SublayerNames, block_names
from llmcli.commands.ladder.measure.notation import numbered
from llmcli.commands.ladder.measure.supported import require_supported
from llmcli.config import LayerConfig, ModelConfig
from llmcli.errors import UnsupportedModel
from llmcli.nn.decoder import Decoder
from llmcli.parts.attention.config import AttentionConfig, DynamicScaling, LongRopeScaling
from llmcli.parts.mlp.config import MlpConfig
from llmcli.parts.norm.config import NormConfig


@dataclass(frozen=True)
class Matrix:
    """`W` `[in, out]`, so that `Y = X W`, its `name` in formulas, a bias `b` `[out]` or None."""

    name: str
    W: Tensor
    b: Tensor | None = None

    @property
    def plus_bias(self) -> str:
        """` + b_q` where there is a bias."""
        return "" if self.b is None else f" + b{self.name[1:]}"

    def columns(self, first: int, stop: int) -> Matrix:
        """Those of its columns, a view: the weights of some heads."""
        b = None if self.b is None else self.b[first:stop]
        return replace(self, W=self.W[:, first:stop], b=b)


def side_by_side(name: str, matrices: Sequence[Matrix]) -> Matrix:
    """The columns of all of them in one matrix of its own, a copy."""
    biases = [matrix.b for matrix in matrices if matrix.b is not None]
    b = torch.cat(biases) if biases else None
    return Matrix(name, torch.cat([matrix.W for matrix in matrices], 1), b)


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
class AttentionWeights:
    """`q` `[d, h·d/h]`, `k` `[d, k·d/h]`, `v` `[d, k·d_v]`, `gate` `[d, h·d_v]`, `o` `[h·d_v, d]`.

    `block`: the block that it is in. `sinks` `[h]`.
    """

    config: AttentionConfig
    block: int
    q: Matrix
    k: Matrix
    v: Matrix
    gate: Matrix | None
    o: Matrix
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    v_norm: NormWeights | None
    sinks: Tensor | None

    @property
    def entering(self) -> tuple[Matrix, Matrix, Matrix]:
        """The matrices that queries, keys and values are made with."""
        return self.q, self.k, self.v

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All of its matrices."""
        yield from (*self.entering, self.o)
        if self.gate is not None:
            yield self.gate


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    """`up` and `gate` `[d, F]`, the latter None where nothing is gated, `down` `[F, d]`."""

    config: MlpConfig
    up: Matrix
    gate: Matrix | None
    down: Matrix

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All of its matrices."""
        yield from (self.up, self.down)
        if self.gate is not None:
            yield self.gate


PartWeights = AttentionWeights | MlpWeights


@dataclass(frozen=True, kw_only=True)
class BranchWeights:
    """`multiplier · post(part(norm(x)))`, and how the formulas call each of these.

    `reads`: what the part reads; where it has a `norm` of its own, that norm's result. `makes`:
    what the part gives, `posted`: that after the norm `post`, `adds`: what is added to the stream.
    `tensors`: the decoder's names of the same.
    """

    part: PartWeights
    norm: NormWeights | None
    post: NormWeights | None
    multiplier: float
    shares_norm: bool
    reads: str
    makes: str
    posted: str
    adds: str
    tensors: BranchNames


@dataclass(frozen=True, kw_only=True)
class SublayerWeights:
    """`leaves = Σ branches + stream`. Where their sum has a `sum_norm`, it is called `summed`."""

    branches: tuple[BranchWeights, ...]
    sum_norm: NormWeights | None
    summed: str
    normed_sum: str
    stream: str
    leaves: str
    tensors: SublayerNames

    @property
    def terms(self) -> tuple[str, ...]:
        """What is added to the stream."""
        added = tuple(branch.adds for branch in self.branches)
        return added if self.sum_norm is None else (self.normed_sum,)


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """One block; `scale` multiplies what leaves it."""

    config: LayerConfig
    number: int
    sublayers: tuple[SublayerWeights, ...]
    scale: float

    @property
    def parts(self) -> Iterator[PartWeights]:
        """Those of all branches, in execution order."""
        for sublayer in self.sublayers:
            yield from (branch.part for branch in sublayer.branches)

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All matrices of its parts."""
        for part in self.parts:
            yield from part.matrices

    @property
    def plain(self) -> bool:
        """Whether it is the documents' block: `O = X + MHA(LN(X))`, `H = O + FFN(LN(O))`."""
        kinds = [type(part) for part in self.parts]
        normed = all(
            branch.norm is not None and branch.post is None and branch.multiplier == 1
            for sublayer in self.sublayers
            for branch in sublayer.branches
        )
        two = len(self.sublayers) == 2 and kinds == [AttentionWeights, MlpWeights]
        return two and normed and self.scale == 1


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
        head = named.tensor("embed.W").t() if config.head.tied else named.tensor("head.W").t()
        found = cls(
            decoder=decoder,
            config=config,
            W_E=named.tensor("embed.W"),
            W_P=named.maybe("pos_embed.W"),
            blocks=tuple(named.block(layer, i) for i, layer in enumerate(config.layers)),
            final_norm=named.norm("ln_final", config.final_norm),
            head=Matrix("W_head", head, named.maybe("head.b")),
        )
        if named.unused:
            raise UnsupportedModel(f"the ladder has no formula for `{named.unused[0]}`")
        return found

    @property
    def attentions(self) -> list[AttentionWeights]:
        """Those of all blocks, in execution order."""
        parts = (part for block in self.blocks for part in block.parts)
        return [part for part in parts if isinstance(part, AttentionWeights)]


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
        self._used: set[str] = set()

    @property
    def unused(self) -> list[str]:
        return [name for name in self._decoder.weight_names if name not in self._used]

    def tensor(self, name: str) -> Tensor:
        """The parameter as it is stored, projections `[out, in]`. Raises KeyError."""
        self._used.add(name)
        return self._decoder.weight(name).dense()

    def maybe(self, name: str) -> Tensor | None:
        """The parameter, None where the model has none of that name."""
        return self.tensor(name) if name in self._decoder.weight_names else None

    def matrix(self, part: str, leaf: str) -> Matrix:
        """`W_leaf` of a part, `[in, out]`, with its bias."""
        b = self.maybe(f"{part}.b_{leaf}")
        return Matrix(f"W_{leaf}", self.tensor(f"{part}.W_{leaf}").t(), b)

    def norm(self, name: str, config: NormConfig) -> NormWeights:
        w = self.tensor(f"{name}.w") if config.weights else None
        return NormWeights(config=config, w=w, b=self.tensor(f"{name}.b") if config.bias else None)

    def block(self, layer: LayerConfig, number: int) -> BlockWeights:
        """The block, its steps numbered `T¹`, `T²` … as the documents do."""
        name, count, stream = f"blocks.{number}", 0, "X"
        sublayers = []
        names = block_names(layer, name)
        for at, tensors in enumerate(names):
            branches, reads = [], stream
            for one in tensors.branches:
                config = one.config
                if config.pre_norm is not None:
                    reads = numbered(count := count + 1)
                elif not config.shares_norm:
                    reads = stream
                makes = posted = adds = numbered(count := count + 1)
                if config.post_norm is not None:
                    posted = adds = numbered(count := count + 1)
                if config.multiplier != 1:
                    adds = numbered(count := count + 1)
                branches.append(BranchWeights(
                    part=self.part(config.part, one.part, number),
                    norm=None if one.norm is None else self._norm(one.norm, config.pre_norm),
                    post=None if one.post is None else self._norm(one.post, config.post_norm),
                    multiplier=config.multiplier, shares_norm=config.shares_norm, reads=reads,
                    makes=makes, posted=posted, adds=adds, tensors=one,
                ))  # fmt: skip
            summed = normed = ""
            if tensors.summed is not None:
                summed, normed = numbered(count + 1), numbered(count := count + 2)
            last = at == len(names) - 1
            leaves = "H" if last else numbered(count := count + 1)
            sublayers.append(SublayerWeights(
                branches=tuple(branches), summed=summed, normed_sum=normed, stream=stream,
                sum_norm=None if tensors.summed is None else self._norm(
                    tensors.summed.norm, tensors.summed.config
                ),
                leaves=leaves, tensors=tensors,
            ))  # fmt: skip
            stream = leaves
        factor = float(self.tensor(f"{name}.out_scale.w")) if layer.scaled else 1.0
        return BlockWeights(
            config=layer, number=number, sublayers=tuple(sublayers), scale=layer.scale * factor
        )

    def _norm(self, name: str, config: NormConfig | None) -> NormWeights:
        assert config is not None
        return self.norm(name, config)

    def part(self, config: object, name: str, number: int) -> PartWeights:
        """The weights of a part. Raises TypeError for one that is not dense."""
        match config:
            case AttentionConfig():
                return self.attention(config, name, number)
            case MlpConfig():
                gate = self.matrix(name, "gate") if config.gated else None
                up, down = self.matrix(name, "up"), self.matrix(name, "down")
                return MlpWeights(config=config, up=up, gate=gate, down=down)
        raise TypeError(f"no weights for {type(config).__name__}")

    def attention(self, config: AttentionConfig, name: str, number: int) -> AttentionWeights:
        """Its matrices, and the norms of queries, keys and values where it has them."""
        qk, v = config.qk_norm, config.kv.norm
        return AttentionWeights(
            config=config,
            block=number,
            q=self.matrix(name, "q"),
            k=self.matrix(name, "k"),
            v=self.matrix(name, "v"),
            gate=self.matrix(name, "gate") if config.gated else None,
            o=self.matrix(name, "o"),
            q_norm=None if qk is None else self.norm(f"{name}.q_norm", qk),
            k_norm=None if qk is None else self.norm(f"{name}.k_norm", qk),
            v_norm=None if v is None else self.norm(f"{name}.v_norm", v),
            sinks=self.tensor(f"{name}.sink") if config.sinks else None,
        )
