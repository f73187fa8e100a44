"""A block of sublayers and branches: its tensors and their names. No torch.

x ──┬── pre-norm ── part ── post-norm ── · multiplier ──(+)── x of the next sublayer
    ├── … a branch beside it ────────────────────────────┤
    └────────────────────────────────────────────────────┘

If the sum of branches has a norm, the normalized sum is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from llmcli.config import Branch, LayerConfig
from llmcli.graph.node import Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Add
from llmcli.parts.norm.config import NormConfig
from llmcli.parts.norm.graph import norm_graph
from llmcli.parts.registry import part_of

_NUMBERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class BranchNames:
    """The names of a branch: its part's input and output, norms, and the added tensor.

    `norm` and `post` are modules (`blocks.3.ln1`); None if there is none, or the norm is shared
    with the branch before.
    """

    config: Branch
    norm: str | None
    reads: str
    part: str
    makes: str
    post: str | None
    adds: str


@dataclass(frozen=True, kw_only=True)
class SumNames:
    """The names of a sum of branches and of its norm module."""

    config: NormConfig
    sum: str
    norm: str


@dataclass(frozen=True, kw_only=True)
class SublayerNames:
    """The residual stream before and after a sublayer, and its branches.

    `adds`: tensors added to the stream. `summed`: the sum of branches, if it has a norm.
    """

    stream: str
    leaves: str
    branches: tuple[BranchNames, ...]
    adds: tuple[str, ...]
    summed: SumNames | None = None


def block_names(layer: LayerConfig, block: str) -> tuple[SublayerNames, ...]:
    """The names in `block` (`blocks.3`): norms are numbered by branch (`ln1`, `ln1_post`, `ln2`).

    The first mixer of any kind adds `attn_out`, the first feed-forward `mlp_out`, others
    `<prefix>_out`. The normalized sum of branches has one of these names.
    """
    numbers, found, used = count(1), [], Counter[str]()
    stream = f"{block}.resid_pre"
    for at, sublayer in enumerate(layer.sublayers):
        branches, reads = [], stream
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
            used[kind.prefix] += 1
            times = used[kind.prefix]
            part = f"{block}.{kind.prefix}{times if times > 1 else ''}"
            role = "attn" if kind.mixes else "mlp"
            out = f"{part}_out" if used[f"{role}_out"] else f"{block}.{role}_out"
            post = f"{block}.ln{number}_post" if branch.post_norm is not None else None
            makes, adds = f"{part}.{kind.gives}", out
            if summed is not None:
                adds = makes if post is None else f"{post}.out"
            else:
                used[f"{role}_out"] += 1
                if post is None and branch.multiplier == 1:
                    makes = adds
            branches.append(BranchNames(
                config=branch, norm=norm, reads=reads, part=part, makes=makes, post=post, adds=adds,
            ))  # fmt: skip
        last = at == len(layer.sublayers) - 1
        leaves = f"{block}.resid_{'post' if last else 'mid' if at == 0 else f'mid{at + 1}'}"
        added = tuple(one.adds for one in branches)
        if summed is not None:
            added = (out,)
            used[f"{role}_out"] += 1
        found.append(SublayerNames(
            stream=stream, leaves=leaves, branches=tuple(branches), adds=added, summed=summed,
        ))  # fmt: skip
        stream = leaves
    return tuple(found)


def block_rows(
    layer: LayerConfig,
    number: int,
    *,
    width: int,
    enters: Add,
    copied: str | None,
) -> tuple[tuple[PartGraph, ...], tuple[str, ...]]:
    """The tensors of block `number` in execution order, and the parts of the stream after it.

    `enters`: the op of its residual stream, possibly a copy of the activation `copied`.
    """
    names = block_names(layer, f"blocks.{number}")
    letters = _letters(names)
    parts = {
        one.part: _part(one, sublayer, letters, number, width)
        for sublayer in names
        for one in sublayer.branches
    }

    def residual(
        name: str, op: Add, words: str, group: str = "residual", shares: str | None = None
    ) -> PartGraph:
        node = Node(
            name=name, letter=letters.get(name, "X"), axes=("T", "D"), op=op, group=group,
            layer=number, words=f"the residual stream {words}", wide=True, shares=shares,
        )  # fmt: skip
        return PartGraph(nodes=(node,))

    rows = [residual(
        names[0].stream, enters, "as it enters the block", "gaps" if number else "embed", copied,
    )]  # fmt: skip
    made_of = enters.before
    for sublayer in names:
        for one in sublayer.branches:
            rows += _branch(one, sublayer, parts, letters, number)
        if sublayer.summed is not None:
            rows += _sum(sublayer, sublayer.summed, letters, number)
        added = sublayer.adds
        last = sublayer is names[-1]
        made_of = (*made_of, *added)
        op = Add(
            parts=(*added, sublayer.stream), before=made_of, scale=layer.scale if last else 1,
            weight=f"blocks.{number}.out_scale.w" if layer.scaled and last else None,
        )  # fmt: skip
        words = "as it leaves the block" if last else f"after {_nouns(sublayer)}"
        rows.append(residual(sublayer.leaves, op, words))
        made_of = made_of if op.plain else (sublayer.leaves,)
    rest = PartGraph(nodes=(), parameters=_scale(number) if layer.scaled else ())
    return (*rows, rest), made_of


def _scale(number: int) -> tuple[Parameter]:
    """`out_scale.w` `[1]`, the factor on the block's output."""
    block = f"blocks.{number}"
    return (Parameter(
        name=f"{block}.out_scale.w", axes=("1",), makes=f"{block}.resid_post", kind="norms",
        words="the factor on the block's output", letter="c", layer=number, wide=True,
    ),)  # fmt: skip


def _letters(names: Sequence[SublayerNames]) -> dict[str, str]:
    """`T¹`, `T²` … in execution order, and `H` for the block's output."""
    numbered: dict[str, str] = {}

    def number(name: str) -> None:
        numbered[name] = f"T{len(set(numbered.values())) + 1}".translate(_NUMBERS)

    for sublayer in names:
        for one in sublayer.branches:
            if one.norm is not None:
                number(f"{one.norm}.out")
            if one.makes != one.adds:
                number(one.makes)
            if one.post is not None:
                number(f"{one.post}.out")
            if one.post is not None and one.config.multiplier == 1:  # the same tensor
                numbered[one.adds] = numbered[f"{one.post}.out"]
            elif one.adds not in numbered:
                number(one.adds)
        if (summed := sublayer.summed) is not None:
            number(summed.sum)
            number(f"{summed.norm}.out")
            numbered[sublayer.adds[0]] = numbered[f"{summed.norm}.out"]
        number(sublayer.leaves)
    return numbered | {names[-1].leaves: "H"}


def _part(
    one: BranchNames, sublayer: SublayerNames, letters: Mapping[str, str], number: int, width: int
) -> PartGraph:
    part = one.config.part
    mixes = part_of(sublayer.branches[0].config.part).mixes
    return part_of(part).graph(part, Site(
        name=one.part, source=one.reads, stream=sublayer.stream, makes=one.makes,
        letter=letters[one.makes], adds=one.makes in sublayer.adds, layer=number, width=width,
        second=one is not sublayer.branches[0] and not mixes,
    ))  # fmt: skip


def _nouns(sublayer: SublayerNames) -> str:
    return " and ".join(part_of(one.config.part).noun for one in sublayer.branches)


def _same(name: str, words: str, post: PartGraph, number: int) -> Node:
    """The added tensor, if it is the output of a norm: the same tensor."""
    normed = post.nodes[-1]
    return Node(
        name=name, letter=normed.letter, axes=("T", "D"), op=normed.op, words=words, group="norm",
        layer=number, wide=True, shares=normed.name,
    )  # fmt: skip


def _sum(
    sublayer: SublayerNames, summed: SumNames, letters: Mapping[str, str], number: int
) -> Iterator[PartGraph]:
    """The sum of branches, its norm, and the added tensor."""
    nouns = _nouns(sublayer)
    parts = tuple(one.adds for one in sublayer.branches)
    yield PartGraph(nodes=(Node(
        name=summed.sum, letter=letters[summed.sum], axes=("T", "D"),
        op=Add(parts=parts, before=()), words=f"the sum of {nouns}", group="residual",
        layer=number, wide=True,
    ),))  # fmt: skip
    post = norm_graph(
        summed.config, summed.norm, summed.sum, letters[f"{summed.norm}.out"],
        (f"the norm after {nouns}", f"the sum of {nouns}, normalized", ""),
        layer=number, wide=True,
    )  # fmt: skip
    words = f"what {nouns} add to the residual stream"
    yield replace(post, nodes=(*post.nodes, _same(sublayer.adds[0], words, post, number)))


def _branch(
    one: BranchNames,
    sublayer: SublayerNames,
    parts: Mapping[str, PartGraph],
    letters: Mapping[str, str],
    number: int,
) -> Iterator[PartGraph]:
    """Norm, part, norm, and the added tensor."""
    branch, noun = one.config, part_of(one.config.part).noun
    if one.norm is not None and branch.pre_norm is not None:
        words = (f"the norm before {noun}",
                 f"the residual stream, normalized, as it enters {noun}", "")  # fmt: skip
        yield norm_graph(
            branch.pre_norm, one.norm, sublayer.stream, letters[one.reads], words, layer=number,
        )  # fmt: skip
    yield parts[one.part]
    source = one.makes
    if one.post is not None and branch.post_norm is not None:
        source = f"{one.post}.out"
        words = (f"the norm after {noun}", f"the output of {noun}, normalized", "")
        post = norm_graph(
            branch.post_norm, one.post, one.makes, letters[source], words, layer=number, wide=True
        )
        yield post
    if one.adds in (one.makes, source):
        return
    adds = f"what {noun} adds to the residual stream"
    if branch.multiplier == 1:
        yield PartGraph(nodes=(_same(one.adds, adds, post, number),))
        return
    yield PartGraph(nodes=(Node(
        name=one.adds, letter=letters[one.adds], axes=("T", "D"), words=adds, group="residual",
        op=Add(parts=(source,), before=(), scale=branch.multiplier), layer=number, wide=True,
    ),))  # fmt: skip
