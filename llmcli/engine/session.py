"""Sequences that a decoder reads and continues: token ids, state, last logits.

This is the only code that calls a decoder with a state. Generation, scoring, timing and observation
use a `Session`.

Axes: B sequences, T tokens of one call, C slots of a sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, TypedDict, TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.decoder.decoder import Decoder, inference
from llmcli.devices import release_freed_memory, require_memory
from llmcli.graph.memory import prompt_chunk
from llmcli.nn.state import State
from llmcli.nn.step import Clock, Edit, Tap

Choice = TypeVar("Choice")
Progress = Callable[[int], None]  # called with a number of tokens


class Watch(TypedDict, total=False):
    """What observes or changes the values of a call (`Decoder.__call__`)."""

    tap: Tap | None
    edits: Sequence[Edit]
    clock: Clock | None
    begin: tuple[int, Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of a session, which can be restored any number of times."""

    state: State
    ids_BC: Tensor
    logits_BV: Tensor | None
    kept: Mapping[int, _Place]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A position that a session can return to: state that cannot be rewound, and logits."""

    state: State | None
    logits_BV: Tensor


class Session:
    """`batch` sequences of up to `capacity` tokens each, empty at first.

    `logits_BV`: of each sequence's last token, None if unknown: before the first token, and after a
    call that did not compute them. `on_reprefill(tokens)` is called when `tokens` tokens of the
    longest sequence are processed again (`Decoder.needs_reprefill`).
    """

    def __init__(
        self, decoder: Decoder, batch: int, capacity: int, *, on_reprefill: Progress | None = None
    ) -> None:
        self.decoder = decoder
        self._on_reprefill = on_reprefill
        self.state = decoder.new_state(batch, capacity)
        self.logits_BV: Tensor | None = None
        # on the device, since reading them on the host synchronizes
        self._ids_BC = torch.zeros(batch, capacity, dtype=torch.long, device=decoder.device)
        self._chosen_B: Tensor | None = None
        self._kept: dict[int, _Place] = {}  # by length
        self._unverified: State | None = None  # state before `verify`, without slots
        self._torn = False  # a call was interrupted: layers may be inconsistent

    @property
    def lengths(self) -> list[int]:
        """Number of tokens read per sequence; during a call, those before it."""
        return self.state.lengths

    @property
    def chunk(self) -> int:
        """Tokens of each sequence that a call of `prefill` reads."""
        return prompt_chunk(self.decoder.device.type, len(self.lengths))

    @property
    def ids(self) -> list[list[int]]:
        """The tokens read, by sequence. Synchronizes with the device."""
        rows = self._ids_BC.tolist()
        return [row[:length] for row, length in zip(rows, self.lengths, strict=True)]

    @inference
    def extend(
        self,
        ids: Tensor | Sequence[Sequence[int]],
        *,
        logits: Literal["all", "last", "none"] = "last",
        until: int | None = None,
        totals: Sequence[int] | None = None,
        verify: bool = False,
        **watch: Unpack[Watch],
    ) -> Tensor:
        """Read new tokens of every sequence, `[B, T]` or lists of unequal length, in one call.

        Returns the logits of `all` new tokens, `[B, T, V]`, or of the `last` one of each sequence,
        `[B, V]`. With `none`, and with `until=i`, final norm and head are skipped: returns the
        residual stream `[B, T, D]` after the last layer (without a tap: after the last layer with a
        state), or after layer i. `totals`, `verify` and `watch` as in the decoder; `rollback`
        removes tokens read with `verify`. Raises ValueError if the tokens do not fit.
        """
        lengths = None
        if not isinstance(ids, Tensor):
            lengths = list(map(len, ids))
            width = max(lengths)
            padded = [[*row, *[0] * (width - len(row))] for row in ids]
            ids = torch.tensor(padded, device=self.decoder.device)
        if logits == "none" and until is None:
            observed = watch.get("tap") is not None or bool(watch.get("edits"))
            until = (len(self.decoder.blocks) if observed else self.decoder.readers) - 1
        new = lengths or [ids.shape[1]] * len(ids)
        after = totals or [start + more for start, more in zip(self.lengths, new, strict=True)]
        if self.decoder.needs_reprefill(self.state, after):
            self._reprefill(after, watch.get("edits", ()))
        starts = self.lengths
        if verify and not self.state.rewinds:
            self._unverified = self.state.snapshot(slots=False)
        self._torn = True
        out = self.decoder(
            ids,
            self.state,
            lengths=lengths,
            totals=totals,
            logits="all" if logits == "all" else "last",
            until=until,
            verify=verify,
            **watch,
        )
        if self.state.lengths_B is not None and ids.shape[1] == 1 and lengths is None:
            self._ids_BC.scatter_(1, (self.state.lengths_B - 1).unsqueeze(1), ids)
        elif len(set(starts)) == 1:
            self._ids_BC[:, starts[0] : starts[0] + ids.shape[1]] = ids
        else:  # padding is after the last token and overwritten later
            at_B1 = torch.tensor(starts, device=ids.device).unsqueeze(1)
            at_BT = at_B1 + torch.arange(ids.shape[1], device=ids.device)
            self._ids_BC.scatter_(1, at_BT, ids)
        self._torn = False
        self._chosen_B = self.logits_BV = None
        if until is not None:
            return out
        if logits == "last":
            self.logits_BV = out[:, 0]
            return self.logits_BV
        last = [-1 if lengths is None else max(n - 1, 0) for n in lengths or starts]
        # copied, so that other tokens' logits can be freed
        self.logits_BV = torch.stack([row[at] for row, at in zip(out, last, strict=True)])
        return out

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        chunk: int | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **watch: Unpack[Watch],
    ) -> Tensor:
        """Read one prompt per sequence in calls of at most `chunk` tokens; returns logits `[B, V]`.

        Chunks (default: `self.chunk`) bound the memory of attention. Final norm and head are
        computed only at ends of prompts. `on_prefill(done, total)` is called with the tokens read
        after each call. Raises ValueError if the prompts do not fit the session.
        """
        chunk = chunk or self.chunk
        totals = [past + len(prompt) for past, prompt in zip(self.lengths, prompts, strict=True)]
        done, total = 0, sum(map(len, prompts))
        last_BV: Tensor | None = None
        for start in range(0, max(map(len, prompts)), chunk):
            parts = [prompt[start : start + chunk] for prompt in prompts]
            ending = [
                row for row, prompt in enumerate(prompts) if start < len(prompt) <= start + chunk
            ]
            out = self.extend(parts, logits="last" if ending else "none", totals=totals, **watch)
            if ending and last_BV is None:
                last_BV = out  # the rows of longer prompts are filled in later
            elif ending and last_BV is not None:
                with torch.inference_mode():
                    last_BV[ending] = out[ending]
            done += sum(map(len, parts))
            if on_prefill is not None:
                on_prefill(done, total)
        assert last_BV is not None
        self.logits_BV = last_BV
        return last_BV

    def decode(
        self,
        choose: Callable[[Tensor], tuple[Tensor, Choice | Callable[[], Choice]]],
        *,
        limit: int | None = None,
        **watch: Unpack[Watch],
    ) -> Iterator[Choice]:
        """Repeatedly choose a token per sequence, yield the choice, and read the token.

        `choose` maps logits `[B, V]` to ids `[B]` on the same device and a value to yield. A token
        is read when the next one is requested: stopping before leaves the last one unread
        (`advance` reads it). With `limit`, all tokens are read. In between, `select` may drop or
        repeat sequences.

        The value may be a function that waits for it, so that the device reads a token before the
        host knows it, one step later: it is then read before its value is yielded if there is a
        free slot, but for the last of `limit`.
        """
        for number in islice(count(1), limit):
            self._chosen_B, choice = choose(self.known_logits())
            waits = callable(choice) and number != limit
            ahead = waits and max(self.lengths) < self.state.capacity
            if ahead:
                self.advance(**watch)
            yield choice() if callable(choice) else choice
            if not ahead:
                self.advance(**watch)

    def known_logits(self) -> Tensor:
        """The last logits `[B, V]`. Raises ValueError if the last call did not compute them."""
        if self.logits_BV is None:
            raise ValueError("no logits are known: the last call did not compute them")
        return self.logits_BV

    def advance(self, **watch: Unpack[Watch]) -> Tensor:
        """Read the tokens last chosen by `decode`; returns logits `[B, V]`."""
        if self._chosen_B is None:
            raise ValueError("no token was chosen since the last call")
        return self.extend(self._chosen_B[:, None], **watch)

    def can_verify(self, tokens: int) -> bool:
        """Whether `tokens` tokens can be read at once with the same results as single steps."""
        return self.decoder.can_verify(self.state, tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with copies of these sequences, in this order: forks or drops samples."""
        index = torch.tensor(rows, dtype=torch.long, device=self.decoder.device)
        self.state = self.state.select(rows)
        self._kept = {}
        self._ids_BC = self._ids_BC.index_select(0, index)
        if self.logits_BV is not None:
            self.logits_BV = self.logits_BV.index_select(0, index)
        if self._chosen_B is not None:
            self._chosen_B = self._chosen_B.index_select(0, index)

    def copies(self, count: int) -> Session:
        """Another session, of so many copies of the only sequence."""
        other = copy(self)
        other.select([0] * count)
        return other

    def rewind(self, length: int) -> None:
        """Rewind every sequence to its first `length` tokens, with logits if kept.

        A state that cannot remove single tokens can only rewind to the beginning or a kept place
        (`keep`); otherwise raises ValueError.
        """
        self._torn = True
        place = self._kept.get(length)
        if place is not None and place.state is not None:
            self.state.restore(place.state)
        else:
            self.state.rewind([length] * self.state.batch)
        self._kept = {tokens: one for tokens, one in self._kept.items() if tokens <= length}
        self.logits_BV = None if place is None else place.logits_BV
        self._chosen_B, self._torn = None, False

    def reuse(self, ids: Sequence[int]) -> int:
        """Rewind the only sequence to the common prefix with `ids`; returns its length.

        It excludes the last id if its logits were not kept (`keep`), and for a state that cannot
        remove single tokens all after the kept place.
        """
        (read,) = self.ids
        pairs = enumerate(zip(read, ids, strict=False))
        most = min(len(read), len(ids))
        length = next((at for at, (old, new) in pairs if old != new), most)
        if length == len(ids) and length not in self._kept:
            length -= 1
        if length == self.lengths[0] < len(ids) and not self._torn:
            return length
        if not self.state.rewinds:
            length = max((tokens for tokens in self._kept if tokens <= length), default=0)
        self.rewind(length)
        return length

    def rollback(self, length: int) -> None:
        """Remove the only sequence's tokens from `length` on; the last call had `verify`."""
        if length == self.lengths[0]:
            return
        if self.state.rewinds:
            self.rewind(length)
            return
        assert self._unverified is not None
        (ids,) = self.ids
        self._torn = True
        self.state.restore(self._unverified)
        self.extend([ids[self.lengths[0] : length]], logits="none")

    def keep(self) -> None:
        """Allow `rewind` to return here, and to the place of the previous call.

        Keeps the last logits and copies state that cannot be rewound, for these two places only.
        Raises ValueError if the logits are unknown.
        """
        state = None if self.state.rewinds else self.state.snapshot(slots=False)
        place = _Place(state=state, logits_BV=self.known_logits())
        self._kept = dict(list((self._kept | {self.lengths[0]: place}).items())[-2:])

    def snapshot(self) -> Snapshot:
        """Copies of state, ids and last logits."""
        return Snapshot(
            state=self.state.snapshot(),
            ids_BC=self._ids_BC.clone(),
            logits_BV=None if self.logits_BV is None else self.logits_BV.clone(),
            kept=self._kept,
        )

    def restore(self, saved: Snapshot) -> None:
        """Restore a snapshot of this session, even where `rewind` is impossible.

        Raises ValueError if `select` has changed the number of sequences.
        """
        self._kept, self._torn = {}, True
        self.state.restore(saved.state)
        self._ids_BC = saved.ids_BC.clone()
        self.grow(self.state.capacity)
        self.logits_BV = None if saved.logits_BV is None else saved.logits_BV.clone()
        self._kept, self._chosen_B, self._torn = dict(saved.kept), None, False

    def grow(self, capacity: int) -> None:
        """Grow to at least `capacity` slots per sequence."""
        self._ids_BC = F.pad(self._ids_BC, (0, max(0, capacity - self._ids_BC.shape[1])))
        self.state.grow(capacity)

    def _reprefill(self, totals: Sequence[int], edits: Sequence[Edit]) -> None:
        """Read all tokens again, as prefixes of sequences with lengths `totals`."""
        rows = self.ids
        longest = max(map(len, rows))
        if self._on_reprefill is not None:
            self._on_reprefill(longest)
        self._kept = {}
        self.state.rewind([0] * len(rows))
        for start in range(0, longest, self.chunk):
            parts = [row[start : start + self.chunk] for row in rows]
            self.extend(parts, logits="none", totals=totals, edits=edits)


def require_cache(decoder: Decoder, batch: int, capacity: int, what: str, hint: str) -> None:
    """Raise OutOfMemory if the cache (`what`) does not fit on every device."""
    for device in decoder.devices:
        require_memory(decoder.state_bytes(batch, capacity, device), device, what, hint)


def make_room(session: Session, tokens: int, most: int, hint: str) -> None:
    """Grow to `tokens` slots per sequence, by doubling up to `most`.

    Raises OutOfMemory with `hint` if memory is insufficient, ValueError for more than `most`.
    """
    if tokens > most:
        raise ValueError(f"{tokens} tokens are more than {most}")
    state = session.state
    if tokens <= state.capacity:
        return
    wanted = max(tokens, min(2 * state.capacity, most))
    require_cache(session.decoder, state.batch, wanted, f"the cache of {wanted} tokens", hint)
    session.grow(wanted)
    release_freed_memory()  # the smaller caches
