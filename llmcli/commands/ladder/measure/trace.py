"""What a rung shows: each step once, its shape, how it lies in memory, its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmcli.commands.ladder.report import Shown

WHOLE = 8  # rows and columns up to which a matrix is kept whole
CORNER = 4  # … and how many of each are kept of a larger one

Value = Tensor | Sequence[float] | Sequence[Sequence[float]] | float
Note = str | Callable[[], str]


class Show(Protocol):
    """Receives the steps of a rung, in the order in which it computes them."""

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
        """`formula` is the step in the documents' letters (`Q = T¹ W_q`), `value` its result.

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


class Trace:
    """A `Show` that records a formula's first occurrence in each section: block 0, head 0.

    Of sections that repeat another one, as the later blocks do, nothing is kept.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], Shown] = {}
        self._section, self._again = "", False

    @property
    def steps(self) -> tuple[Shown, ...]:
        """The steps in the order in which they were first shown."""
        return tuple(self._steps.values())

    def section(self, title: str, again: bool = False) -> None:
        """What follows is in the part `title`, and not recorded where it is one like another."""
        self._section, self._again = title, again

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
        """Records the step; copies only the corner of what it is shown."""
        if self._again or (self._section, formula) in self._steps:
            return
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        listed = not isinstance(value, Tensor)
        self._steps[self._section, formula] = Shown(
            formula=formula,
            shape=tuple(tensor.shape),
            strides=() if listed else tuple(tensor.stride()),
            source=None if source is None else (tuple(source.shape), tuple(source.stride())),
            moved=None if source is None else not shares_memory(tensor, source),
            values=_corner(tensor),
            section=self._section,
            axes=axes,
            note=note if isinstance(note, str) else note(),
            token=token,
        )


def shares_memory(tensor: Tensor, source: Tensor) -> bool:
    """Whether `tensor` is a view of `source`'s storage: nothing was moved to make it."""
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _corner(tensor: Tensor) -> tuple[tuple[float, ...], ...]:
    """The last two axes at the first index of the others, whole where they are small."""
    while tensor.ndim > 2:
        tensor = tensor[0]
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor
    rows, columns = (size if size <= WHOLE else CORNER for size in matrix.shape)
    return tuple(tuple(row) for row in matrix[:rows, :columns].tolist())
