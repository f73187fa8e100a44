"""What every rung is: a complete forward pass, and a way to show its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from llmcli.ladder.weights import Weights

Value = Tensor | Sequence[float] | Sequence[Sequence[float]] | float


class Show(Protocol):
    """Is told what a rung computes, in the order in which it does."""

    def __call__(self, formula: str, value: Value, source: Tensor | None = None) -> None:
        """`formula` is the step in the seeds' letters (`Q = T W_q`), `value` its result.

        `source` is what it was made from where only the shape changed: a view or a copy.
        """


def silent(formula: str, value: Value, source: Tensor | None = None) -> None:
    """Shows nothing."""


class Rung(ABC):
    """One formulation of the model. `ids` is `[n]`, for rungs that take a batch `[b, n]`.

    `number` and `name` say which, `title` what is new in one line, `change` the formula before
    and after, `idea` why it gives the same numbers and what it saves.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]
    change: ClassVar[tuple[str, str]]
    idea: ClassVar[str]
    batched: ClassVar[bool] = False

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        self.weights = weights
        self.config = weights.config
        self.show = show
        self.ids = torch.empty(0, dtype=torch.long)

    def prepare(self, until: int | None = None) -> None:
        """Converts what `forward` needs, so that timing it measures the arithmetic alone."""
        return

    @abstractmethod
    def forward(self, ids: Tensor, until: int | None = None) -> Tensor:
        """Logits of every token, `[n, V]`; with `until=i` the rows `[n, d]` after layer i."""

    def start(self, ids: Tensor) -> Tensor:
        """Reads a prompt: logits `[n, V]` of its tokens."""
        self.ids = ids
        return self.forward(ids)

    def extend(self, id: Tensor) -> Tensor:
        """Reads one token more, `[]`: its logits `[V]`. Without a cache all is done again."""
        return self.start(torch.cat((self.ids, id.reshape(1))))[-1]
