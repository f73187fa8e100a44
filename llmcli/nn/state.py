"""A model's state between calls: an argument, never part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.config.model import ModelConfig
from llmcli.devices import DTYPES
from llmcli.graph.graph import graph
from llmcli.graph.precision import Precision
from llmcli.graph.spec import TensorSpec
from llmcli.nn.step import ReplayClock


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """The memory `[B, …]` of one `State` row, or of several that share it.

    `columns`: each row's name and its size in the last axis. `slots`: the axis with one slot per
    token; None if the size is fixed.
    """

    tensor: Tensor
    columns: Mapping[str, int]
    slots: int | None

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each row's name and tensor."""
        at = 0
        for name, size in self.columns.items():
            yield name, self.tensor.narrow(-1, at, size)
            at += size

    def first(self, tokens: int) -> Tensor:
        """A view of the first `tokens` slots, or of everything if the size is fixed."""
        return self.tensor if self.slots is None else self.tensor.narrow(self.slots, 0, tokens)

    def grown(self, capacity: int) -> Tensor:
        """The tensor with empty slots appended up to `capacity`."""
        if self.slots is None:
            return self.tensor
        behind = [0, 0] * (self.tensor.ndim - 1 - self.slots)
        return F.pad(self.tensor, (*behind, 0, capacity - self.tensor.shape[self.slots]))


class LayerState:
    """What one layer keeps of B sequences between calls, as the graph's `State` rows say.

    Keys, values and latents have one slot per token: its position. Recurrent states and windows of
    convolutions have a fixed size: they ignore `grow`, are copied completely for a `snapshot`, and
    cannot `rewind`. A layer that uses another layer's keys and values has no tensors.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._set(buffers)
        self.rewinds = all(one.slots is not None for one in self._buffers)

    def _set(self, buffers: Iterable[Buffer]) -> None:
        self._buffers = tuple(buffers)
        self._tensors = dict(view for one in self._buffers for view in one.views())

    def _each(self, change: Callable[[Buffer], Tensor]) -> LayerState:
        return LayerState(replace(one, tensor=change(one)) for one in self._buffers)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of a row by the end of its name (`k` of `cache.3.k`). Raises KeyError."""
        return self._tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors (not copies), `[B, …]`, by the end of their names."""
        return dict(self._tensors)

    def joined(self, name: str) -> Tensor:
        """The memory of a row together with the rows that share it."""
        return next(one.tensor for one in self._buffers if name in one.columns)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens per sequence; the contents are kept."""
        self._set(replace(one, tensor=one.grown(capacity)) for one in self._buffers)

    def select(self, rows: Tensor) -> LayerState:
        """A copy with these rows of the batch, in this order; rows may be repeated."""
        return self._each(lambda one: one.tensor.index_select(0, rows.to(one.tensor.device)))

    def lanes(self, count: int) -> LayerState:
        """For one sequence: `count` sequences sharing its memory (views).

        Each reads what the others write; our kernels process their tokens in order.
        """
        return self._each(lambda one: one.tensor.expand(count, *one.tensor.shape[1:]))

    def snapshot(self, tokens: int) -> LayerState:
        """A copy, of slots only the first `tokens`."""
        return self._each(lambda one: one.first(tokens).clone())

    def restore(self, saved: LayerState) -> None:
        """Restore a snapshot into the same tensors; later slots are written before being read."""
        for one, was in zip(self._buffers, saved._buffers, strict=True):
            one.first(0 if was.slots is None else was.tensor.shape[was.slots]).copy_(was.tensor)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Remove sequence b's tokens from `lengths[b]` on; slots are written before being read.

        Raises ValueError if something has a fixed size, which can only rewind to the beginning.
        """
        if not self.rewinds and any(lengths):
            raise ValueError("a recurrent state cannot forget its last tokens: restore a snapshot")
        for one in self._buffers:
            if one.slots is None:
                one.tensor.zero_()


def allocate(
    config: ModelConfig,
    precision: Precision,
    batch: int,
    capacity: int,
    placed: Sequence[torch.device],
) -> Iterator[LayerState]:
    """Yield each layer's empty state for `batch` sequences of up to `capacity` tokens.

    Layer i is on the device `placed[i]`.

    Shapes and dtypes are those of the graph's `State` rows; rows that share memory lie side by side
    in the last axis. All are zero: a masked slot contributes 0 · v to the product with values, and
    0 · NaN is NaN.
    """
    rows = graph(config).states
    shared: list[dict[str, list[TensorSpec]]] = [{} for _ in config.layers]
    for spec in precision.states(config, batch=batch, capacity=capacity):
        assert spec.layer is not None
        shared[spec.layer].setdefault(rows[spec.name].shares or spec.name, []).append(spec)
    for layer, device in zip(shared, placed, strict=True):
        yield LayerState(_buffer(specs, device) for specs in layer.values())


def _buffer(specs: Sequence[TensorSpec], device: torch.device) -> Buffer:
    columns = {spec.name.split(".", 2)[2]: spec.shape[-1] for spec in specs}
    shape, axes = (*specs[0].shape[:-1], sum(columns.values())), specs[0].axes
    dtype = DTYPES[specs[0].dtype or ""]
    return Buffer(
        tensor=torch.zeros(shape, dtype=dtype, device=device),
        columns=columns,
        slots=axes.index("S") if "S" in axes else None,
    )


class RecordedStep(Protocol):
    """A decode step that was recorded with a state's memory.

    `logits`: `[B, 1, V]`, rewritten by each run. `nbytes`: of intermediate results, which are kept.
    """

    logits: Tensor
    nbytes: int

    def run(self, ids_BT: Tensor, starts: Sequence[int], clock: ReplayClock | None) -> None:
        """Run it for tokens `ids_BT`, the first of each row of the state at `starts`."""


class State:
    """The states of all layers, and the number of tokens of each sequence.

    `lengths` is a list on the host, available without synchronization. `lengths_B`: the same
    numbers on the device at a fixed address, if the decoder's step reads them there
    (`Decoder.fixed_shapes`). `read_for`: expected final length of each sequence at its last read;
    rotations of LongRoPE depend on it.
    """

    def __init__(
        self,
        layers: Iterable[LayerState],
        lengths: list[int],
        capacity: int,
        lengths_B: Tensor | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.rewinds = all(layer.rewinds for layer in self.layers)  # can remove single tokens
        self.lengths = lengths
        self.capacity = capacity
        self.lengths_B = lengths_B
        self.read_for = list(lengths)
        # steps that are recorded with this memory, by tokens per sequence and slots
        self.recorded: dict[tuple[int, int], RecordedStep] = {}
        self.stepped = False  # a step that could have been recorded was computed
        self.unrecorded: int | None = None  # slots of steps whose last recording lacked memory

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers together."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """`cache.{layer}.k` and so on → the tensor itself, with all its slots."""
        return {
            f"cache.{number}.{name}": tensor
            for number, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }

    def grow(self, capacity: int) -> None:
        """Grow to at least `capacity` slots per sequence."""
        if capacity > self.capacity:
            for layer in self.layers:
                layer.grow(capacity)
            self.capacity = capacity
            self.recorded.clear()

    def select(self, rows: Sequence[int]) -> State:
        """A new state with copies of these sequences: to fork samples or drop finished ones."""
        device = next(iter(self.tensors().values())).device
        index = torch.tensor(rows, dtype=torch.long, device=device)
        layers = [layer.select(index) for layer in self.layers]
        lengths_B = None if self.lengths_B is None else self.lengths_B[index]
        chosen = State(layers, [self.lengths[row] for row in rows], self.capacity, lengths_B)
        chosen.read_for = [self.read_for[row] for row in rows]
        chosen.stepped = self.stepped
        return chosen

    def lanes(self, count: int) -> State:
        """The only sequence as `count` ones in the same memory, each one token longer.

        A decode step of all lanes reads `count` tokens, each like a separate step.
        """
        (length,) = self.lengths
        layers = [layer.lanes(count) for layer in self.layers]
        return State(layers, list(range(length, length + count)), self.capacity)

    def advance(self, tokens: Sequence[int], totals: Sequence[int] | None = None) -> None:
        """Add the number of new tokens of each sequence, written by the decoder.

        `totals`: final lengths of the sequences (default: current ones).
        """
        self.lengths = [now + more for now, more in zip(self.lengths, tokens, strict=True)]
        self.read_for = list(self.lengths if totals is None else totals)
        if self.lengths_B is None:
            return
        if len(set(tokens)) == 1:  # no copy from the host, since this may be captured
            self.lengths_B.add_(tokens[0])
        else:
            self.lengths_B.copy_(torch.tensor(self.lengths))

    def snapshot(self, *, slots: bool = True) -> State:
        """A copy of the current state, without empty slots.

        Without `slots` it only contains state that cannot be rewound, and can be restored as long
        as these tokens' slots have not been overwritten.
        """
        tokens = max(self.lengths) if slots else 0
        layers = [layer.snapshot(tokens) for layer in self.layers]
        copy = State(layers, list(self.lengths), tokens)
        copy.read_for = list(self.read_for)
        return copy

    @torch.inference_mode()  # the decoder's own writes are in that mode
    def restore(self, saved: State) -> None:
        """Restore a snapshot. Raises ValueError if its batch differs or it does not fit."""
        if saved.batch != self.batch or saved.capacity > self.capacity:
            raise ValueError(
                f"a snapshot of {saved.batch} × {saved.capacity} tokens does not fit a state of "
                f"{self.batch} × {self.capacity}"
            )
        for layer, was in zip(self.layers, saved.layers, strict=True):
            layer.restore(was)
        self._set_lengths(saved.lengths)
        self.read_for = list(saved.read_for)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Remove every sequence's tokens from `lengths[b]` on."""
        for now, wanted in zip(self.lengths, lengths, strict=True):
            if not 0 <= wanted <= now:
                raise ValueError(f"cannot rewind {now} tokens to {wanted}")
        for layer in self.layers:
            layer.rewind(lengths)
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        if self.lengths_B is None:
            return
        if len(set(lengths)) == 1:
            self.lengths_B.fill_(lengths[0])
        else:
            self.lengths_B.copy_(torch.tensor(self.lengths))
