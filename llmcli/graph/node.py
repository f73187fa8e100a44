"""The tensors of a model as data: activations, parameters, states.

No torch. Each part describes its own tensors by these; a `Graph` (`graph.graph`) has those of all
parts of a model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from llmcli.graph.ops import Op


@dataclass(frozen=True, kw_only=True)
class Node:
    """An activation: its name, description, and the op that computes it from others.

    `letter`: its symbol in formulas; `axes`: without the batch; `words`: its description. `group`:
    the row of `timing` that counts it. `wide`: kept in at least float32. `shares`: the memory that
    it is a view of.

    `formula_letter`: the symbol in its formula if it differs. `aside`: a remark that derivations
    append to the formula. `ends`: only for positions whose logits are needed. `integer`: integer
    values. `tap_only`: computed only for a tap; the forward pass does not use it, so it cannot be
    edited.
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
    formula_letter: str = ""
    aside: str = ""
    ends: bool = False
    integer: bool = False
    tap_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter; `output`: the activation whose formula contains it.

    `axes` have the formula's orientation (`Q = T¹ W_q`); `transposed`: torch stores the transpose.
    `kind`: the row of `info` that counts it. `shares`: the memory shared by several parameters in a
    row. `wide`: kept in at least float32 in every dtype (`A_log`, correction biases). `dense`:
    never in blocks, since each head's matrix is multiplied separately and along both axes, one of
    which crosses blocks.
    """

    name: str
    axes: tuple[str, ...]
    output: str
    words: str
    kind: str
    letter: str
    layer: int | None = None
    transposed: bool = False
    wide: bool = False
    dense: bool = False
    shares: str | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """State kept between calls; `holds`: the activation stored in it, row by row.

    `before`: the first activation computed from it. Additional `axes` are tokens: `S` for all,
    another letter for this many last ones; without any, the last token's row. `wide`: kept in at
    least float32; `cached`: in the dtype of keys and values. `ring`: position p of the last L
    tokens is in slot p mod L. `shares`: the memory of several rows, side by side in the last axis.
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
    shares: str | None = None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused kernel, which does not store the activations that it `fuses`.

    `optional`: the part falls back to separate ops if a covered activation is edited.
    """

    fuses: tuple[str, ...]
    optional: bool = False

    def runs(self, edited: Container[str]) -> bool:
        """Whether the kernel runs if the activations `edited` are edited."""
        return not (self.optional and any(name in edited for name in self.fuses))


@dataclass(frozen=True, kw_only=True)
class PartGraph:
    """The description of one part's tensors.

    `sizes`: of its axes by letter. `segments`: the axes that are concatenated in an axis, such as
    `C` → `Hk·dk|Hk·dk|H·dv`; its size is their sum. `documents`: how the documents write letters.
    """

    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...] = ()
    states: tuple[State, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    segments: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The place of a part: its `name` (`blocks.3.attn`), input and output.

    `source`: its input, computed from the residual `stream` by its norm, if any. `output` and
    `letter`: its output. `adds`: the output is added to the residual stream directly, without a
    norm or multiplier. `second`: another feed-forward precedes it in the block and has the usual
    letters.
    """

    name: str
    source: str
    stream: str
    output: str
    letter: str
    adds: bool
    layer: int
    width: int
    second: bool = False

    def words(self, what: str) -> str:
        """The description of the output of `what`."""
        if self.adds:
            return f"what {what} adds to the residual stream"
        return f"the output of {what}, before its norm or multiplier"
