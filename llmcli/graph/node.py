"""What a model is made of, as data: activations, parameters, states. No torch.

A part says in rows of these, once, everything that it knows of its own tensors; a `Graph`
(`anatomy.graph`) is the rows of all parts of a model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from llmcli.graph.ops import Op


@dataclass(frozen=True, kw_only=True)
class Node:
    """An activation: what it is called, what it is, and which op makes it of which others.

    `letter` is what the documents call it, `axes` are without the batch, `words` say what it is.
    `group`, which the part names, is where `timing` counts it. `wide`: kept in at least float32.
    `shares` names the memory that it is a view of. `theirs` are TransformerLens' names of it, the
    legacy name first, `{i}` the layer.

    `formula_letter`: the formula's, where the formula's is another one. `aside` is what a
    derivation adds to the formula. `ends`: of the positions alone whose logits are wanted.
    `integer`: whole numbers.
    `shown`: made for a tap; the pass continues without it, so that it cannot be edited.
    """

    name: str
    letter: str
    axes: tuple[str, ...]
    op: Op
    words: str
    group: str
    layer: int | None = None
    wide: bool = False
    shares: str | None = None
    theirs: tuple[str, ...] = ()
    formula_letter: str = ""
    aside: str = ""
    ends: bool = False
    integer: bool = False
    shown: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter: `makes` is the activation whose formula it is in.

    `axes` have the formula's orientation (`Q = T¹ W_q`); `turned`: torch stores the transpose.
    `kind` is where `info` counts it. `shares` is the memory in which several lie in a row. `wide`:
    kept in at least float32, whatever the model computes in (`A_log`, correction biases). `dense`:
    never in blocks: each head's matrix is multiplied by itself, and along either axis, one of which
    goes across blocks.
    """

    name: str
    axes: tuple[str, ...]
    makes: str
    words: str
    kind: str
    letter: str
    layer: int | None = None
    turned: bool = False
    wide: bool = False
    dense: bool = False
    shares: str | None = None
    theirs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class State:
    """What is kept between calls: `holds` is the activation that is put there, row by row.

    `before` is the first activation that is computed from it. `axes` that the activation has not
    are tokens: `S` all of them, another letter so many of the last ones, and without any it is the
    last token's row. `wide`: kept in at least float32; `cached`: in the dtype of keys and values.
    `ring`: of the L last ones that of position p is in slot p mod L.
    """

    name: str
    axes: tuple[str, ...]
    holds: str
    before: str
    formula: str
    words: str
    layer: int
    wide: bool = False
    cached: bool = False
    ring: bool = False


@dataclass(frozen=True, kw_only=True)
class Absent:
    """What other models have here: a pattern of names without the block's, and why it is not there.

    `theirs`: TransformerLens' names of it → ours.
    """

    names: str
    why: str
    theirs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused kernel, which never writes what it `covers`: activations between its ends.

    `optional`: the part can do without it, and does where something that it covers is edited.
    """

    covers: tuple[str, ...]
    optional: bool = False

    def runs(self, edited: Container[str]) -> bool:
        """Whether it runs where these activations are edited."""
        return not (self.optional and any(name in edited for name in self.covers))


@dataclass(frozen=True, kw_only=True)
class PartGraph:
    """The rows of one part.

    `sizes` of its axes by their letters, and `documents`, how the documents write these letters.
    `entering`: TransformerLens' names of what it reads. `similar`: how names of other programs end,
    a pattern, and what is named instead when such a name is not found; a reference to the pattern's
    groups may be in it.
    """

    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...] = ()
    states: tuple[State, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[Absent, ...] = ()
    entering: tuple[str, ...] = ()
    similar: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a part stands: its `name` (`blocks.3.attn`), what it reads, and what it makes.

    `source` is what it reads, of the residual `stream` before its norm, if it has one.
    `letter` is that of what it makes. `adds`: that is what is added to the residual stream; a norm
    or a multiplier follows where not. `learned_positions`: whether the embedding has them.
    `second`: a feed-forward stands before it in its block, whose letters it does not take.
    """

    name: str
    source: str
    stream: str
    makes: str
    letter: str
    adds: bool
    layer: int
    width: int
    learned_positions: bool
    second: bool = False

    def output(self, what: str, *theirs: str) -> tuple[str, tuple[str, ...]]:
        """The words of what `what` makes, and TransformerLens' names: of what is added, the first.

        `theirs` begins with the name of what is added to the stream.
        """
        if self.adds:
            return f"what {what} adds to the residual stream", theirs
        return f"the output of {what}, before its norm or multiplier", theirs[1:]
