"""Declares the tensors of a part: its table has what is constant, calls add the ops. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from llmcli.graph.node import Absent, Kernel, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import Normalize, Op, Project
from llmcli.parts.norm.config import NormConfig

_BY_LEAF: Mapping[str, str] = {}


@lru_cache(maxsize=64)
def table(text: str) -> Mapping[str, tuple[str, ...]]:
    """First column → the other columns of its line, separated by two or more spaces."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip())
    return {leaf: tuple(columns) for leaf, *columns in lines}


def sizes_of(config: object, axes: Mapping[str, str]) -> dict[str, int]:
    """Letter of an axis → its size in `config`, whose field `axes` names (`H` → `heads`)."""
    found = {letter: attrgetter(field)(config) for letter, field in axes.items()}
    return {letter: size for letter, size in found.items() if size is not None}


class Rows:
    """Collects the tensors of the part `name` in execution order, for `graph`.

    `lines`: a table with a line for each activation: leaf name, symbol, axes, group with optional
    flags of `Node` (`scan wide`), and description; for a parameter that does not follow from its
    activation: name and description. `kind`: the row of `info` that counts the parameters. `sizes`:
    of the part's axes. `theirs`: a table of TransformerLens' names. Methods return full names.
    """

    def __init__(
        self,
        name: str,
        lines: str,
        *,
        layer: int | None,
        kind: str,
        sizes: Mapping[str, int] | None = None,
        theirs: str = "",
    ) -> None:
        self.name = name
        self.layer = layer
        self.kind = kind
        self.sizes = dict(sizes or {})
        self.nodes: list[Node] = []
        self.parameters: list[Parameter] = []
        self.states: list[State] = []
        self.missing: list[Absent] = []
        self._lines = table(lines)
        self._theirs = table(theirs)

    def named(self, leaf: str) -> str:
        """The full name of a tensor of the part; full names stay."""
        return f"{self.name}.{leaf}" if self.name and not leaf.startswith("blocks.") else leaf

    def names(self, leaf: str) -> tuple[str, ...]:
        """TransformerLens' names of a tensor."""
        return tuple(" ".join(self._theirs.get(leaf, ())).split())

    def node(self, leaf: str, op: Op, *, name: str = "", **other: Any) -> str:
        """An activation as the table describes it, except `other` fields of `Node`."""
        letter, axes, place, *words = self._lines[leaf]
        group, *flags = place.split()
        found: dict[str, Any] = {
            "letter": letter, "words": " ".join(words), "theirs": self.names(leaf),
        }  # fmt: skip
        found |= dict.fromkeys(flags, True) | other
        self.nodes.append(Node(
            name=self.named(name or leaf), axes=tuple(axes.split()), op=op, group=group,
            layer=self.layer, **found,
        ))  # fmt: skip
        return self.nodes[-1].name

    def parameter(
        self, leaf: str, axes: str, makes: str, words: str = "", *, letter: str = "",
        kind: str = "", **other: Any,
    ) -> str:  # fmt: skip
        """A parameter with `axes` (`D H·dh`), a symbol equal to its leaf name if none is given."""
        self.parameters.append(Parameter(
            name=self.named(leaf), axes=tuple(axes.split()), makes=self.named(makes),
            words=words or self._lines[leaf][-1], kind=kind or self.kind, letter=letter or leaf,
            layer=self.layer, theirs=self.names(leaf), **other,
        ))  # fmt: skip
        return self.parameters[-1].name

    def project(
        self, leaf: str, source: str, *, symbol: str = "", name: str = "", over: str = "D",
        bias: bool = False, fused: str = "", head: str = "head", mark: str = "",
        dense: bool = False, clip: float | None = None, **other: Any,
    ) -> str:  # fmt: skip
        """`X W + b`, with the matrix `W_<symbol>` (by default the leaf name) and its bias.

        Three axes are columns split into heads. `fused`: the product that computes several such
        activations, in whose memory matrix and bias are. `mark`: suffix of the parameters' symbols.
        """
        symbol, axes = symbol or leaf, self._lines[leaf][1].split()
        columns = "·".join(axis for axis in axes if axis != "T")
        made = {}
        for letter, shape, to in (("W", f"{over} {columns}", "projection to"),
                                  ("b", columns, "bias of"))[: 1 + bias]:  # fmt: skip
            own = f"{letter}_{symbol}"
            words = "" if own in self._lines else f"{to} {self._lines[leaf][-1]}"
            made[letter] = self.parameter(
                own, shape, name or leaf, words, letter=f"{own}{mark}", turned=letter == "W",
                dense=dense, shares=self.named(f"{letter}_{fused}") if fused else None,
            )  # fmt: skip
        op = Project(
            source=source, weight=made["W"], bias=made.get("b"), over=over, columns=columns,
            heads=self.sizes[axes[0]] if len(axes) == 3 else 0, head=head,
            fused=self.named(fused) if fused else "", clip=clip,
        )  # fmt: skip
        return self.node(leaf, op, name=name, **other)

    def output(
        self, site: Site, noun: str, leaf: str, source: str, *theirs: str, **other: Any
    ) -> str:
        """The last projection, back to the width: the output of the part `noun` at `site`.

        `theirs`: see `Site.output`.
        """
        words, names = site.output(noun, *theirs)
        return self.project(
            leaf, source, name=site.makes, letter=site.letter, words=words, theirs=names, wide=True,
            **other,
        )  # fmt: skip

    def normalize(
        self, leaf: str, source: str, norm: NormConfig, which: str, *, weights: str | None = None,
        joined: bool = False, groups: int = 1, **other: Any,
    ) -> str:  # fmt: skip
        """A normalized activation, and its weights `w` and bias `b` if the norm `which` has them.

        `weights`: the prefix of their names, `<leaf>.` by default. See `Normalize` for `joined` and
        `groups`.
        """
        axes, prefix = self._lines[leaf][1].split(), f"{leaf}." if weights is None else weights
        made = {
            letter: self.parameter(
                f"{prefix}{letter}",
                f"{axes[0]}·{axes[-1]}" if joined else axes[-1], leaf, f"{words} of {which}",
                letter=letter, kind="norms",
            )
            for letter, words, there in (("w", "weights", norm.weights), ("b", "bias", norm.bias))
            if there
        }  # fmt: skip
        op = Normalize(
            source=source, norm=norm, weight=made.get("w"), bias=made.get("b"), joined=joined,
            groups=groups,
        )  # fmt: skip
        return self.node(leaf, op, **other)

    def state(
        self, leaf: str, axes: str, holds: str, before: str, formula: str, words: str, **other: Any
    ) -> None:
        """The state `cache.<layer>.<leaf>`, see `State`."""
        assert self.layer is not None
        self.states.append(State(
            name=f"cache.{self.layer}.{leaf}", axes=tuple(axes.split()), holds=self.named(holds),
            before=self.named(before), formula=formula, words=words, layer=self.layer, **other,
        ))  # fmt: skip

    def ring(self, holds: str, channels: str) -> None:
        """The state of the convolution `conv`: the last inputs, `[L, channels]`, as a ring."""
        self.state(
            "conv", f"L {channels}", holds, "conv", ring=True,
            formula="the last L rows of Y, that of position p in row p mod L",
            words="the last inputs of the convolution",
        )  # fmt: skip

    def absent(self, names: str, why: str, theirs: Mapping[str, str] = _BY_LEAF) -> None:
        """Tensors of other models that are missing here, see `Absent`."""
        self.missing.append(Absent(names=names, why=why, theirs=theirs))

    def graph(self, *kernels: Kernel, **other: Any) -> PartGraph:
        """The collected tensors, and `other` fields of `PartGraph`."""
        return PartGraph(
            nodes=tuple(self.nodes), parameters=tuple(self.parameters), states=tuple(self.states),
            kernels=kernels, sizes=self.sizes, absent=tuple(self.missing), **other,
        )  # fmt: skip
