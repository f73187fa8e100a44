"""A model's state between calls: an argument, never part of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.nn.captured import CapturedSteps
from llmcli.nn.replay import Replay


class LayerState(ABC):
    """The state of one layer's mixer for B sequences, created by the mixer (`new_state`).

    A cache has one slot per token. A recurrent state has no slots: it ignores `grow`, is copied
    completely for a `snapshot`, and cannot `rewind`.
    """

    rewinds = True  # whether single tokens can be removed

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors (not copies), `[B, …]`, by the end of their names (`k` of `cache.3.k`)."""

    @abstractmethod
    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens per sequence; the contents are kept."""

    @abstractmethod
    def select(self, rows: Tensor) -> Self:
        """A copy with these rows of the batch, in this order; rows may be repeated."""

    @abstractmethod
    def snapshot(self, tokens: int) -> Self:
        """A copy, in caches of the first `tokens` tokens only."""

    @abstractmethod
    def restore(self, saved: Self) -> None:
        """Restore a snapshot into the same tensors."""

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Remove sequence b's tokens from `lengths[b]` on; ValueError if impossible."""

    @abstractmethod
    def lanes(self, count: int) -> Self:
        """For one sequence: `count` sequences sharing its memory."""


class KVCache(LayerState):
    """Keys `[B, Hk, C, dh]` and values `[B, Hk, C, dv]` of one attention layer, C slots each.

    A token's slot is its position. Zeroed, since a masked slot still contributes 0 · v to the
    product with values, and 0 · NaN is NaN.
    """

    def __init__(self, k_BKCd: Tensor, v_BKCe: Tensor) -> None:
        self.k = k_BKCd
        self.v = v_BKCe

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int],
        key_size: int,
        value_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Self:
        """Empty slots for `shape` = (batch, kv heads, capacity)."""
        return cls(
            torch.zeros(*shape, key_size, device=device, dtype=dtype),
            torch.zeros(*shape, value_size, device=device, dtype=dtype),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Keys and values, all slots."""
        return {"k": self.k, "v": self.v}

    def grow(self, capacity: int) -> None:
        """Append empty slots up to `capacity`."""
        more = (0, 0, 0, capacity - self.k.shape[2])
        self.k, self.v = F.pad(self.k, more), F.pad(self.v, more)

    def select(self, rows: Tensor) -> Self:
        """Copies of the sequences `rows`."""
        return type(self)(self.k.index_select(0, rows), self.v.index_select(0, rows))

    def snapshot(self, tokens: int) -> Self:
        """A copy of the first `tokens` slots."""
        return type(self)(self.k[:, :, :tokens].clone(), self.v[:, :, :tokens].clone())

    def restore(self, saved: Self) -> None:
        """Restore the snapshot's slots; later slots are written before they are read."""
        tokens = saved.k.shape[2]
        self.k[:, :, :tokens] = saved.k
        self.v[:, :, :tokens] = saved.v

    def rewind(self, lengths: Sequence[int]) -> None:
        """Nothing to do: slots are rewritten before they are read."""

    def lanes(self, count: int) -> Self:
        """Views: all read what one sequence writes into a slot."""
        return type(self)(*(one.expand(count, -1, -1, -1) for one in (self.k, self.v)))


class FixedState(LayerState):
    """Tensors `[B, …]` of fixed size for any number of tokens: recurrences, windows.

    Initially zero. Accessed as `state["conv"]`.
    """

    rewinds = False

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors."""
        return dict(self._tensors)

    def grow(self, capacity: int) -> None:
        """Nothing to do: it has no slots."""

    def select(self, rows: Tensor) -> Self:
        """Copies of the sequences `rows`."""
        found = {name: one.index_select(0, rows) for name, one in self._tensors.items()}
        return type(self)(**found)

    def snapshot(self, tokens: int) -> Self:
        """Copies of all tensors, independent of `tokens`."""
        return type(self)(**{name: one.clone() for name, one in self._tensors.items()})

    def restore(self, saved: Self) -> None:
        """Restore all tensors."""
        for name, one in self._tensors.items():
            one.copy_(saved[name])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Rewind to the beginning; raises ValueError for other lengths."""
        if any(lengths):
            raise ValueError("a recurrent state cannot forget its last tokens: restore a snapshot")
        for one in self._tensors.values():
            one.zero_()

    def lanes(self, count: int) -> Self:
        """Views: our kernels process tokens that share memory sequentially."""
        return type(self)(
            **{name: one.expand(count, *one.shape[1:]) for name, one in self._tensors.items()}
        )


class Nothing(LayerState):
    """The state of a mixer that uses another layer's state."""

    def tensors(self) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def grow(self, capacity: int) -> None:
        """Nothing to do."""

    def select(self, rows: Tensor) -> Self:
        """A new empty state."""
        return type(self)()

    def snapshot(self, tokens: int) -> Self:
        """A new empty state."""
        return type(self)()

    def restore(self, saved: Self) -> None:
        """Nothing to do."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Nothing to do."""

    def lanes(self, count: int) -> Self:
        """A new empty state."""
        return type(self)()


class Beside(LayerState):
    """The states of parallel mixers in one layer, possibly none.

    Their tensors have different names, as checked by `Graph`.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states = tuple(states)
        self.rewinds = all(state.rewinds for state in states)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all states."""
        return {name: one for state in self.states for name, one in state.tensors().items()}

    def grow(self, capacity: int) -> None:
        """Grow each state."""
        for state in self.states:
            state.grow(capacity)

    def select(self, rows: Tensor) -> Self:
        """Select in each state."""
        return type(self)([state.select(rows) for state in self.states])

    def snapshot(self, tokens: int) -> Self:
        """A snapshot of each state."""
        return type(self)([state.snapshot(tokens) for state in self.states])

    def restore(self, saved: Self) -> None:
        """Restore each state."""
        for state, was in zip(self.states, saved.states, strict=True):
            state.restore(was)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Rewind each state."""
        for state in self.states:
            state.rewind(lengths)

    def lanes(self, count: int) -> Self:
        """The lanes of each state."""
        return type(self)([state.lanes(count) for state in self.states])


class State:
    """The states of all layers, and the number of tokens of each sequence.

    `lengths` is a list on the host, available without synchronization. `lengths_B`: the same
    numbers on the device at a fixed address, if the decoder's step reads them there
    (`Decoder.fixed_shapes`). `read_for`: expected final length of each sequence at its last read;
    rotations of LongRoPE depend on it.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        lengths: list[int],
        capacity: int,
        lengths_B: Tensor | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.lengths = lengths
        self.capacity = capacity
        self.lengths_B = lengths_B
        self.read_for = list(lengths)
        # recorded steps with this memory, by tokens per sequence
        self.replays: dict[int, Replay] = {}
        self.captured: CapturedSteps | None = None  # captured steps on a GPU
        self.steps = 0  # number of steps eligible for recording or capture

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers together."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def rewinds(self) -> bool:
        """Whether single tokens can be removed in every layer."""
        return all(layer.rewinds for layer in self.layers)

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
            self.replays.clear()
            self.captured = None

    def select(self, rows: Sequence[int]) -> State:
        """A new state with copies of these sequences: to fork samples or drop finished ones."""
        layers = []
        for layer in self.layers:
            device = next((tensor.device for tensor in layer.tensors().values()), None)
            layers.append(layer.select(torch.tensor(rows, dtype=torch.long, device=device)))
        lengths_B = None
        if self.lengths_B is not None:
            lengths_B = self.lengths_B[torch.tensor(rows, device=self.lengths_B.device)]
        chosen = State(layers, [self.lengths[row] for row in rows], self.capacity, lengths_B)
        chosen.read_for = [self.read_for[row] for row in rows]
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
