"""What every rung is: a complete forward pass, and a way to show its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from llmcli.ladder.letters import Letters
from llmcli.ladder.weights import Weights
from llmcli.ladder.words import words
from llmcli.reports.ladder import NEXT

Value = Tensor | Sequence[float] | Sequence[Sequence[float]] | float
Note = str | Callable[[], str]


class Show(Protocol):
    """Is told what a rung computes, in the order in which it does."""

    def __call__(
        self,
        formula: str,
        value: Value,
        axes: str = "",
        *,
        source: Tensor | None = None,
        note: Note = "",
        token: int | None = None,
    ) -> None:
        """`formula` is the step in the seeds' letters (`Q = T¹ W_q`), `value` its result.

        `axes`: its shape in letters, after those of a product's operands where it is one:
        `(n × d)(d × d/h) = n × d/h`. `source` is what it was made from where only the shape
        changed: a view or a copy. `token`: whose vector it is, where one of many is shown.
        """

    def section(self, title: str, again: bool = False) -> None:
        """What follows is in the part `title`; `again`: a part like one that was shown before."""


class Silent:
    """Shows nothing."""

    def __call__(
        self,
        formula: str,
        value: Value,
        axes: str = "",
        *,
        source: Tensor | None = None,
        note: Note = "",
        token: int | None = None,
    ) -> None:
        """Does nothing."""

    def section(self, title: str, again: bool = False) -> None:
        """Does nothing."""


silent: Show = Silent()


class Rung(ABC):
    """One formulation of the model. `ids` is `[n]`, for rungs that take a batch `[b, n]`.

    `number` and `name` say which, `title` what is new in one line.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]
    batched: ClassVar[bool] = False

    def __init__(self, weights: Weights, show: Show = silent) -> None:
        self.weights = weights
        self.config = weights.config
        self.show = show
        self.ids = torch.empty(0, dtype=torch.long)
        # what is shown is the first block, and the names are its
        self.letters = Letters.of(weights.layers[0].config, self.config.width)

    @property
    def change(self) -> tuple[str, str]:
        """The formula of the rung below and this one's, each one or more lines."""
        return words(self.name, self.letters).change

    @property
    def idea(self) -> str:
        """Why it gives the same numbers and what it saves, as far as this model has it."""
        return words(self.name, self.letters).idea

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

    def enter(self, part: str, row: str = "") -> None:
        """Says that what is shown next is in `part`; `row` is `_n` where it is one token's row."""
        self.show.section(f"{NEXT}: {part}" if row else part)

    def enter_block(self, i: int, row: str = "") -> None:
        """The same for block i. All blocks do the same: the first one's steps are kept."""
        part = f"block {i} of {len(self.weights.decoder.config.layers)}"
        self.show.section(f"{NEXT}: {part}" if row else part, again=i > 0)

    def leave_blocks(self, H: Value, axes: str, row: str = "", name: str = "H") -> None:
        """After the last block: its H, from which the logits are made."""
        part = "after the last block"
        configs = self.weights.decoder.config.layers
        cut = len(self.weights.layers) < len(configs)  # to estimate from: not the model's logits
        self.show.section(f"{NEXT}: {part}" if row else part, again=cut)
        last = len(configs) - 1
        which = f"blocks 1 to {last} do" if last > 1 else "block 1 does"
        same = "with" if all(one == configs[0] for one in configs) else "by their own formulas and"
        words = f"{which} the same {same} their own weights: X of block i + 1 is H of block i"
        self.show(f"{name}{row} of block {last}", H, axes, note=words if last else "")

    @property
    def tied(self) -> str:
        """What W_head is, where it is no matrix of its own."""
        return "W_head = W_Eᵀ: the embeddings are the head, too" if self.config.head.tied else ""
