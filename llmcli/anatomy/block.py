"""A block of sublayers and branches: the names of its tensors, and their rows. No torch.

x ──┬── pre-norm ── part ── post-norm ── · multiplier ──(+)── x of the next sublayer
    ├── … a branch beside it ────────────────────────────┤
    └────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from llmcli.config import Branch, LayerConfig
from llmcli.graph.node import Absent, Node, Parameter, PartGraph, Site
from llmcli.graph.ops import Add, Op
from llmcli.parts.norm.graph import norm_graph
from llmcli.parts.registry import PARTS, part_of

_NUMBERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_NORMS = {  # what other programs call them (`PartGraph.similar`)
    "ln1": r"(input_layernorm|ln_1)(\.weight)?",
    "ln2": r"(post_attention_layernorm|ln_2)(\.weight)?",
}


@dataclass(frozen=True, kw_only=True)
class BranchNames:
    """The names of a branch: of what its part reads and makes, of the norms, of what is added.

    `norm` and `post` are the modules' (`blocks.3.ln1`), None where there is none, or where the
    norm is that of the branch before.
    """

    config: Branch
    norm: str | None
    reads: str
    part: str
    makes: str
    post: str | None
    adds: str


@dataclass(frozen=True, kw_only=True)
class SublayerNames:
    """The residual stream before and after a sublayer, and the branches between."""

    stream: str
    leaves: str
    branches: tuple[BranchNames, ...]


def block_names(layer: LayerConfig, block: str) -> tuple[SublayerNames, ...]:
    """The names in `block` (`blocks.3`): norms are numbered by branch (`ln1`, `ln1_post`, `ln2`).

    What the first mixer adds is `attn_out`, whatever it is, and the first feed-forward `mlp_out`;
    another one adds `<its prefix>_out`.
    """
    numbers, found, used = count(1), [], Counter[str]()
    stream = f"{block}.resid_pre"
    for at, sublayer in enumerate(layer.sublayers):
        branches, reads = [], stream
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
            adds = f"{part}_out" if used[f"{role}_out"] else f"{block}.{role}_out"
            used[f"{role}_out"] += 1
            plain = branch.post_norm is None and branch.multiplier == 1
            branches.append(BranchNames(
                config=branch, norm=norm, reads=reads, part=part,
                makes=adds if plain else f"{part}.out",
                post=f"{block}.ln{number}_post" if branch.post_norm is not None else None,
                adds=adds,
            ))  # fmt: skip
        last = at == len(layer.sublayers) - 1
        leaves = f"{block}.resid_{'post' if last else 'mid' if at == 0 else f'mid{at + 1}'}"
        found.append(SublayerNames(stream=stream, leaves=leaves, branches=tuple(branches)))
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
    """The rows of block `number` in execution order, and what the stream is made of after it.

    `enters` makes its residual stream, a copy of the activation `copied` where it is one.
    """
    names = block_names(layer, f"blocks.{number}")
    letters = _letters(names)
    parts = {
        one.part: _part(one, letters, number, width, learned_positions)
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
        added = tuple(one.adds for one in sublayer.branches)
        last = sublayer is names[-1]
        made_of = (*made_of, *added)
        op = Add(
            parts=(*added, sublayer.stream), before=made_of, scale=layer.scale if last else 1,
            weight=f"blocks.{number}.out_scale.w" if layer.scaled and last else None,
        )  # fmt: skip
        nouns = " and ".join(part_of(one.config.part).noun for one in sublayer.branches)
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
    """`out_scale.w` `[1]`, what the block's output is multiplied by."""
    block = f"blocks.{number}"
    return (Parameter(
        name=f"{block}.out_scale.w", axes=("1",), makes=f"{block}.resid_post", kind="norms",
        words="what leaves the block is multiplied by it", letter="c", layer=number, wide=True,
    ),)  # fmt: skip


def _letters(names: Sequence[SublayerNames]) -> dict[str, str]:
    """`T¹`, `T²` … in execution order, and `H` for what leaves the block."""
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
            if one.post is None or one.config.multiplier != 1:
                number(one.adds)
            else:  # the same tensor
                numbered[one.adds] = numbered[f"{one.post}.out"]
        number(sublayer.leaves)
    return numbered | {names[-1].leaves: "H"}


def _part(
    one: BranchNames, letters: Mapping[str, str], number: int, width: int, learned: bool
) -> PartGraph:
    part = one.config.part
    return part_of(part).graph(part, Site(
        name=one.part, source=one.reads, makes=one.makes, letter=letters[one.makes],
        adds=one.makes == one.adds, layer=number, width=width, learned_positions=learned,
    ))  # fmt: skip


def _branch(
    one: BranchNames,
    sublayer: SublayerNames,
    parts: Mapping[str, PartGraph],
    letters: Mapping[str, str],
    number: int,
) -> Iterator[PartGraph]:
    """Norm, part, norm, and what is added."""
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
        words = (f"the norm after {noun}", f"what {noun} gives, normalized", "")
        post = norm_graph(
            branch.post_norm, one.post, one.makes, letters[source], words, layer=number, wide=True
        )
        yield post
    if one.adds == one.makes:
        return
    mixes = part_of(branch.part).mixes
    op: Op = Add(parts=(source,), before=(), scale=branch.multiplier)
    same = branch.multiplier == 1
    node = Node(
        name=one.adds, letter=letters[one.adds], axes=("T", "D"),
        op=post.nodes[-1].op if same else op,
        words=f"what {noun} adds to the residual stream", group="norm" if same else "residual",
        layer=number, wide=True, shares=source if same else None,
        theirs=(f"hook_{one.adds.rpartition('.')[2]}",) if mixes or "mlp_out" in one.adds else (),
    )  # fmt: skip
    yield PartGraph(nodes=(node,))


def _absent(layer: LayerConfig, names: Sequence[SublayerNames]) -> Iterator[Absent]:
    """Norms, streams and kinds of parts that other blocks have."""
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
            yield Absent(names=rf"ln{number}\b", why=f"no norm of its own precedes {noun}")
    if not layer.scaled:
        yield Absent(names=r"out_scale\b", why="no parameter multiplies what leaves its block")
    own = {part_of(one.config.part).prefix for one in branches}
    for part in PARTS.values():
        if part.prefix not in own:
            yield Absent(
                names=rf"{part.prefix}\b", why=f"its block is {' and '.join(nouns)}"
            )
