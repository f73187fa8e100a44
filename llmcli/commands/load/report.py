"""What became of every tensor of a checkpoint, and statistics of its numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from llmcli.errors import CheckpointError
from llmcli.records.document import APART, ViewCheck, derived
from llmcli.records.ledger import LedgerEntry, Numbers
from llmcli.records.numbers import together

OUTLIERS = "outliers"  # the check that finds blocks of improbable numbers
# Between dots or in brackets; at most six digits, since names come from untrusted files.
_NUMBER = re.compile(r"(?<![^.\[])(?:0|[1-9][0-9]{0,5})(?![^.\]])")
_NAMED = ("parameter", "source", "reason")  # parts of a line that have layers' numbers in them


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
class Shared:
    """Names of one matrix (`tied`), or of tensors that hold the same numbers (`equal`)."""

    kind: Literal["tied", "equal"]
    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MetadataCheck:
    """A claim of a file or its configuration about the weights, and the actual value.

    `what`: where the claim is; `says`: the claimed value, `holds`: the actual one. `must`: whether
    a wrong claim is an error.
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
    then what fills none. `numbers`: how many were read. `notes` are about what was not checked.
    `not_finite`: the first number that is NaN or infinite.
    """

    dtype: str | None = None
    device: str = "cpu"
    files: int
    confirmed: int = 0
    bytes: LoadBytes
    memory: LoadMemory
    stages: tuple[Stage, ...]
    ledger: tuple[LedgerEntry, ...]
    shared: tuple[Shared, ...] = ()
    claims: tuple[MetadataCheck, ...]
    numbers: int
    notes: tuple[str, ...]
    not_finite: str | None
    error: CheckpointError | None = field(metadata=APART)
    checks: tuple[ViewCheck, ...] = field(metadata=APART)

    @cached_property
    def rows(self) -> tuple[LedgerEntry, ...]:
        """The ledger with equal layers in one line."""
        return folded(self.ledger)

    @derived
    def fault(self) -> str | None:
        """Why nothing can be loaded, or None."""
        return None if self.error is None else self.error.message

    @property
    def whole(self) -> bool:
        """Whether every file is known to be right, to the last bit."""
        return self.ok and self.confirmed == self.files > 0

    @property
    def fits(self) -> bool:
        """Whether the file is what it says, and what its configuration needs."""
        kept = all(claim.ok or not claim.must for claim in self.claims)
        return kept and not self.error and all(check.ok for check in self.checks)

    @derived
    def ok(self) -> bool:
        """Whether it fits, and every number is finite."""
        return self.fits and not self.not_finite


def folded(lines: Iterable[LedgerEntry]) -> tuple[LedgerEntry, ...]:
    """A row for tensors that differ in nothing but the first two numbers of their names.

    These are the layer's and, in it, the expert's. What else is different, such as a stored format
    or where a number is not finite, stays apart; the numbers are of all of them, and bytes add up.
    """
    for which in (1, 0):  # the second number, then the first
        rows: dict[Hashable, list[LedgerEntry]] = {}
        for line in lines:
            opened = {name: _open(getattr(line, name), which) for name in _NAMED}
            templates: dict[str, Any] = {name: template for name, (template, _) in opened.items()}
            numbers = [int(number) for _, number in opened.values() if number is not None]
            apart_by = tuple(number - numbers[0] for number in numbers)
            apart: dict[str, Any] = {"filled": (), "scale_tensors": ()}
            template = replace(line, **templates, **apart, bytes=0, numbers=None)
            bad = line.numbers and line.numbers.bad
            rows.setdefault((template, bad, apart_by), []).append(line)
        lines = [row[0] if len(row) == 1 else _row(row) for row in rows.values()]
    return tuple(lines)


def _open(name: str | None, which: int) -> tuple[str | None, str | None]:
    """The name with `{}` for its number `which` (0: the first), and that number.

    As it is where it has fewer.
    """
    found = next(islice(_NUMBER.finditer(name or ""), which, None), None)
    if name is None or found is None:
        return name, None
    return f"{name[: found.start()]}{{}}{name[found.end() :]}", found[0]


def _row(lines: Sequence[LedgerEntry]) -> LedgerEntry:
    parts = [line.numbers for line in lines if line.numbers is not None]
    names: dict[str, Any] = {
        name: together([getattr(line, name) for line in lines])
        for name in _NAMED
        if getattr(lines[0], name) is not None
    }
    return replace(
        lines[0],
        **names,
        bytes=sum(line.bytes for line in lines),
        numbers=pooled(parts) if parts else None,
        tensors=sum(line.tensors for line in lines),
    )


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
        min=min((part.min for part in some), default=math.nan),
        max=max((part.max for part in some), default=math.nan),
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        negative_inf=sum(part.negative_inf for part in parts),
        first_bad=next((part.first_bad for part in parts if part.first_bad is not None), None),
    )
