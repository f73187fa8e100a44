"""Dumped tensors: their shapes, and statistics of their numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcli.records.document import APART, Checked, ViewCheck, derived
from llmcli.records.text import Token


@dataclass(frozen=True, kw_only=True)
class DumpedTensor:
    """Statistics of one tensor, without a batch axis: of its finite numbers, NaN where none is.

    `std` is the root of the mean squared distance from the mean, `norm` that of the sum of squares.
    `masked` counts the scores that are −∞ because a key is masked: values, and no fault.
    `nan` and `inf` count the faults, and `first_bad` is the index of the first of them.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    formula: str
    mean: float
    std: float
    min: float
    max: float
    norm: float
    masked: int
    nan: int
    inf: int
    first_bad: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class DumpReport(Checked):
    """The requested tensors in execution order.

    The first `prompt_tokens` of `tokens` were given, the others generated; there are none where
    only parameters were dumped. `not_finite`: the first number that is NaN or infinite, such as
    `blocks.0.mlp.post[3,7] is nan`, None where all are finite.
    """

    dtype: str
    tokens: tuple[Token, ...]
    prompt_tokens: int
    tensors: tuple[DumpedTensor, ...]
    not_finite: str | None
    checks: tuple[ViewCheck, ...] = field(metadata=APART)

    @derived
    def ok(self) -> bool:
        """Whether every check holds and every number is finite."""
        return not self.not_finite and super().ok
