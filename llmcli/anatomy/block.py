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
from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Add
from llmcli.parts.norm.config import NormConfig
from llmcli.parts.norm.graph import norm_graph
from llmcli.parts.registry import PARTS, part_of

_NUMBERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_NORMS = {  # other programs' names (`PartGraph.similar`)
    "ln1": r"(input_layernorm|ln_1)(\.weight)?",
    "ln2": r"(post_attention_layernorm|ln_2)(\.weight)?",
}


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
    learned_positions: bool,
    enters: Add,
    copied: str | None,
) -> tuple[tuple[PartGraph, ...], tuple[str, ...]]:
    """The tensors of block `number` in execution order, and the parts of the stream after it.

    `enters`: the op of its residual stream, possibly a copy of the activation `copied`.
    """
    names = block_names(layer, f"blocks.{number}")
    letters = _letters(names)
    parts = {
        one.part: _part(one, sublayer, letters, number, width, learned_positions)
        for sublayer in names
        for one in sublayer.branches
    }

    def residual(
        name: str, op: Add, words: str, group: str, *theirs: str, shares: str | None = None
    ) -> PartGraph:
        readers = [one for sub in names for one in sub.branches if sub.stream == name]
        hooks = [f"{one.norm.rpartition('.')[2]}.hook_in" for one in readers if one.norm]
        hooks += [hook for one in readers if one.reads == name for hook in parts[one.part].entering]
        node = Node(
            name=name, letter=letters.get(name, "X"), axes=("T", "D"), op=op, group=group,
            layer=number, words=f"the residual stream {words}", wide=True, shares=shares,
            theirs=(*theirs, *hooks),
        )  # fmt: skip
        return PartGraph(nodes=(node,))

    rows = [residual(
        names[0].stream, enters, "as it enters the block", "gaps" if number else "embed",
        "hook_resid_pre", "hook_in", shares=copied,
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
        nouns = _nouns(sublayer)
        leaf = sublayer.leaves.rpartition(".")[2]
        rows.append(residual(
            sublayer.leaves, op, "as it leaves the block" if last else f"after {nouns}",
            "residual", *(("hook_resid_mid",) if leaf == "resid_mid" else ()),
            *(("hook_resid_post", "hook_out") if last else ()),
        ))  # fmt: skip
        made_of = made_of if op.plain else (sublayer.leaves,)
    similar = tuple(
        (theirs, (f"blocks.{number}.{norm}.out", f"blocks.{number}.{norm}.w"))
        for norm, theirs in _NORMS.items()
    )
    rest = PartGraph(
        nodes=(), parameters=_scale(number) if layer.scaled else (), similar=similar,
        absent=tuple(_absent(layer, names)),
    )  # fmt: skip
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
    one: BranchNames, sublayer: SublayerNames, letters: Mapping[str, str], number: int, width: int,
    learned: bool,
) -> PartGraph:  # fmt: skip
    part = one.config.part
    mixes = part_of(sublayer.branches[0].config.part).mixes
    return part_of(part).graph(part, Site(
        name=one.part, source=one.reads, stream=sublayer.stream, makes=one.makes,
        letter=letters[one.makes], adds=one.makes in sublayer.adds, layer=number, width=width,
        learned_positions=learned, second=one is not sublayer.branches[0] and not mixes,
    ))  # fmt: skip


def _nouns(sublayer: SublayerNames) -> str:
    return " and ".join(part_of(one.config.part).noun for one in sublayer.branches)


def _same(name: str, words: str, post: PartGraph, number: int) -> Node:
    """The added tensor, if it is the output of a norm: the same tensor."""
    normed = post.nodes[-1]
    return Node(
        name=name, letter=normed.letter, axes=("T", "D"), op=normed.op, words=words, group="norm",
        layer=number, wide=True, shares=normed.name, theirs=_hook(name),
    )  # fmt: skip


def _hook(name: str) -> tuple[str, ...]:
    leaf = name.rpartition(".")[2]
    return (f"hook_{leaf}",) if leaf in ("attn_out", "mlp_out") else ()


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
        readers = [other for other in sublayer.branches if other.reads == one.reads]
        words = (f"the norm before {noun}",
                 f"the residual stream, normalized, as it enters {noun}", "")  # fmt: skip
        yield norm_graph(
            branch.pre_norm, one.norm, sublayer.stream, letters[one.reads], words, layer=number,
            theirs=tuple(hook for other in readers for hook in parts[other.part].entering),
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
        theirs=_hook(one.adds),
    ),))  # fmt: skip


def _absent(layer: LayerConfig, names: Sequence[SublayerNames]) -> Iterator[Absent]:
    """Norms, streams and parts that only other blocks have."""
    branches = [one for sublayer in names for one in sublayer.branches]
    nouns = [part_of(one.config.part).noun for one in branches]
    for number in range(1, 4):
        here = branches[number - 1] if number <= len(branches) else None
        if here is None:
            yield Absent(names=rf"ln{number}(_post)?\b", why=f"its block has {' and '.join(nouns)}")
            continue
        noun = nouns[number - 1]
        if here.post is None:
            yield Absent(
                names=rf"ln{number}_post\b", why="no norm follows its attention or feed-forward"
            )
        if here.norm is None:
            yield Absent(names=rf"ln{number}\b", why=f"no separate norm precedes {noun}")
    if all(sublayer.summed is None for sublayer in names):
        yield Absent(names=r"(branch_sum|sum_norm)\b", why="the sum of its parts has no norm")
    if not layer.scaled:
        yield Absent(names=r"out_scale\b", why="no parameter multiplies its block's output")
    own = {part_of(one.config.part).prefix for one in branches}
    for part in PARTS.values():
        if part.prefix not in own:
            yield Absent(
                names=rf"{part.prefix}\b", why=f"its block is {' and '.join(nouns)}"
            )
