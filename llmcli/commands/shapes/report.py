"""What `llmcli shapes` shows: every tensor of a model, and repeated layers in one row."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcli.graph.spec import Kind, TensorSpec
from llmcli.records.document import APART, FLAT, ViewCheck, derived
from llmcli.records.info import StateNeed
from llmcli.records.text import Token

Phases = tuple[TensorSpec, ...]  # a tensor in every phase: only shapes and dtypes differ


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of the checkpoint, `source`; `operations` make the parameter of it."""

    source: str
    stored_shape: tuple[int, ...]
    stored_format: str
    stored_bytes: int
    operations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShapeTensor(TensorSpec):
    """One tensor in one phase; a parameter is the same in all and has none.

    `axes` are its letters and `documents` those of the papers, `bytes` of all its numbers in
    `dtype`. `flops` of the product that makes it, 2 a multiply-add, of the pairs that the causal
    mask and the window leave, `flops_full` of the full square. `shares`: the memory that it is
    a view of, None where it has its own. `written` is False for what no kernel ever has in memory.
    """

    dtype: str
    documents: tuple[str, ...]
    stored: Stored | None = field(metadata=FLAT)


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A row: `phases` of its first layer; `layers` is empty outside the blocks."""

    name: str
    layers: tuple[int, ...]
    phases: Phases = field(metadata=APART)

    @derived
    def formula(self) -> str:
        """The formula; a reference to the previous block is generalized for all layers."""
        formula = self.phases[0].formula
        if len(self.layers) < 2:
            return formula
        return formula.replace(f"of block {self.layers[0] - 1}", "of the block before")


@dataclass(frozen=True, kw_only=True)
class ShapeRow(Folded):
    """A tensor, or the same one of several `layers` (empty outside the blocks).

    `name` has their numbers in it: `blocks.{0-29}.attn.q`.
    """

    # of the first layer
    phases: tuple[ShapeTensor, ...] = field(metadata=APART)
    # `own`, `view of` another, for parameters `part of` a larger one, for the cache `copy of`
    # another, `derived` for what is never written
    memory: str = field(metadata=APART)
    source: str = field(metadata=APART)  # the checkpoint's name with the layers' numbers in it

    @property
    def first(self) -> ShapeTensor:
        """The tensor of the first phase, for what is the same in all phases."""
        return self.phases[0]


@dataclass(frozen=True, kw_only=True)
class LetterValue:
    """A letter of the axes, what the papers call it, its sizes: layers and phases may differ."""

    letter: str
    documents: str
    values: tuple[int, ...]
    # the axes concatenated in it (`Hk·dk|Hk·dk|H·dv`), empty for all others
    segments: str = field(default="", metadata=APART)


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are identical up to their number; `window`: the most keys that a query sees."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, kw_only=True)
class CacheGrowth:
    """Bytes of keys and values that one more token takes, of all sequences together.

    `per_layer` are those of the layers of one kind, in the order of `LayerKind`. `states`: what of
    each sequence does not grow, None where all of it does.
    """

    per_token: int
    per_layer: tuple[int, ...]
    prefill: int
    decode: int
    states: StateNeed | None = None


@dataclass(frozen=True, kw_only=True)
class CallFlops:
    """FLOPs of all tensors of one phase, in both conventions; the logits are of all positions."""

    phase: str
    flops: int
    flops_full: int


@dataclass(frozen=True, kw_only=True)
class ShapesReport:
    """All that was requested; `tensors` one by one, `rows` the same folded.

    `prompt`: its tokens, where one was given.
    """

    batch: int
    tokens: int
    phases: tuple[str, ...]
    prompt: tuple[Token, ...] = ()
    letters: tuple[LetterValue, ...]
    tensors: tuple[ShapeTensor, ...]
    rows: tuple[ShapeRow, ...]
    layers: tuple[LayerKind, ...]
    cache: CacheGrowth
    flops: tuple[CallFlops, ...]
    example: bool = field(default=False, metadata=APART)  # the number of tokens is one
    stored_bytes: int | None = field(metadata=APART)
    checks: tuple[ViewCheck, ...] = field(metadata=APART)


@dataclass(frozen=True, kw_only=True)
class NameRow:
    """A name: what it is in words, its axes, their sizes, its formula, and what others call it.

    Numbers of layers are `{i}` in `aliases`.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    documents: tuple[str, ...]
    words: str
    formula: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NamesReport:
    """What `--names` shows."""

    names: tuple[NameRow, ...]
    letters: tuple[LetterValue, ...] = field(metadata=APART)
    example: bool = field(metadata=APART)  # the number of tokens is one
