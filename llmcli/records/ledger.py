"""What became of every tensor of a checkpoint: which parameter it fills, or why it is dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from llmcli.records.document import APART

# what a checkpoint that fits its configuration fulfils
EACH_HAS_ITS_PLACE = "every parameter has its tensor, and every tensor its place"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Statistics of `count` numbers: of the finite ones, NaN where there is none.

    `inf` of both signs, `negative_inf` of them −∞. `first_bad`: the index of the first that is
    not finite, as a formula writes the parameter (`[in, out]`), or as a file's tensor is stored.
    """

    count: int
    mean: float
    std: float
    min: float
    max: float
    zeros: int
    nan: int
    inf: int
    negative_inf: int
    first_bad: tuple[int, ...] | None

    @property
    def finite(self) -> int:
        """How many of them mean, deviation and range are of."""
        return self.count - self.nan - self.inf

    @property
    def bad(self) -> Hashable:
        """What is not finite in it."""
        return self.nan, self.inf, self.negative_inf, self.first_bad


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """A checkpoint tensor, or as much of it as fills one parameter, and what was done with it.

    `parameter` may be an item along its first axis (`blocks.0.moe.W_up[3]`), and is None where the
    tensor fills none: `reason` says why, and is None where no model is known. `shape` is the
    tensor's, `bytes` this entry's share of the tensor. `operations`: what was done to the stored
    numbers, in order, scaling first; `dequantized`: whether blocks were dequantized, or numbers
    scaled. `numbers`: of the parameter as it was loaded, or of the whole tensor as it is stored
    where nothing was loaded; None where they were not read. `dtype` is the dtype or block format of
    the parameter, None where nothing was loaded.
    """

    parameter: str | None = None
    source: str
    stored: str
    shape: tuple[int, ...]
    bytes: int
    operations: tuple[str, ...] = ()
    dequantized: bool = False
    reason: str | None = None
    numbers: Numbers | None = None
    dtype: str | None = None
    filled: tuple[int, ...] = field(default=(), metadata=APART)  # shape of the parameter or item
    scale_tensors: tuple[str, ...] = field(default=(), metadata=APART)  # that have its scale
    tensors: int = field(default=1, metadata=APART)  # that a row of several layers stands for

    @property
    def target(self) -> str:
        """The parameter's name, without the item; empty where it fills none."""
        return (self.parameter or "").partition("[")[0]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The use of every checkpoint tensor: filled parameters, or dropped with a reason."""

    entries: tuple[LedgerEntry, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    surplus: tuple[str, ...] = ()  # dropped ones without a parameter in the model
