"""Sequences that a decoder reads and continues: token ids, state, last logits.

This is the only code that calls a decoder with a state. Generation, scoring, timing and observation
use a `Session`.

Axes: B sequences, T tokens of one call, C slots of a sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.decoder.decoder import Decoder, inference
from llmcli.devices import release_freed_memory, require_memory
from llmcli.graph.memory import PROMPT_CHUNK
from llmcli.nn.state import State
from llmcli.nn.step import Clock, Edit, Tap

Choice = TypeVar("Choice")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of a session, which can be restored any number of times."""

    state: State
    ids: Ids
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
        self, decoder: Decoder, batch: int, capacity: int, *,
        on_reprefill: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.decoder = decoder
        self._on_reprefill = on_reprefill
        self.state = decoder.new_state(batch, capacity)
        self.logits_BV: Tensor | None = None
        self._ids = Ids.none(batch, capacity, decoder.device)
        self._chosen_B: Tensor | None = None
        self._kept: dict[int, _Place] = {}  # by length
        self._unverified: State | None = None  # state before `verify`, without slots
        self._torn = False  # a call was interrupted: layers may be inconsistent

    @property
    def lengths(self) -> list[int]:
        """Number of tokens read per sequence; during a call, those before it."""
        return self.state.lengths

    @property
    def ids(self) -> list[list[int]]:
        """The tokens read, by sequence. Synchronizes with the device."""
        return self._ids.rows(self.lengths)

    @inference
    def extend(
        self,
        ids: Tensor | Sequence[Sequence[int]],
        *,
        logits: Literal["all", "last", "none"] = "last",
        until: int | None = None,
        totals: Sequence[int] | None = None,
        tap: Tap | None = None,
        edits: Sequence[Edit] = (),
        clock: Clock | None = None,
        verify: bool = False,
    ) -> Tensor:
        """Read new tokens of every sequence, `[B, T]` or lists of unequal length, in one call.

        Returns the logits of `all` new tokens, `[B, T, V]`, or of the `last` one of each sequence,
        `[B, V]`. With `none`, and with `until=i`, final norm and head are skipped: returns the
        residual stream `[B, T, D]` after the last layer (without a tap: after the last layer with a
        state), or after layer i. `totals`, `tap`, `edits`, `clock` and `verify` as in the decoder;
        `rollback` removes tokens read with it. Raises ValueError if the tokens do not fit.
        """
        lengths = None
        if not isinstance(ids, Tensor):
            lengths = list(map(len, ids))
            width = max(lengths)
            padded = [[*row, *[0] * (width - len(row))] for row in ids]
            ids = torch.tensor(padded, device=self.decoder.device)
        if logits == "none" and until is None:
            observed = tap is not None or bool(edits)
            until = (len(self.decoder.blocks) if observed else self.decoder.readers) - 1
        new = lengths or [ids.shape[1]] * len(ids)
        after = totals or [start + more for start, more in zip(self.lengths, new, strict=True)]
        if self.decoder.needs_reprefill(self.state, after):
            self._reprefill(after, edits)
        starts = self.lengths
        if verify and not self.state.rewinds:
            self._unverified = self.state.snapshot(slots=False)
        self._torn = True
        out = self.decoder(
            ids, self.state, lengths=lengths, totals=totals, tap=tap, edits=edits, clock=clock,
            logits="all" if logits == "all" else "last", until=until, verify=verify,
        )  # fmt: skip
        if self.state.lengths_B is not None and ids.shape[1] == 1 and lengths is None:
            self._ids.write_last(ids, self.state.lengths_B)
        else:
            self._ids.write(ids, starts)
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
        chunk: int = PROMPT_CHUNK,
        on_prefill: Callable[[int, int], None] | None = None,
        tap: Tap | None = None,
        edits: Sequence[Edit] = (),
        clock: Clock | None = None,
    ) -> Tensor:
        """Read one prompt per sequence in calls of at most `chunk` tokens; returns logits `[B, V]`.

        Chunks bound the memory of attention. Final norm and head are computed only at ends of
        prompts. `on_prefill(done, total)` is called with the tokens read after each call. Raises
        ValueError if the prompts do not fit the session.
        """
        totals = [past + len(prompt) for past, prompt in zip(self.lengths, prompts, strict=True)]
        done, total = 0, sum(map(len, prompts))
        last_BV: Tensor | None = None
        for start in range(0, max(map(len, prompts)), chunk):
            parts = [prompt[start : start + chunk] for prompt in prompts]
            ending = [
                row for row, prompt in enumerate(prompts) if start < len(prompt) <= start + chunk
            ]
            out = self.extend(
                parts, logits="last" if ending else "none", totals=totals, tap=tap, edits=edits,
                clock=clock,
            )  # fmt: skip
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
        choose: Callable[[Tensor], tuple[Tensor, Choice]],
        *,
        limit: int | None = None,
        tap: Tap | None = None,
        edits: Sequence[Edit] = (),
        clock: Clock | None = None,
    ) -> Iterator[Choice]:
        """Repeatedly choose a token per sequence, yield the choice, and read the token.

        `choose` maps logits `[B, V]` to ids `[B]` on the same device and a value to yield. A token
        is read when the next one is requested: stopping before leaves the last one unread
        (`advance` reads it). With `limit`, all tokens are read. In between, `select` may drop or
        repeat sequences.
        """
        for _ in count() if limit is None else range(limit):
            if self.logits_BV is None:
                raise ValueError("no logits to choose from: the last call did not compute them")
            self._chosen_B, choice = choose(self.logits_BV)
            yield choice
            self.advance(tap=tap, edits=edits, clock=clock)

    def decode_queued(
        self, draw: Callable[[Tensor], tuple[Tensor, Callable[[], Choice]]], limit: int | None
    ) -> Iterator[Choice]:
        """Like `decode`, but the device reads a token before the host knows it, one step later.

        `draw` returns a function that waits for the choice. A token is read before its choice is
        yielded if there is a free slot; with `limit`, all but the last.
        """
        for number in count(1):
            if self.logits_BV is None:
                raise ValueError("no logits to choose from: the last call did not compute them")
            self._chosen_B, choice = draw(self.logits_BV)
            ahead = number != limit and max(self.lengths) < self.state.capacity
            if ahead:
                self.advance()
            yield choice()
            if not ahead:
                self.advance()

    def advance(
        self,
        *,
        tap: Tap | None = None,
        edits: Sequence[Edit] = (),
        clock: Clock | None = None,
    ) -> Tensor:
        """Read the tokens last chosen by `decode`; returns logits `[B, V]`."""
        if self._chosen_B is None:
            raise ValueError("no token was chosen since the last call")
        return self.extend(self._chosen_B[:, None], tap=tap, edits=edits, clock=clock)

    def can_verify(self, tokens: int) -> bool:
        """Whether `tokens` tokens can be read at once with the same results as single steps."""
        return self.decoder.can_verify(self.state, tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with copies of these sequences, in this order: forks or drops samples."""
        index = torch.tensor(rows, dtype=torch.long, device=self.decoder.device)
        self.state = self.state.select(rows)
        self._kept = {}
        self._ids = self._ids.select(index)
        if self.logits_BV is not None:
            self.logits_BV = self.logits_BV.index_select(0, index)
        if self._chosen_B is not None:
            self._chosen_B = self._chosen_B.index_select(0, index)

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
        if self.logits_BV is None:
            raise ValueError("no logits to keep: the last call did not compute them")
        state = None if self.state.rewinds else self.state.snapshot(slots=False)
        place = _Place(state=state, logits_BV=self.logits_BV)
        self._kept = dict(list((self._kept | {self.lengths[0]: place}).items())[-2:])

    def snapshot(self) -> Snapshot:
        """Copies of state, ids and last logits."""
        return Snapshot(
            state=self.state.snapshot(),
            ids=self._ids.clone(),
            logits_BV=None if self.logits_BV is None else self.logits_BV.clone(),
            kept=self._kept,
        )

    def restore(self, saved: Snapshot) -> None:
        """Restore a snapshot of this session, even where `rewind` is impossible.

        Raises ValueError if `select` has changed the number of sequences.
        """
        self._kept, self._torn = {}, True
        self.state.restore(saved.state)
        self._ids = saved.ids.clone()
        self._ids.grow(self.state.capacity)
        self.logits_BV = None if saved.logits_BV is None else saved.logits_BV.clone()
        self._kept, self._chosen_B, self._torn = dict(saved.kept), None, False

    def grow(self, capacity: int) -> None:
        """Grow to at least `capacity` slots per sequence."""
        self._ids.grow(capacity)
        self.state.grow(capacity)

    def _reprefill(self, totals: Sequence[int], edits: Sequence[Edit]) -> None:
        """Read all tokens again, as prefixes of sequences with lengths `totals`."""
        rows = self.ids
        longest = max(map(len, rows))
        if self._on_reprefill is not None:
            self._on_reprefill(longest)
        self._kept = {}
        self.state.rewind([0] * len(rows))
        for start in range(0, longest, PROMPT_CHUNK):
            parts = [row[start : start + PROMPT_CHUNK] for row in rows]
            self.extend(parts, logits="none", totals=totals, edits=edits)


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
    require_memory(
        session.decoder.state_bytes(state.batch, wanted), session.decoder.device,
        f"the cache of {wanted} tokens", hint,
    )  # fmt: skip
    session.grow(wanted)
    release_freed_memory()  # the smaller caches


class Ids:
    """Ids `[B, C]` of B sequences; lengths are stored elsewhere.

    They stay on the device, since reading them on the host synchronizes.
    """

    def __init__(self, ids_BC: Tensor) -> None:
        self._ids_BC = ids_BC

    @classmethod
    def none(cls, batch: int, capacity: int, device: torch.device) -> Self:
        """Empty ids for `capacity` tokens."""
        return cls(torch.zeros(batch, capacity, dtype=torch.long, device=device))

    def rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """The ids of every sequence, on the host."""
        rows = self._ids_BC.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def write(self, ids_BT: Tensor, starts: Sequence[int]) -> None:
        """Write from `starts[b]` on. Padding is after the last token and overwritten later."""
        tokens = ids_BT.shape[1]
        if len(set(starts)) == 1:
            self._ids_BC[:, starts[0] : starts[0] + tokens] = ids_BT
        else:
            at_B1 = torch.tensor(starts, device=ids_BT.device).unsqueeze(1)
            at_BT = at_B1 + torch.arange(tokens, device=ids_BT.device)
            self._ids_BC.scatter_(1, at_BT, ids_BT)

    def write_last(self, ids_B1: Tensor, lengths_B: Tensor) -> None:
        """Write the last token of sequences with lengths on the device."""
        self._ids_BC.scatter_(1, (lengths_B - 1).unsqueeze(1), ids_B1)

    def select(self, rows: Tensor) -> Self:
        """A copy with these sequences, in this order."""
        return type(self)(self._ids_BC.index_select(0, rows))

    def clone(self) -> Self:
        """A copy."""
        return type(self)(self._ids_BC.clone())

    def grow(self, capacity: int) -> None:
        """Grow to at least `capacity` slots."""
        self._ids_BC = F.pad(self._ids_BC, (0, max(0, capacity - self._ids_BC.shape[1])))
