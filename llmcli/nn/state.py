"""What a model remembers between calls: an argument, never a part of the model."""

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
    """What the mixer of one layer remembers of B sequences; the mixer makes it (`new_state`).

    A cache has a slot for every token. A recurrent state has no slots: it ignores `grow`, copies
    itself whole for a `snapshot`, and refuses to `rewind`.
    """

    rewinds = True  # whether it can forget single tokens

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors themselves, `[B, …]`, by what their names end with (`k` of `cache.3.k`)."""

    @abstractmethod
    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` tokens per sequence; what is there is kept."""

    @abstractmethod
    def select(self, rows: Tensor) -> Self:
        """A copy with those rows of the batch, in that order; a row may be taken repeatedly."""

    @abstractmethod
    def snapshot(self, tokens: int) -> Self:
        """A copy, of the first `tokens` tokens where there are slots."""

    @abstractmethod
    def restore(self, saved: Self) -> None:
        """Puts a snapshot back, into the same tensors."""

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets sequence b's tokens from `lengths[b]` on; ValueError where it cannot."""

    @abstractmethod
    def lanes(self, count: int) -> Self:
        """Of one sequence: `count` in its memory."""


class KVCache(LayerState):
    """Keys `[B, Hk, C, dh]` and values `[B, Hk, C, dv]` of one attention layer, C slots each.

    A token's slot is its position. Zeroed, since a masked slot still enters the product with
    the values as 0 · v, and 0 · NaN is NaN.
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
        """Keys and values, all slots of them."""
        return {"k": self.k, "v": self.v}

    def grow(self, capacity: int) -> None:
        """More slots, empty ones behind those that are there."""
        more = (0, 0, 0, capacity - self.k.shape[2])
        self.k, self.v = F.pad(self.k, more), F.pad(self.v, more)

    def select(self, rows: Tensor) -> Self:
        """Copies of all their slots."""
        return type(self)(self.k.index_select(0, rows), self.v.index_select(0, rows))

    def snapshot(self, tokens: int) -> Self:
        """As many slots as there are tokens."""
        return type(self)(self.k[:, :, :tokens].clone(), self.v[:, :, :tokens].clone())

    def restore(self, saved: Self) -> None:
        """Slots behind those of the snapshot stay: they are written before they are read."""
        tokens = saved.k.shape[2]
        self.k[:, :, :tokens] = saved.k
        self.v[:, :, :tokens] = saved.v

    def rewind(self, lengths: Sequence[int]) -> None:
        """Nothing to do: the slots are written anew before they are read."""

    def lanes(self, count: int) -> Self:
        """Views: what one sequence writes into a slot, all read."""
        return type(self)(*(one.expand(count, -1, -1, -1) for one in (self.k, self.v)))


class FixedState(LayerState):
    """Tensors `[B, …]` of the same size however many tokens were read: recurrences, windows.

    Zeros at first. `state["conv"]` is one of them.
    """

    rewinds = False

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return dict(self._tensors)

    def grow(self, capacity: int) -> None:
        """Nothing to do: it has no slots."""

    def select(self, rows: Tensor) -> Self:
        """Copies of theirs."""
        found = {name: one.index_select(0, rows) for name, one in self._tensors.items()}
        return type(self)(**found)

    def snapshot(self, tokens: int) -> Self:
        """All of them, whatever `tokens` is."""
        return type(self)(**{name: one.clone() for name, one in self._tensors.items()})

    def restore(self, saved: Self) -> None:
        """All of them."""
        for name, one in self._tensors.items():
            one.copy_(saved[name])

    def rewind(self, lengths: Sequence[int]) -> None:
        """To the beginning alone; raises ValueError for another length."""
        if any(lengths):
            raise ValueError("a recurrent state cannot forget its last tokens: restore a snapshot")
        for one in self._tensors.values():
            one.zero_()

    def lanes(self, count: int) -> Self:
        """Views: our kernels take tokens that have the same memory one after the other."""
        return type(self)(
            **{name: one.expand(count, *one.shape[1:]) for name, one in self._tensors.items()}
        )


class Nothing(LayerState):
    """Of a mixer that remembers nothing itself: it reads what another layer does."""

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def grow(self, capacity: int) -> None:
        """Nothing to do, here and below."""

    def select(self, rows: Tensor) -> Self:
        """Another one."""
        return type(self)()

    def snapshot(self, tokens: int) -> Self:
        """Another one."""
        return type(self)()

    def restore(self, saved: Self) -> None:
        """Nothing to do."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Nothing to do."""

    def lanes(self, count: int) -> Self:
        """Another one."""
        return type(self)()


class Beside(LayerState):
    """The states of mixers that stand side by side in one layer, or none.

    Their tensors have different names: a `Graph` refuses others.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states = tuple(states)
        self.rewinds = all(state.rewinds for state in states)

    def tensors(self) -> dict[str, Tensor]:
        """Those of all of them."""
        return {name: one for state in self.states for name, one in state.tensors().items()}

    def grow(self, capacity: int) -> None:
        """Each of them."""
        for state in self.states:
            state.grow(capacity)

    def select(self, rows: Tensor) -> Self:
        """Of each of them."""
        return type(self)([state.select(rows) for state in self.states])

    def snapshot(self, tokens: int) -> Self:
        """Of each of them."""
        return type(self)([state.snapshot(tokens) for state in self.states])

    def restore(self, saved: Self) -> None:
        """Each its own."""
        for state, was in zip(self.states, saved.states, strict=True):
            state.restore(was)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Each of them."""
        for state in self.states:
            state.rewind(lengths)

    def lanes(self, count: int) -> Self:
        """Of each of them."""
        return type(self)([state.lanes(count) for state in self.states])


class State:
    """One layer's state after another, and how many tokens each sequence of the batch has so far.

    `lengths` is a list on the host: the caller knows it without asking the device. `lengths_B` are
    the same numbers on the device, always in the same memory, where the decoder's step reads them
    there (`Decoder.fixed_shapes`). `read_for`: how long each sequence was to be when it was last
    read; rotations of LongRoPE depend on it.
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
        # steps that were recorded, into this memory, by the tokens that they read of a sequence
        self.replays: dict[int, Replay] = {}
        self.captured: CapturedSteps | None = None  # the same on a card
        self.steps = 0  # that could have been recorded or captured

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
        """Whether it can forget single tokens, in every layer."""
        return all(layer.rewinds for layer in self.layers)

    def tensors(self) -> dict[str, Tensor]:
        """`cache.{layer}.k` and so on → the tensor itself, with all its slots."""
        return {
            f"cache.{number}.{name}": tensor
            for number, layer in enumerate(self.layers)
            for name, tensor in layer.tensors().items()
        }

    def grow(self, capacity: int) -> None:
        """At least `capacity` slots per sequence; does nothing where they are there."""
        if capacity > self.capacity:
            for layer in self.layers:
                layer.grow(capacity)
            self.capacity = capacity
            self.replays.clear()
            self.captured = None

    def select(self, rows: Sequence[int]) -> State:
        """A new state with copies of those sequences: to fork samples or drop finished ones."""
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
        """The only sequence as `count`, each a token longer than the one before, in its memory.

        A decode step of all of them reads `count` tokens of it, each as a step of its own would.
        """
        (length,) = self.lengths
        layers = [layer.lanes(count) for layer in self.layers]
        return State(layers, list(range(length, length + count)), self.capacity)

    def advance(self, tokens: Sequence[int], totals: Sequence[int] | None = None) -> None:
        """So many tokens more of each sequence are remembered: the decoder has written them.

        `totals`: how long the sequences will be (default: as they are now).
        """
        self.lengths = [now + more for now, more in zip(self.lengths, tokens, strict=True)]
        self.read_for = list(self.lengths if totals is None else totals)
        if self.lengths_B is None:
            return
        if len(set(tokens)) == 1:  # no copy from the host: this is part of a captured step
            self.lengths_B.add_(tokens[0])
        else:
            self.lengths_B.copy_(torch.tensor(self.lengths))

    def snapshot(self, *, slots: bool = True) -> State:
        """A copy of what is remembered now, without the empty slots.

        Without any `slots` it is only of what cannot be rewound: it can be restored as long as
        these tokens' slots have not been written anew.
        """
        tokens = max(self.lengths) if slots else 0
        layers = [layer.snapshot(tokens) for layer in self.layers]
        copy = State(layers, list(self.lengths), tokens)
        copy.read_for = list(self.read_for)
        return copy

    @torch.inference_mode()  # the decoder's own writes are in that mode
    def restore(self, saved: State) -> None:
        """Back to a snapshot. Raises ValueError where it has other sequences or does not fit."""
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
        """Forgets every sequence's tokens from `lengths[b]` on: an undo."""
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
