"""Who proposes the next tokens before the model has computed them."""

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

_LONGEST, _SHORTEST = 4, 2  # tokens that are looked for
_FIRST = 256  # tokens that a draft's session has room for; it doubles
_BEHIND = 16  # tokens that a draft may have to read before it proposes one


class Draft(Protocol):
    """Proposes how a text of token ids goes on."""

    @property
    def name(self) -> str:
        """Of the model, or `ngram`."""

    @property
    def free(self) -> bool:
        """Whether a proposal takes no time to speak of."""

    def begin(self, ids: Sequence[int], sampler: Sampler) -> None:
        """A text begins with these ids; `sampler` is going to choose what follows."""

    def add(self, id: int) -> None:
        """It goes on with this one."""

    def ground(self) -> int | None:
        """What a proposal would rest on now; None where there is none.

        Proposals on the same ground are about as often right.
        """

    def catch_up(self) -> None:
        """Reads the text where much of it was not read: no part of what a proposal takes."""

    def propose(self, count: int) -> list[int]:
        """The next tokens, at most `count`, where `ground` is not None."""


class NgramDraft:
    """What followed the last tokens where they stood before: prompt lookup (Saxena 2023).

    The last place of the last four of them counts, or else of three, or of two.
    """

    name, free = "ngram", True

    def begin(self, ids: Sequence[int], sampler: Sampler) -> None:
        """See `Draft`."""
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # where what follows those tokens stands
        for id in ids:
            self.add(id)

    def add(self, id: int) -> None:
        """See `Draft`."""
        ids = self._ids
        for size in range(_SHORTEST, min(_LONGEST, len(ids)) + 1):
            self._behind[tuple(ids[-size:])] = len(ids)
        ids.append(id)

    def ground(self) -> int | None:
        """How many tokens stood there before."""
        for size in range(min(_LONGEST, len(self._ids)), _SHORTEST - 1, -1):
            if tuple(self._ids[-size:]) in self._behind:
                return size
        return None

    def catch_up(self) -> None:
        """See `Draft`."""

    def propose(self, count: int) -> list[int]:
        """See `Draft`. What repeats itself with a shorter period goes on to do so."""
        size = self.ground()
        assert size is not None
        found = self._ids[self._behind[tuple(self._ids[-size:])] :]
        return [found[at % len(found)] for at in range(count)]


class ModelDraft:
    """What a smaller model with the same vocabulary would write, by the same random numbers.

    Raises UsageError where the vocabulary is another one.
    """

    free = False

    def __init__(self, small: Model, model: Model) -> None:
        check_vocabulary(small, model)
        self.model = small
        self.name = small.name
        positions = small.config.embedding.positions
        context = small.config.context
        self._room = context if positions is None else min(context, positions)
        self._vocab = min(small.config.vocab, model.config.vocab)
        self._session = Session(small.decoder, 1, min(_FIRST, self._room))

    def begin(self, ids: Sequence[int], sampler: Sampler) -> None:
        """See `Draft`. What was read of it is not read again."""
        self._sampler = sampler
        self._ids = list(ids)
        self._known = max(self._ids, default=0) < self.model.config.vocab
        self._session.reuse(self._ids)

    def add(self, id: int) -> None:
        """See `Draft`."""
        self._ids.append(id)
        self._known = self._known and id < self.model.config.vocab

    def ground(self) -> int | None:
        """The same at any time, as long as the text fits the model."""
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
        """Logits `[1, V]` behind those ids, with room for `further` tokens."""
        make_room(self._session, len(ids) + further, self._room, "go without `--draft`")
        start = self._session.reuse(ids)
        if start < len(ids):
            self._session.prefill([ids[start:]])
        assert self._session.logits_BV is not None
        return self._session.logits_BV


def check_vocabulary(small: Model, model: Model) -> None:
    """Raises UsageError where ids do not mean the same to both, those that both have."""
    one, other = small.tokenizer, model.tokenizer
    if one is not None and other is not None:
        same = one.agrees(other)
    else:
        same = small.config.vocab == model.config.vocab
    if not same:
        raise UsageError(
            f"`{small.name}` has another vocabulary than `{model.name}`",
            hint="a draft is a smaller model of the same family, or `--draft ngram`",
        )
