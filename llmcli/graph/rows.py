"""Declares the tensors of a part: its table has what is constant, calls add the ops. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from llmcli.config.norm import HeadNorm, NormConfig
from llmcli.graph.node import Kernel, Node, Parameter, PartGraph, Site, State
from llmcli.graph.ops import Normalize, Op, Project
from llmcli.graph.recurrence import Cut


@lru_cache(maxsize=64)
def table(text: str) -> Mapping[str, tuple[str, ...]]:
    """First column → the other columns of its line, separated by two or more spaces."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip())
    return {leaf: tuple(columns) for leaf, *columns in lines}


def axes_of(config: object) -> dict[str, str]:
    """Letter of an axis → the field of a part's configuration with its size (`H` → `heads`)."""
    pairs: str = vars(type(config)).get("AXES", "")
    return dict(pair.split() for pair in pairs.split(", ") if pair)


def sizes_of(config: object) -> dict[str, int]:
    """Letter of an axis → its size; without those that the configuration does not set."""
    found = {letter: attrgetter(field)(config) for letter, field in axes_of(config).items()}
    return {letter: size for letter, size in found.items() if size is not None}


def fields_of(config: object, names: str) -> dict[str, Any]:
    """The named fields of a part's configuration, as facts for `info`."""
    return {name: attrgetter(name)(config) for name in names.split()}


class Rows:
    """Collects the tensors of the part `name` in execution order, for `graph`.

    `lines`: a table with a line for each activation: leaf name, symbol, axes, group with optional
    flags of `Node` (`scan wide`), and description; for a parameter that does not follow from its
    activation: name and description. `kind`: the row of `info` that counts the parameters. `sizes`:
    of the part's axes. Methods return full names.
    """

    def __init__(
        self,
        name: str,
        lines: str,
        kind: str,
        sizes: Mapping[str, int] | None = None,
        *,
        layer: int | None,
    ) -> None:
        self.name = name
        self.layer = layer
        self.kind = kind
        self.sizes = dict(sizes or {})
        self.nodes: list[Node] = []
        self.parameters: list[Parameter] = []
        self.states: list[State] = []
        self._lines = table(lines)

    def named(self, leaf: str) -> str:
        """The full name of a tensor of the part; full names stay."""
        return f"{self.name}.{leaf}" if self.name and not leaf.startswith("blocks.") else leaf

    def node(self, leaf: str, op: Op, *, name: str = "", **other: Any) -> str:
        """An activation as the table describes it, except `other` fields of `Node`."""
        letter, axes, place, *words = self._lines[leaf]
        group, *flags = place.split()
        found: dict[str, Any] = {"letter": letter, "words": " ".join(words), "group": group}
        found |= dict.fromkeys(flags, True) | other
        name, shape = self.named(name or leaf), tuple(axes.split())
        self.nodes.append(Node(name=name, axes=shape, op=op, layer=self.layer, **found))
        return name

    def parameter(self, leaf: str, axes: str, output: str, words: str = "", **other: Any) -> str:
        """A parameter with `axes` (`D H·dh`); its symbol is the leaf name if `other` has none."""
        name, shape, output = self.named(leaf), tuple(axes.split()), self.named(output)
        found = {"letter": leaf, "kind": self.kind, "layer": self.layer, "output": output, **other}
        words = words or self._lines[leaf][-1]
        self.parameters.append(Parameter(name=name, axes=shape, words=words, **found))
        return name

    def project(
        self,
        leaf: str,
        source: str,
        *,
        symbol: str = "",
        name: str = "",
        over: str = "D",
        bias: bool = False,
        fused: str = "",
        head: str = "head",
        mark: str = "",
        dense: bool = False,
        clip: float | None = None,
        **other: Any,
    ) -> str:
        """`X W + b`, with the matrix `W_<symbol>` (by default the leaf name) and its bias.

        Three axes are columns split into heads. `fused`: the product that computes several such
        activations, in whose memory matrix and bias are. `mark`: suffix of the parameters' symbols.
        """
        axes, words = self._lines[leaf][1].split(), self._lines[leaf][-1]
        columns = "·".join(axis for axis in axes if axis != "T")
        shapes = (f"{over} {columns}", columns)
        how: dict[str, Any] = {"bias": bias, "fused": fused, "mark": mark, "dense": dense}
        made = self.weights(symbol or leaf, name or leaf, shapes, words, **how)
        heads = self.sizes[axes[0]] if len(axes) == 3 else 0
        made |= {"over": over, "columns": columns, "heads": heads, "head": head, "clip": clip}
        op = Project(source=source, **made)
        return self.node(leaf, op, name=name, **other)

    def weights(
        self,
        symbol: str,
        output: str,
        shapes: tuple[str, str],
        words: str,
        *,
        bias: bool,
        fused: str = "",
        mark: str = "",
        dense: bool = False,
    ) -> dict[str, Any]:
        """A product's matrix and bias with axes `shapes`, as the fields of its op."""
        found: dict[str, Any] = {"fused": self.named(fused) if fused else ""}
        kinds = (("weight", "W", "projection to"), ("bias", "b", "bias of"))
        for (field, letter, of), axes in zip(kinds[: 1 + bias], shapes, strict=False):
            leaf = f"{letter}_{symbol}"
            how: dict[str, Any] = {"letter": f"{leaf}{mark}", "transposed": letter == "W"}
            how["dense"] = dense or (letter == "b" and " " in axes)
            how["shares"] = self.named(f"{letter}_{fused}") if fused else None
            said = "" if leaf in self._lines else f"{of} {words}"
            found[field] = self.parameter(leaf, axes, output, said, **how)
        return found

    def output(self, site: Site, noun: str, leaf: str, source: str, **other: Any) -> str:
        """The last projection, back to the width: the output of the part `noun` at `site`."""
        words, letter = site.words(noun), site.letter
        return self.project(
            leaf, source, name=site.output, letter=letter, words=words, wide=True, **other
        )

    def normalize(
        self,
        leaf: str,
        source: str,
        norm: NormConfig,
        which: str,
        *,
        prefix: str | None = None,
        joined: bool = False,
        groups: int = 1,
        clip: float | None = None,
        **other: Any,
    ) -> str:
        """A normalized activation, and its weights `w` and bias `b` if the norm `which` has them.

        `prefix`: of their names, `<leaf>.` by default. See `Normalize` for the other arguments.
        """
        axes, made = self._lines[leaf][1].split(), dict[str, str]()
        between = "·" if joined else " "
        axis = f"{axes[0]}{between}{axes[-1]}" if joined or isinstance(norm, HeadNorm) else axes[-1]
        for letter, words, there in (("w", "weights", norm.weights), ("b", "bias", norm.bias)):
            if there:
                name = f"{leaf}.{letter}" if prefix is None else f"{prefix}{letter}"
                found = {"letter": letter, "kind": "norms"}
                made[letter] = self.parameter(name, axis, leaf, f"{words} of {which}", **found)
        how: dict[str, Any] = {"weight": made.get("w"), "bias": made.get("b"), "clip": clip}
        op = Normalize(source=source, norm=norm, joined=joined, groups=groups, **how)
        return self.node(leaf, op, **other)

    def state(
        self, leaf: str, axes: str, holds: str, before: str, formula: str, words: str, **other: Any
    ) -> None:
        """The state `cache.<layer>.<leaf>`, see `State`."""
        assert self.layer is not None
        found: dict[str, Any] = {"formula": formula, "words": words, **other}
        found |= {"holds": self.named(holds), "before": self.named(before)}
        name, shape = f"cache.{self.layer}.{leaf}", tuple(axes.split())
        self.states.append(State(name=name, axes=shape, layer=self.layer, **found))

    def cache(self, leaf: str, axes: str, holds: str, what: str, plain: str = "", **o: Any) -> None:
        """A state read by the scores: `what` of all positions, called `plain` in its words."""
        formula, words = f"the {what} of every position so far", f"the cached {plain or what}"
        self.state(leaf, axes, holds, "scores", formula, words, cached=True, **o)

    def cuts(self, source: str, segments: str) -> list[Cut]:
        """The ops that cut a row into its segments' heads: `Hk·dk|Hk·dk|H·dv`."""
        found, first = list[Cut](), 0
        for segment in segments.split("|"):
            heads, each = (self.sizes[letter] for letter in segment.split("·"))
            found.append(Cut(source=source, first=first, heads=heads, size=each))
            first += heads * each
        return found

    def graph(self, *kernels: Kernel, **other: Any) -> PartGraph:
        """The collected tensors, and `other` fields of `PartGraph`."""
        found: dict[str, Any] = {"kernels": kernels, "sizes": self.sizes, **other}
        found |= {"parameters": tuple(self.parameters), "states": tuple(self.states)}
        return PartGraph(nodes=tuple(self.nodes), **found)
