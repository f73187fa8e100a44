"""What became of every tensor of a checkpoint, and what its numbers are like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmcli.records.checks import ViewCheck

OUTLIERS = "outliers"  # the check that finds numbers that are probable of no tensor


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of loading: its seconds, and the bytes that it read or made, None where none."""

    name: str
    seconds: float
    bytes: int | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """None where there are no bytes, or no time passed."""
        return None if self.bytes is None or not self.seconds else self.bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What `count` numbers are like: of those that are finite, NaN where none is.

    `infinite` of both signs, `negative` of them −∞. `first_bad`: the index of the first that is
    not finite, as a formula writes the parameter (`[in, out]`), or as a file's tensor is stored.
    """

    count: int
    mean: float
    std: float
    low: float
    high: float
    zeros: int
    nan: int
    infinite: int
    negative: int
    first_bad: tuple[int, ...] | None

    @property
    def finite(self) -> int:
        """How many of them mean, deviation and range are of."""
        return self.count - self.nan - self.infinite


def pooled(parts: Sequence[Numbers]) -> Numbers:
    """All of them together (Chan, Golub & LeVeque, 1979); `first_bad` of the first that has one."""
    some = [part for part in parts if part.finite]
    finite = sum(part.finite for part in some)
    mean = sum(part.mean * (part.finite / finite) for part in some) if some else math.nan
    apart = sum(part.finite * (part.std**2 + (part.mean - mean) ** 2) for part in some)
    return Numbers(
        count=sum(part.count for part in parts),
        mean=mean,
        std=math.sqrt(apart / finite) if some else math.nan,
        low=min((part.low for part in some), default=math.nan),
        high=max((part.high for part in some), default=math.nan),
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        infinite=sum(part.infinite for part in parts),
        negative=sum(part.negative for part in parts),
        first_bad=next((part.first_bad for part in parts if part.first_bad is not None), None),
    )


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """A checkpoint tensor, or as much of it as fills one parameter, and what was done with it.

    `parameter` is empty where it fills none: `reason` says why, and is empty where no model is
    known. `bytes` are those of the file that it takes, `operations` what was done to the stored
    numbers, in order. `numbers`: of the parameter as it was loaded, or of the whole tensor as it
    is stored where nothing was loaded; None where they were not looked at. `dtype` is the dtype or
    block format of the parameter, None where nothing was loaded. A line in which
    layers are folded stands for so many `tensors`.
    """

    parameter: str
    source: str
    stored: str
    shape: tuple[int, ...]
    bytes: int
    operations: tuple[str, ...] = ()
    dequantized: bool = False
    reason: str = ""
    numbers: Numbers | None = None
    dtype: str | None = None
    tensors: int = 1


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Names of one matrix (`tied`), or of tensors that hold the same numbers (`equal`)."""

    kind: Literal["tied", "equal"]
    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MetadataCheck:
    """What a file or its configuration says of the weights (`what`: where), and what they are.

    `must`: whether a model with another answer is refused. The others are no more than a label.
    """

    name: str
    what: str
    says: str
    holds: str
    ok: bool
    must: bool


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How a model was loaded; of a file that was only looked through, `dtype` is None.

    `lines` are in the parameters' order, then what fills none; `rows` are the same with layers
    folded. `base_bytes` were held before and `peak_bytes` at most; `device_bytes` on a GPU.
    `fault` is why nothing can be loaded (`hint`: what to do about it), and `not_finite` the first
    number that is NaN or infinite; empty where there is none. `notes` are about what was not
    looked at. Of the files so many are `confirmed` by a checksum.
    """

    dtype: str | None
    device: str
    files: int
    file_bytes: int
    tensor_bytes: int
    weight_bytes: int | None
    lines: tuple[LedgerLine, ...]
    rows: tuple[LedgerLine, ...]
    stages: tuple[Stage, ...]
    base_bytes: int | None
    peak_bytes: int | None
    device_bytes: int | None
    shared: tuple[Shared, ...]
    claims: tuple[MetadataCheck, ...]
    checks: tuple[ViewCheck, ...]
    notes: tuple[str, ...]
    numbers: int
    fault: str
    not_finite: str
    hint: str | None = None
    confirmed: int = 0

    @property
    def whole(self) -> bool:
        """Whether every file is known to be right, to the last bit."""
        return self.ok and self.confirmed == self.files > 0

    @property
    def fits(self) -> bool:
        """Whether the file is what it says, and what its configuration needs."""
        kept = all(claim.ok or not claim.must for claim in self.claims)
        return kept and not self.fault and all(check.ok for check in self.checks)

    @property
    def ok(self) -> bool:
        """The same, and every number is finite."""
        return self.fits and not self.not_finite
