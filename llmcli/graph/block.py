"""A block of sublayers and branches: its tensors and their names. No torch.

x ──┬── pre-norm ── part ── post-norm ── · multiplier ──(+)── x of the next sublayer
    ├── … a branch beside it ────────────────────────────┤
    └────────────────────────────────────────────────────┘

If the sum of branches has a norm, the normalized sum is added. If the residual is normed, the
output of the first pre-norm replaces x in the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from llmcli.config.model import Branch, LayerConfig
from llmcli.config.norm import NormConfig
from llmcli.graph.node import PartGraph, Site
from llmcli.graph.ops import Add, Op
from llmcli.graph.parts.norm import norm_graph
from llmcli.graph.parts.registry import part_of
from llmcli.graph.rows import Rows

_NUMBERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_ROWS = """
    added        T  T D  residual wide
    out_scale.w  the factor on the block's output
"""


@dataclass(frozen=True, kw_only=True)
class BranchNames:
    """The names of a branch: its part's input and output, norms, and the added tensor.

    `norm` and `post` are modules (`blocks.3.ln1`); None if there is none, or the norm is shared
    with the branch before. `normed_residual`: the output of `norm` replaces the stream.
    """

    config: Branch
    norm: str | None
    normed_residual: bool
    reads: str
    part: str
    output: str
    post: str | None
    residual_update: str


@dataclass(frozen=True, kw_only=True)
class SumNames:
    """The names of a sum of branches and of its norm module."""

    config: NormConfig
    sum: str
    norm: str


@dataclass(frozen=True, kw_only=True)
class SublayerNames:
    """The residual stream before and after a sublayer, and its branches.

    `residual_updates`: tensors added to `residual`: the stream, possibly normalized. `summed`: the
    sum of branches, if it has a norm.
    """

    stream: str
    residual: str
    stream_out: str
    branches: tuple[BranchNames, ...]
    residual_updates: tuple[str, ...]
    summed: SumNames | None = None


def block_names(layer: LayerConfig, block: str) -> tuple[SublayerNames, ...]:
    """The names in `block` (`blocks.3`): norms are numbered by branch (`ln1`, `ln1_post`, `ln2`).

    The first mixer of any kind adds `attn_out`, the first feed-forward `mlp_out`, others
    `<prefix>_out`. The normalized sum of branches has one of these names.
    """
    numbers, found, used = count(1), [], Counter[str]()
    stream = f"{block}.resid_pre"
    for at, sublayer in enumerate(layer.sublayers):
        branches, reads, residual = [], stream, stream
        summed = None
        if layer.sum_norm is not None and len(sublayer) > 1:
            summed = SumNames(
                config=layer.sum_norm, sum=f"{block}.branch_sum", norm=f"{block}.sum_norm"
            )
        for branch in sublayer:
            kind, number = part_of(branch.part), next(numbers)
            norm = f"{block}.ln{number}" if branch.pre_norm is not None else None
            if norm is not None:
                reads = f"{norm}.out"
            elif not branch.shares_norm:
                reads = stream
            norms = layer.normed_residual and norm is not None and branch is sublayer[0]
            residual = reads if norms else residual
            used[kind.prefix] += 1
            times = used[kind.prefix]
            part = f"{block}.{kind.prefix}{times if times > 1 else ''}"
            role = "attn" if kind.mixes else "mlp"
            out = f"{part}_out" if used[f"{role}_out"] else f"{block}.{role}_out"
            post = f"{block}.ln{number}_post" if branch.post_norm is not None else None
            output, update = f"{part}.{kind.raw_output}", out
            if summed is not None:
                update = output if post is None else f"{post}.out"
            else:
                used[f"{role}_out"] += 1
                if post is None and branch.multiplier == 1:
                    output = update
            ends: dict[str, Any] = {"norm": norm, "reads": reads, "output": output, "post": post}
            ends["normed_residual"] = norms
            branches.append(BranchNames(config=branch, part=part, residual_update=update, **ends))
        last = at == len(layer.sublayers) - 1
        place = "post" if last else "mid" if at == 0 else f"mid{at + 1}"
        added = tuple(one.residual_update for one in branches)
        if summed is not None:
            added = (out,)
            used[f"{role}_out"] += 1
        names = SublayerNames(
            stream=stream,
            residual=residual,
            stream_out=f"{block}.resid_{place}",
            branches=tuple(branches),
            residual_updates=added,
            summed=summed,
        )
        found.append(names)
        stream = names.stream_out
    return tuple(found)


class BlockRows:
    """The tensors of block `number`: a `PartGraph` for each part, norm, and sum."""

    def __init__(self, layer: LayerConfig, number: int, width: int) -> None:
        self.layer, self.number, self.width = layer, number, width
        self.names = block_names(layer, f"blocks.{number}")
        self._letters = {self.names[0].stream: "X", self.names[-1].stream_out: "H"}
        self._numbers = count(1)

    def rows(
        self, enters: Add, copied: str | None
    ) -> tuple[tuple[PartGraph, ...], tuple[str, ...]]:
        """The tensors in execution order, and the parts of the stream after the block.

        `enters`: the op of its residual stream, possibly a copy of the activation `copied`.
        """
        layer, r = self.layer, self._rows()
        words = "the residual stream as it enters the block"
        group = "gaps" if self.number else "embed"
        rows = [self._added(self.names[0].stream, enters, words, group=group, shares=copied)]
        made_of = enters.before
        for sublayer in self.names:
            for one in sublayer.branches:
                rows += self._branch(one, sublayer)
            if sublayer.summed is not None:
                rows += self._sum(sublayer, sublayer.summed)
            added, last = sublayer.residual_updates, sublayer is self.names[-1]
            kept = made_of if sublayer.residual == sublayer.stream else (sublayer.residual,)
            made_of = (*kept, *added)
            op = Add(parts=(*added, sublayer.residual), before=made_of)
            if last:
                scalar = r.named("out_scale.w") if layer.scaled else None
                op = replace(op, scale=layer.scale, weight=scalar)
            where = "as it leaves the block" if last else f"after {_nouns(sublayer)}"
            rows.append(self._added(sublayer.stream_out, op, f"the residual stream {where}"))
            made_of = made_of if op.plain else (sublayer.stream_out,)
        if layer.scaled:
            r.parameter("out_scale.w", "1", "resid_post", letter="c", wide=True)
        return (*rows, r.graph()), made_of

    def _branch(self, one: BranchNames, sublayer: SublayerNames) -> Iterator[PartGraph]:
        """Norm, part, norm, and the added tensor."""
        branch, noun = one.config, part_of(one.config.part).noun
        if one.norm is not None and branch.pre_norm is not None:
            what = f"the residual stream, normalized, as it enters {noun}"
            words, wide = (f"the norm before {noun}", what), one.normed_residual
            source = sublayer.stream if one is sublayer.branches[0] else sublayer.residual
            yield self._norm(branch.pre_norm, one.norm, source, words, wide=wide)
        yield self._part(one, sublayer)
        if one.post is not None and branch.post_norm is not None:
            words = (f"the norm after {noun}", f"the output of {noun}, normalized")
            post = self._norm(branch.post_norm, one.post, one.output, words, wide=True)
            yield post
        source = f"{one.post}.out" if one.post is not None else one.output
        if one.residual_update in (one.output, source):
            return
        adds = f"what {noun} adds to the residual stream"
        if branch.multiplier == 1:
            yield self._same(one.residual_update, post, adds)
        else:
            op = Add(parts=(source,), before=(), scale=branch.multiplier)
            yield self._added(one.residual_update, op, adds)

    def _part(self, one: BranchNames, sublayer: SublayerNames) -> PartGraph:
        part, first = one.config.part, sublayer.branches[0]
        site = Site(
            name=one.part,
            source=one.reads,
            stream=sublayer.residual,
            output=one.output,
            letter=self._letter(one.output),
            adds=one.output in sublayer.residual_updates,
            layer=self.number,
            width=self.width,
            second=one is not first and not part_of(first.config.part).mixes,
        )
        return part_of(part).graph(part, site)

    def _sum(self, sublayer: SublayerNames, summed: SumNames) -> Iterator[PartGraph]:
        """The sum of branches, its norm, and the added tensor."""
        nouns, parts = _nouns(sublayer), tuple(one.residual_update for one in sublayer.branches)
        yield self._added(summed.sum, Add(parts=parts, before=()), f"the sum of {nouns}")
        words = (f"the norm after {nouns}", f"the sum of {nouns}, normalized")
        post = self._norm(summed.config, summed.norm, summed.sum, words, wide=True)
        yield post
        adds = f"what {nouns} add to the residual stream"
        yield self._same(sublayer.residual_updates[0], post, adds)

    def _norm(self, norm: NormConfig, name: str, *given: Any, wide: bool = False) -> PartGraph:
        """A norm, its source and its words, see `norm_graph`."""
        letter = self._letter(f"{name}.out")
        return norm_graph(norm, name, letter, *given, layer=self.number, wide=wide)

    def _same(self, name: str, post: PartGraph, words: str) -> PartGraph:
        """The added tensor, if it is the output of the norm `post`: the same tensor."""
        normed = post.nodes[-1]
        self._letters.setdefault(name, normed.letter)
        return self._added(name, normed.op, words, group="norm", shares=normed.name)

    def _added(self, name: str, op: Op, words: str, **other: Any) -> PartGraph:
        """An activation of the stream, or one that is added to it."""
        r = self._rows()
        r.node("added", op, name=name, letter=self._letter(name), words=words, **other)
        return r.graph()

    def _letter(self, name: str) -> str:
        """`X` for the block's input, `T¹`, `T²` … in execution order, and `H` for its output."""
        if name not in self._letters:
            self._letters[name] = f"T{next(self._numbers)}".translate(_NUMBERS)
        return self._letters[name]

    def _rows(self) -> Rows:
        return Rows(f"blocks.{self.number}", _ROWS, "norms", layer=self.number)


def _nouns(sublayer: SublayerNames) -> str:
    return " and ".join(part_of(one.config.part).noun for one in sublayer.branches)
