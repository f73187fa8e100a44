"""Speculative decoding: a draft proposes tokens, and the model reads several of them at once.

Every token is picked from the model's logits with the same random number as without a draft: a
draft only determines how many tokens are computed together. If tokens read together have
bit-identical logits to single steps (`Session.extend`, `verify`), the text is identical; otherwise
up to rounding, as for a prompt read in chunks.

After Leviathan et al. 2023 (arXiv 2211.17192), with one random number for draft and model instead
of their acceptance rule: a seed gives the same text with and without a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from llmcli.engine.drafts import Draft
from llmcli.engine.output import Choice
from llmcli.engine.sampler import Sampler
from llmcli.engine.session import Session

# Tokens read at once: the last one and proposed ones. Each size is recorded once, which takes
# several steps; a size of two would rarely pay off.
ROWS = (4, 8, 16)
# Prior acceptance rates. A draft that takes time must be used to measure it; a free one is
# evaluated without verifying its tokens together.
_ASKED, _FREE = 0.6, 0.3
# Minimum of proposed tokens, and speedup, below which a draft is stopped.
_ENOUGH, _SLOWER = 64, 0.95


def decode(
    session: Session, sampler: Sampler, limit: int | None, speculation: Speculation | None
) -> Iterator[list[Choice]]:
    """Yield the choices of every sequence, at most `limit`.

    A `speculation` needs a single sequence. On a GPU tokens reach the host one step later.
    """
    if speculation is not None and session.state.batch == 1:
        return speculation.decode(session, sampler)
    if session.decoder.device.type == "cuda":
        return session.decode(sampler.draw, limit=limit)
    return session.decode(sampler.pick)


class Speculation:
    """Decodes sequences with a draft, one at a time, and counts acceptance.

    `accepted` of `proposed` tokens were right (tokens after a wrong one are wrong). `stopped`: the
    draft made decoding slower and is no longer used.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.proposed = self.accepted = 0
        self.stopped = False
        self._lengths = DraftLengthController(prior=_FREE if draft.free else _ASKED)
        self._tokens, self._spent_s, self._picking_s = 0, 0.0, 0.0  # since warm-up

    @property
    def speedup(self) -> float | None:
        """Estimated time of single steps divided by actual time; None without single steps."""
        single = self._lengths.step_s(1)
        if single is None:
            return None
        return (self._tokens * single + self._picking_s) / self._spent_s

    def describe(self) -> dict[str, Any]:
        """The `speculation` object of JSON documents."""
        return {
            "draft": self.draft.name,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "speedup": self.speedup,
            "stopped": self.stopped,
        }

    def decode(self, session: Session, sampler: Sampler) -> Iterator[list[Choice]]:
        """Yield the choices of `session.decode(sampler.pick)` for its only sequence.

        Wrong tokens that were read are removed, and right ones when the iterator is closed before
        the session is used otherwise.
        """
        rows, proposed, key, step_s = session.known_logits(), list[int](), None, None
        self.draft.begin(session.ids[0], sampler)
        while True:
            first, read = session.lengths[0] - len(rows) + 1, len(rows) - 1
            for at in range(len(rows)):
                begin = perf_counter()
                _, choices = sampler.pick(rows[at : at + 1])
                picked = perf_counter()
                id = choices[0].id
                right = at < len(proposed) and id == proposed[at]
                if at < len(proposed):
                    self._lengths.record_acceptance(key, right)
                if at < read:
                    self.accepted += right
                    self.proposed += 1 if right else read - at
                more = right and at < read
                if not more:
                    session.rollback(first + at)
                    if step_s is not None:
                        self._lengths.record_step(len(rows), step_s + perf_counter() - picked)
                self._picking_s += picked - begin
                self._spent_s += perf_counter() - begin
                try:
                    yield choices
                except GeneratorExit:
                    session.rollback(first + at)
                    raise
                self._tokens += 1
                self.draft.add(id)
                if not more:
                    break
            begin = perf_counter()
            if self.proposed >= _ENOUGH and (speedup := self.speedup) is not None:
                self.stopped |= speedup < _SLOWER
            key = None if self.stopped else self.draft.context_key()
            proposed, read = self._proposal(session, key)
            rows, step_s = _read(session, [id, *proposed[:read]])
            if self._lengths.step_s(1) is None:  # decoding without a draft has this warm-up too
                self._tokens, self._spent_s, self._picking_s = 0, 0.0, 0.0
            else:
                self._spent_s += perf_counter() - begin

    def _proposal(self, session: Session, key: int | None) -> tuple[list[int], int]:
        """Proposed tokens, and how many of them are worth verifying together (often none).

        A free draft always proposes, to measure its acceptance.
        """
        if key is None:
            return [], 0
        count = self._lengths.rows(key, session.state.capacity - session.lengths[0]) - 1
        if count == 0 or not session.can_verify(count + 1):
            return (self.draft.propose(1) if self.draft.free else []), 0
        self.draft.catch_up()
        begin = perf_counter()
        proposed = self.draft.propose(count)
        self._lengths.record_draft((perf_counter() - begin) / count)
        read = max(rows for rows in (1, *ROWS) if rows <= len(proposed) + 1) - 1
        return proposed, read


def _read(session: Session, ids: list[int]) -> tuple[torch.Tensor, float | None]:
    """Logits `[T, V]` of further tokens, of which the first is right, and the seconds.

    None for a step that was being recorded.
    """
    known = len(session.state.recorded)
    begin = perf_counter()
    ids_1T = torch.tensor([ids], device=session.decoder.device)
    if len(ids) == 1:
        rows = session.extend(ids_1T)
    else:
        rows = session.extend(ids_1T, logits="all", verify=True)[0]
    seconds = perf_counter() - begin
    return rows, seconds if len(session.state.recorded) == known else None


class DraftLengthController:
    """Chooses how many tokens to read at once, from step times and acceptance rates."""

    _WEIGHT = 0.1  # minimum weight of the latest value in a running mean
    _GAIN = 1.1  # minimum speedup for a proposal
    _PROMISE = 1.25  # minimum speedup if this size has to be recorded first
    _FORGOTTEN = 0.005  # decay of statistics each time a draft is not used
    _PER_ROW = 0.15  # assumed cost of a further row in single steps, until measured
    _UNTYPICAL = 1  # warm-up steps per size

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._steps: dict[int, int] = {}  # by rows
        self._step_s: dict[int, float] = {}
        self._draft_s = 0.0  # of one proposed token
        self._seen: dict[int | None, int] = {}  # key → proposed tokens
        self._right: dict[int | None, float] = {}  # key → acceptance rate

    def step_s(self, rows: int) -> float | None:
        """Seconds of a step with `rows` rows; None if not measured yet."""
        return self._step_s.get(rows)

    def record_step(self, rows: int, seconds: float) -> None:
        """Record the time of a step, including removal of wrong tokens."""
        self._steps[rows] = self._steps.get(rows, 0) + 1
        if self._steps[rows] > self._UNTYPICAL:
            self._step_s[rows] = self._mean(self._step_s.get(rows), seconds)

    def record_draft(self, seconds: float) -> None:
        """Record the time of a proposed token."""
        self._draft_s = self._mean(self._draft_s or None, seconds)

    def record_acceptance(self, key: int | None, right: bool) -> None:
        """Record whether a token proposed with this `context_key` was right."""
        self._seen[key] = seen = self._seen.get(key, 1) + 1
        share = self._right.get(key, self._prior)
        self._right[key] = share + (right - share) * max(self._WEIGHT, 1 / seen)

    def rows(self, key: int, most: int) -> int:
        """The size (1 or one of ROWS up to `most`) with the most expected tokens per second.

        A proposed token counts only if all before it are right.
        """
        if 1 not in self._step_s:
            return 1
        right = self._right.get(key, self._prior)

        def rate(rows: int) -> float:
            seconds = self._expected_s(rows) + (rows - 1) * self._draft_s
            return sum(right**at for at in range(rows)) / seconds

        best = max((1, *(rows for rows in ROWS if rows <= most)), key=rate)
        if rate(best) > (self._GAIN if best in self._step_s else self._PROMISE) * rate(1):
            return best
        self._right[key] = right + (self._prior - right) * self._FORGOTTEN
        self._draft_s *= 1 - self._FORGOTTEN
        return 1

    def _expected_s(self, rows: int) -> float:
        known = max(one for one in self._step_s if one <= rows)
        return self._step_s[known] + (rows - known) * self._PER_ROW * self._step_s[1]

    def _mean(self, before: float | None, latest: float) -> float:
        return latest if before is None else before + (latest - before) * self._WEIGHT
