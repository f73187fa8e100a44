"""What became of every tensor of a checkpoint, and statistics of its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmcli.records.checks import ViewCheck
from llmcli.records.document import APART, derived

OUTLIERS = "outliers"  # the check that finds blocks of improbable numbers


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of loading: its seconds, and the bytes that it read or made, None where none."""

    name: str
    seconds: float
    bytes: int | None = None

    @derived
    def bytes_per_s(self) -> float | None:
        """None where there are no bytes, or no time passed."""
        return None if self.bytes is None or not self.seconds else self.bytes / self.seconds


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


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """A checkpoint tensor, or as much of it as fills one parameter, and what was done with it.

    `parameter` is None where it fills none: `reason` says why, and is None where no model is known.
    `bytes` are those of the file that it takes, `operations` what was done to the stored numbers,
    in order. `numbers`: of the parameter as it was loaded, or of the whole tensor as it is stored
    where nothing was loaded; None where they were not read. `dtype` is the dtype or block format of
    the parameter, None where nothing was loaded. A line in which layers are folded stands for so
    many `tensors`.
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
    tensors: int = field(default=1, metadata=APART)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Names of one matrix (`tied`), or of tensors that hold the same numbers (`equal`)."""

    kind: Literal["tied", "equal"]
    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MetadataCheck:
    """What a file or its configuration says of the weights (`what`: where), and what they are.

    `must`: whether a model with another answer is refused.
    """

    name: str
    what: str
    says: str
    holds: str
    ok: bool
    must: bool = True


@dataclass(frozen=True, kw_only=True)
class LoadBytes:
    """Bytes of the `files` with their headers, of their `tensors`, of the `weights` in memory.

    `weights` is None where nothing was loaded.
    """

    files: int
    tensors: int
    weights: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadMemory:
    """Bytes of the process `before` loading and at its `peak`, and of a GPU (`device`).

    None where unknown.
    """

    before: int | None
    peak: int | None
    device: int | None


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How a model was loaded, or what was read of its files alone (`dtype` is None).

    `confirmed`: of the files, how many have a known checksum. `ledger` is in the parameters' order,
    then what fills none; `rows` are the same with layers folded. `numbers`: how many were read.
    `notes` are about what was not checked. `fault`: why nothing can be loaded (`hint`: what to do
    about it). `not_finite`: the first number that is NaN or infinite.
    """

    dtype: str | None = None
    device: str = "cpu"
    files: int
    confirmed: int = 0
    bytes: LoadBytes
    memory: LoadMemory
    stages: tuple[Stage, ...]
    ledger: tuple[LedgerLine, ...]
    rows: tuple[LedgerLine, ...] = field(metadata=APART)
    shared: tuple[Shared, ...] = ()
    claims: tuple[MetadataCheck, ...]
    numbers: int
    notes: tuple[str, ...]
    fault: str | None
    not_finite: str | None
    hint: str | None = field(default=None, metadata=APART)
    checks: tuple[ViewCheck, ...] = field(metadata=APART)

    @property
    def whole(self) -> bool:
        """Whether every file is known to be right, to the last bit."""
        return self.ok and self.confirmed == self.files > 0

    @property
    def fits(self) -> bool:
        """Whether the file is what it says, and what its configuration needs."""
        kept = all(claim.ok or not claim.must for claim in self.claims)
        return kept and not self.fault and all(check.ok for check in self.checks)

    @derived
    def ok(self) -> bool:
        """Whether it fits, and every number is finite."""
        return self.fits and not self.not_finite
