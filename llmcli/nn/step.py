"""Data shared by the layers of one forward call: positions, masks, RoPE tables, observers.

Axes: B batch, T new tokens, S keys, R rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from llmcli.config.attention import RopeConfig, Window, first_key, most_keys, seen_keys
from llmcli.devices import wait_for
from llmcli.ops import compiled, rope
from llmcli.ops.attention import visible_keys

Tap = Callable[[str, Tensor], None]
Clock = Callable[[str], None]
Emitted = Mapping[str, Tensor]  # activations by name


@runtime_checkable
class ReplayClock(Protocol):
    """A clock that receives the times of a step after it ran."""

    def __call__(self, name: str) -> None:
        """See `Clock`."""

    def replayed(self, names: Sequence[str], times: Sequence[int]) -> None:
        """Receive the time of each activation, in nanoseconds of `perf_counter_ns`."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edit of the activation `name`: the pass continues with `fn(activation, positions)`.

    `fn` gets a copy of the whole tensor, and the positions of its tokens, `[T]` if they are equal
    for all sequences, else `[B, T]`. It returns the same shape, dtype and device.
    """

    name: str
    fn: Callable[[Tensor, Tensor], Tensor]


_BAND = 512  # rows computed together with a window


class KeyRange(NamedTuple):
    """The keys read by new tokens `rows`: slots `first` … `last`-1, with a mask or a triangle.

    Or `slots` `[B, n]` on the device, for each sequence its own.
    """

    rows: slice
    first: int
    last: int
    causal: bool
    mask: Tensor | None
    slots: Tensor | None = None

    def of(self, x_BKCd: Tensor) -> Tensor:
        """These keys or values of a cache, as a view unless they are `slots`."""
        if self.slots is None:
            return x_BKCd[:, :, self.first : self.last]
        index_B1n1 = self.slots.unsqueeze(1).unsqueeze(-1)
        return x_BKCd.gather(2, index_B1n1.expand(-1, x_BKCd.shape[1], -1, x_BKCd.shape[3]))


class RopeTables:
    """cos and sin for positions 0 … n-1 of one RopeConfig, grown by doubling.

    Shorter tables are kept too (in total as long as the last), since captured steps hold their
    address.
    """

    def __init__(self, config: RopeConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._tables = (torch.empty(0), torch.empty(0))
        self._shorter: list[tuple[Tensor, Tensor]] = []

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Tables `[n, R]` with n ≥ `length`."""
        if len(self._tables[0]) < length:
            size = 1 << max(length - 1, 255).bit_length()
            self._shorter.append(self._tables)
            self._tables = self._make(torch.arange(size), length)
        return self._tables

    def between(self, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Tables of positions `start` … `stop`-1 in a sequence of `length` (dynamic kinds)."""
        return self._make(torch.arange(start, stop), length)

    def _make(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        frequencies, factor = rope.frequencies(self.config, length)
        cos, sin = rope.tables(frequencies, positions, factor)
        return cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)


class Step:
    """One call: sequence b has `starts[b]` tokens and gets `lengths[b]` of T new ones.

    `totals[b]`: length with the whole prompt (default: after this call). `fixed`: the starts `[B]`
    on the device and the number of slots to read. One token per sequence then sees all slots under
    a mask, independent of the position in shapes and host values, so that the call can be captured
    as a CUDA graph and replayed. `recorded`: the equivalent on a CPU, recorded by our kernels.
    `cached`: whether new keys and values are written to the state, and read from there.
    `kv_sources`: attentions whose keys and values are shared; `shared_kv` has them once computed.
    """

    def __init__(
        self,
        starts: Sequence[int],
        tokens: int,
        lengths: Sequence[int],
        ropes: dict[RopeConfig, RopeTables],
        *,
        totals: Sequence[int] | None = None,
        device: torch.device,
        fixed: tuple[Tensor, int] | None = None,
        recorded: bool = False,
        cached: bool = True,
        tap: Tap | None = None,
        edits: Sequence[Edit] = (),
        clock: Clock | None = None,
        kv_sources: Container[str] = (),
    ) -> None:
        self.starts = starts
        self.tokens = tokens
        self.lengths = lengths
        after = [start + length for start, length in zip(starts, lengths, strict=True)]
        self.totals = after if totals is None else totals
        self.device = device
        self.tap = tap
        self.edits: dict[str, list[Edit]] = {}
        for edit in edits:
            self.edits.setdefault(edit.name, []).append(edit)
        self.clock = clock
        self._kv_sources = kv_sources
        self.shared_kv: dict[str, tuple[Tensor, Tensor]] = {}
        # per-layer embeddings of the new tokens, if any
        self.per_layer: Tensor | None = None
        # one shared start: keys are a slice and positions a range, no index tensors needed
        self.uniform = len(set(starts)) == 1
        self.keys = max(starts) + tokens
        self._positions: Tensor | None = None
        self._starts: Tensor | None = None
        self.fixed = fixed is not None
        self.recorded = recorded
        self.cached = cached
        if fixed is not None:
            starts_B, self.keys = fixed
            self.uniform = False
            self._starts, self._positions = starts_B, starts_B.unsqueeze(1)
        self._ropes = ropes
        self._home: Step | None = None  # the step on the decoder's device, if this is another
        self._key_ranges: dict[Window | None, tuple[KeyRange, ...]] = {}
        self._tables: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    def last(self, per_layer: Tensor | None) -> Step:
        """The step of each sequence's last real token only, for layers without a state.

        `per_layer`: its per-layer embeddings, if any. A tap sees all tokens instead.
        """
        pairs, home = zip(self.starts, self.lengths, strict=True), self._home or self
        ends = [start + max(length - 1, 0) for start, length in pairs]
        step = Step(
            ends, 1, [1] * len(ends), self._ropes, totals=self.totals, device=home.device,
            cached=self.cached, clock=home.clock if self.tap is None else None,
        )  # fmt: skip
        step.shared_kv, step.per_layer, step.edits = self.shared_kv, per_layer, self.edits
        return step.on(self.device)

    def on(self, device: torch.device) -> Step:
        """This step for layers on `device`, with what earlier layers have computed for later ones.

        The tap gets copies on the decoder's device; the clock is called when `device` is done.
        """
        if device == self.device:
            return self
        home = there = self._home or self
        if device != home.device:
            there = Step(
                self.starts, self.tokens, self.lengths, self._ropes, totals=self.totals,
                device=device, cached=self.cached, kv_sources=self._kv_sources,
                tap=None if home.tap is None else _moving(home.tap, home.device),
                clock=None if home.clock is None else _waiting(home.clock, device),
            )  # fmt: skip
            there._home, there.edits = home, self.edits
        kept = self.shared_kv.items()
        there.shared_kv = {name: (k.to(device), v.to(device)) for name, (k, v) in kept}
        there.per_layer = None if home.per_layer is None else home.per_layer.to(device)
        return there

    @property
    def observed(self) -> bool:
        """Whether there is a tap, an edit or a clock."""
        return self.tap is not None or bool(self.edits) or self.clock is not None

    def emit(self, name: str, tensor: Tensor) -> Tensor:
        """Emit an activation; returns `tensor` itself unless edited.

        Calls the clock with the name, applies edits, and passes the result to the tap.
        """
        if self.clock is not None:
            self.clock(name)
        if name in self.edits:
            for edit in self.edits[name]:
                tensor = self._edited(tensor, edit)
        if self.tap is not None:
            self.tap(name, tensor)
        return tensor

    def _edited(self, tensor: Tensor, edit: Edit) -> Tensor:
        # copied, since earlier activations may share the memory
        changed = edit.fn(tensor.clone(), self._positions_of(tensor))
        was, found = ((x.shape, x.dtype, x.device) for x in (tensor, changed))
        if was != found:
            before, after = (f"{list(shape)} {dtype} on {on}" for shape, dtype, on in (was, found))
            raise ValueError(f"the edit of `{edit.name}` turned {before} into {after}")
        if 0 in tensor.stride():  # broadcast over sequences: now separate
            return changed
        # same strides, since kernels' rounding may depend on them
        laid = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return laid.copy_(changed)

    def _positions_of(self, tensor: Tensor) -> Tensor:
        """The positions of the tokens of an activation `[B, …, T, …]`."""
        if tensor.shape[-2] < self.tokens:  # final norm and head for last tokens only
            pairs = zip(self.starts, self.lengths, strict=True)
            return torch.tensor([[a + n - 1] for a, n in pairs], device=self.device)
        return self.positions

    def mark(self, name: str) -> None:
        """Call the clock only, for activations that the tap does not see here."""
        if self.clock is not None:
            self.clock(name)

    @property
    def positions(self) -> Tensor:
        """Position of every new token: `[T]` if equal for all sequences, else `[B, T]`."""
        if self._positions is None:
            offsets = torch.arange(self.tokens, device=self.device)
            if self.uniform:
                self._positions = offsets + self.starts[0]
            else:
                starts = torch.tensor(self.starts, device=self.device)
                self._positions = starts.unsqueeze(1) + offsets
        return self._positions

    @property
    def starts_B(self) -> Tensor:
        """The starts on the device, or a single one if all are equal."""
        if self.fixed and self._starts is not None:
            return self._starts
        return torch.tensor(self.starts[:1] if self.uniform else self.starts)

    @cached_property
    def lengths_B(self) -> Tensor | None:
        """The lengths on the device if some new tokens are padding."""
        if min(self.lengths) == self.tokens:
            return None
        return torch.tensor(self.lengths, device=self.device)

    def rotate(self, x_BTNd: Tensor, config: RopeConfig) -> Tensor:
        """Apply RoPE to queries and keys of a recorded step."""
        return compiled.rotate(x_BTNd, *self.tables(config), self.starts_B)

    def tables(self, config: RopeConfig) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions, `[n, R]`, for kernels that look up their own."""
        return self._ropes[config].upto(self.keys)

    def rope(self, config: RopeConfig) -> tuple[Tensor, Tensor]:
        """cos and sin of the new tokens, `[T, 1, R]` or `[B, T, 1, R]`, for all heads."""
        if config not in self._tables:
            if self._home is None:
                self._tables[config] = self._rope(config)
            else:
                cos, sin = self._home.rope(config)
                self._tables[config] = cos.to(self.device), sin.to(self.device)
        return self._tables[config]

    def _rope(self, config: RopeConfig) -> tuple[Tensor, Tensor]:
        tables = self._ropes[config]
        if rope.depends_on_length(config):
            parts = [
                tables.between(start, start + self.tokens, total)
                for start, total in zip(self.starts, self.totals, strict=True)
            ]
            cos, sin = (torch.stack(table).unsqueeze(-2) for table in zip(*parts, strict=True))
            return cos, sin
        cos, sin = tables.upto(self.keys)
        if self.uniform:
            rows = slice(self.starts[0], self.starts[0] + self.tokens)
            return cos[rows].unsqueeze(-2), sin[rows].unsqueeze(-2)
        return cos[self.positions].unsqueeze(-2), sin[self.positions].unsqueeze(-2)

    def key_ranges(self, window: Window | None) -> tuple[KeyRange, ...]:
        """The keys that new tokens see, each those of its `window` (None: all earlier ones).

        Split into bands of rows if the window hides most keys.
        """
        if window not in self._key_ranges:
            self._key_ranges[window] = self._ranges(window)
        return self._key_ranges[window]

    def _ranges(self, window: Window | None) -> tuple[KeyRange, ...]:
        every = slice(0, self.tokens)
        if self.uniform and self.tokens == 1:
            first = self.keys - seen_keys(self.keys - 1, window)
            return (KeyRange(every, first, self.keys, False, None),)
        most = most_keys(window)
        if self.uniform and self.starts[0] == 0 and (most is None or self.tokens <= most):
            return (KeyRange(every, 0, self.keys, True, None),)
        if self.uniform and window is not None:
            return tuple(self._bands(window))
        if self.fixed and window is not None and most is not None and 4 * most <= self.keys:
            # copying those of the window is faster than reading all
            oldest_B1 = first_key(self.positions, window).clamp_min(0)
            slots_Bn = oldest_B1 + torch.arange(most, device=self.device)
            mask = (slots_Bn <= self.positions).unsqueeze(1).unsqueeze(1)
            slots_Bn = slots_Bn.clamp_max(self.keys - 1)
            return (KeyRange(every, 0, self.keys, False, mask, slots_Bn),)
        mask = visible_keys(self.positions, self.keys, window)
        return (KeyRange(every, 0, self.keys, False, mask if self.uniform else mask.unsqueeze(1)),)

    def _bands(self, window: Window) -> Iterator[KeyRange]:
        """Yield blocks of rows, each with the keys that some row sees.

        A mask of all rows would have T · S elements, all computed by the kernel; with bands memory
        and time are linear in T.
        """
        masks: dict[tuple[int, int], Tensor] = {}  # of a window: all but the first and last equal
        for begin in range(0, self.tokens, _BAND):
            rows = slice(begin, min(begin + _BAND, self.tokens))
            at, last = self.starts[0] + rows.start, self.starts[0] + rows.stop
            first = at + 1 - seen_keys(at, window)
            shape = (at - first, last - first)
            if shape not in masks:
                masks[shape] = visible_keys(self.positions[rows] - first, last - first, window)
            yield KeyRange(rows, first, last, False, masks[shape])

    def share_kv(self, name: str, k_BKSd: Tensor, v_BKSe: Tensor) -> None:
        """Keep all keys and values of attention `name` if other layers share them."""
        if name in self._kv_sources:
            self.shared_kv[name] = k_BKSd, v_BKSe

    def write(self, x_BKTd: Tensor, cache_BKCd: Tensor) -> None:
        """Write the new tokens' keys or values into their slots.

        Padding is written after a sequence's last token and overwritten later.
        """
        if compiled.stores(x_BKTd, cache_BKCd):
            compiled.store(x_BKTd, cache_BKCd, self.starts_B)
        elif self.uniform:
            cache_BKCd[:, :, self.starts[0] : self.keys] = x_BKTd
        elif len(self.starts) == 1 and self.tokens == 1:
            cache_BKCd.index_copy_(2, self.positions[0], x_BKTd)
        else:
            rows = torch.arange(len(self.starts), device=self.device).unsqueeze(1)
            cache_BKCd[rows, :, self.positions] = x_BKTd.transpose(1, 2)


def _moving(tap: Tap, device: torch.device) -> Tap:
    return lambda name, tensor: tap(name, tensor.to(device))


def _waiting(clock: Clock, device: torch.device) -> Clock:
    def call(name: str) -> None:
        wait_for(device)
        clock(name)

    return call
