"""Tensors that were looked at one by one: their shapes and what their numbers are like."""

from __future__ import annotations

from dataclasses import dataclass

from llmcli.records.checks import ViewCheck


@dataclass(frozen=True, kw_only=True)
class DumpPlan:
    """A tensor that is going to be dumped, without a batch axis, of `nbytes` bytes.

    With tokens still to be generated the shape is the largest that there can be.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class DumpedTensor:
    """What the numbers of one tensor are like: of those that are finite, NaN where none is.

    `std` is the root of the mean squared distance from the mean, `norm` that of the sum of squares.
    `masked` are the scores that are −∞ because a key may not be seen: values, and no fault.
    `nan` and `infinite` count what is a fault, and `first_bad` is where the first of it stands.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    formula: str
    mean: float
    std: float
    low: float
    high: float
    norm: float
    masked: int
    nan: int
    infinite: int
    first_bad: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class DumpReport:
    """The tensors that were asked for, in execution order.

    `tokens` are (id, text), the first `prompt_tokens` of them given, the others generated; none
    where only parameters were dumped. `not_finite`: the first number that is NaN or infinite,
    `blocks.0.mlp.post[3,7] is nan`, empty where all are finite.
    """

    dtype: str
    tokens: tuple[tuple[int, str], ...]
    prompt_tokens: int
    tensors: tuple[DumpedTensor, ...]
    checks: tuple[ViewCheck, ...]
    not_finite: str

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)
