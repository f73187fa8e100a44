"""Drafts, which propose the next tokens before the model has computed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from llmcli.engine.sampler import Sampler
from llmcli.engine.session import Session, make_room
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.model import Model

_LONGEST, _SHORTEST = 4, 2  # tokens of an n-gram
_FIRST = 256  # initial capacity of a draft's session; it doubles
_BEHIND = 16  # unread tokens allowed before a proposal


class Draft(Protocol):
    """Proposes continuations of a token sequence.

    `name`: of the model, or `ngram`; `free`: a proposal takes negligible time.
    """

    name: str
    free: bool

    def begin(self, ids: Sequence[int], sampler: Sampler) -> None:
        """Begin a text with these ids; `sampler` will choose the next tokens."""

    def add(self, id: int) -> None:
        """Append a token to the text."""

    def context_key(self) -> int | None:
        """The kind of context for a proposal now; None if none is possible.

        Proposals with the same key have a similar acceptance rate.
        """

    def catch_up(self) -> None:
        """Read the text if much of it is unread; not counted as proposal time."""

    def propose(self, count: int) -> list[int]:
        """Propose at most `count` next tokens; requires a `context_key` that is not None."""


class NgramDraft:
    """Proposes what followed the last tokens earlier in the text: prompt lookup (Saxena 2023).

    Uses the latest match of the last four tokens, else of three, or of two.
    """

    name, free = "ngram", True

    def begin(self, ids: Sequence[int], sampler: Sampler) -> None:
        """See `Draft`."""
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram → index of the next token
        for id in ids:
            self.add(id)

    def add(self, id: int) -> None:
        """See `Draft`."""
        ids = self._ids
        for size in range(_SHORTEST, min(_LONGEST, len(ids)) + 1):
            self._behind[tuple(ids[-size:])] = len(ids)
        ids.append(id)

    def context_key(self) -> int | None:
        """The length of the matched n-gram."""
        for size in range(min(_LONGEST, len(self._ids)), _SHORTEST - 1, -1):
            if tuple(self._ids[-size:]) in self._behind:
                return size
        return None

    def catch_up(self) -> None:
        """See `Draft`."""

    def propose(self, count: int) -> list[int]:
        """See `Draft`. A repetition with a shorter period is continued."""
        size = self.context_key()
        assert size is not None
        found = self._ids[self._behind[tuple(self._ids[-size:])] :]
        return [found[at % len(found)] for at in range(count)]


class ModelDraft:
    """Proposes the choices of a smaller model with the same vocabulary and random numbers.

    Raises UsageError if common ids have different tokens.
    """

    free = False

    def __init__(self, small: Model, model: Model) -> None:
        one, other = small.tokenizer, model.tokenizer
        if one is None or other is None:
            same = small.config.vocab == model.config.vocab
        else:
            same = one.agrees(other)
        if not same:
            raise UsageError(
                f"`{small.name}` has a different vocabulary than `{model.name}`",
                hint="a draft is a smaller model of the same family, or `--draft ngram`",
            )
        self.model = small
        self.name = small.name
        self._room = small.config.room()
        self._vocab = min(small.config.vocab, model.config.vocab)
        self._session = Session(small.decoder, 1, min(_FIRST, self._room))

    def begin(self, ids: Sequence[int], sampler: Sampler) -> None:
        """See `Draft`. Reuses the common prefix with the tokens already read."""
        self._sampler = sampler
        self._ids = list(ids)
        self._known = max(self._ids, default=0) < self.model.config.vocab
        self._session.reuse(self._ids)

    def add(self, id: int) -> None:
        """See `Draft`."""
        self._ids.append(id)
        self._known = self._known and id < self.model.config.vocab

    def context_key(self) -> int | None:
        """See `Draft`: constant, as long as the text fits the model."""
        return 0 if self._known and len(self._ids) < self._room else None

    def catch_up(self) -> None:
        """See `Draft`."""
        if len(self._ids) - self._session.lengths[0] > _BEHIND:
            self._read(self._ids[:-1])
            self._session.keep()

    def propose(self, count: int) -> list[int]:
        """See `Draft`."""
        count = min(count, self._room - len(self._ids) + 1)
        logits_BV = self._read(self._ids, further=count - 1)
        self._session.keep()
        found: list[int] = []
        while True:
            id = self._sampler.guess(logits_BV[:, : self._vocab], len(found))
            found.append(id)
            if len(found) == count:
                return found
            logits_BV = self._session.extend(torch.tensor([[id]], device=self.model.device))

    def _read(self, ids: list[int], further: int = 0) -> Tensor:
        """Logits `[1, V]` after `ids`, with room for `further` tokens."""
        make_room(self._session, len(ids) + further, self._room, "go without `--draft`")
        start = self._session.reuse(ids)
        if start < len(ids):
            self._session.prefill([ids[start:]])
        return self._session.known_logits()
