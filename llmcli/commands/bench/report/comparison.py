"""Two results of a benchmark side by side: what is the same test, and how much faster B is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmcli.commands.bench.report.intervals import Rate, interval
from llmcli.records.document import APART, derived

Side = Literal["a", "b"]
Verdict = Literal["faster", "slower", "noise", "inconclusive", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row as it was read. `test` is `pp512 @ d1024`; `rate` is None where it did not run.

    `facts` are settings by llama-bench's names, spelled alike in all formats: yes is `1`,
    sizes are `258.05 MiB`. `error` says why there is no rate, `inconsistency` what contradicts it.
    """

    test: str
    facts: Mapping[str, str]
    rate: Rate | None
    error: str | None = None
    inconsistency: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of results. `name` as the user gave it; `builds` are `commit (number)`.

    `rows`: how many it has. `slowed`: whether it says that other programs took processors
    meanwhile, None where it does not say.
    """

    name: str
    format: str
    builds: tuple[str, ...]
    rows: int
    slowed: bool | None = None
    results: tuple[Result, ...] = field(default=(), metadata=APART)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that is one value throughout each side, and not the same one."""

    field: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class MissingSetting:
    """A setting that only the file of the other side has."""

    side: Side
    field: str


@dataclass(frozen=True, kw_only=True)
class ComparedTest:
    """A test of both sides. `ratio` is B ÷ A in tokens per second.

    `low` … `high` hold the true ratio with 95 % confidence as far as the spread of the runs tells
    (Welch, with their correlation); None where a side has a single run. `independent` is what they
    would be if no run resembled the one before. `settings`: those that tell it from other rows.
    """

    test: str
    settings: Mapping[str, str]
    a: Rate
    b: Rate
    ratio: float
    low: float | None
    high: float | None
    independent: tuple[float, float] | None

    @classmethod
    def of(cls, test: str, settings: Mapping[str, str], a: Rate, b: Rate) -> ComparedTest:
        """The ratio of these rates and its interval."""
        low, high = interval(a, b) or (None, None)
        independent = interval(a, b, independent=True)
        return cls(
            test=test, settings=settings, a=a, b=b, ratio=b.mean / a.mean, low=low, high=high,
            independent=independent,
        )  # fmt: skip

    @derived
    def verdict(self) -> Verdict:
        """`noise` where 1 lies in the interval, `inconclusive` where only the runs' likeness to
        their neighbours puts it there, `unknown` where there is none.
        """
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 1.0 <= self.high:
            low, high = self.independent or (self.low, self.high)
            return "noise" if low <= 1.0 <= high else "inconclusive"
        return "faster" if self.ratio > 1.0 else "slower"


@dataclass(frozen=True, kw_only=True)
class UnmatchedTest:
    """A test of one side, or one that has no rate there: then `error` says why.

    `other`: the rate on the other side, None where it has no such test.
    """

    side: Side
    test: str
    settings: Mapping[str, str]
    rate: Rate | None
    error: str | None = None
    other: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """B against A. `lone`: tests that have no rate on both sides; `unsaid`: missing settings.

    `assumed_runs`: what is taken for `Rate.runs` where it is None. `slower_than` is the share
    that B may be slower, None where no bound was given.
    """

    a: Source
    b: Source
    differences: tuple[Difference, ...]
    unsaid: tuple[MissingSetting, ...]
    tests: tuple[ComparedTest, ...]
    lone: tuple[UnmatchedTest, ...]
    assumed_runs: int
    slower_than: float | None = None

    @derived
    def too_slow(self) -> tuple[int, ...]:
        """Places of tests of B that are slower by more than was allowed, within noise or not."""
        if self.slower_than is None:
            return ()
        least = 1.0 - self.slower_than
        return tuple(place for place, test in enumerate(self.tests) if test.ratio < least)

    @property
    def slow_tests(self) -> tuple[ComparedTest, ...]:
        """The tests at these places."""
        return tuple(self.tests[place] for place in self.too_slow)

    @property
    def broken(self) -> tuple[UnmatchedTest, ...]:
        """Tests that ran in A, and are in B without a rate."""
        return tuple(
            test for test in self.lone if test.side == "b" and test.error and test.other is not None
        )

    @derived
    def ok(self) -> bool:
        """Something was compared, and where a bound was given nothing exceeds it or is broken."""
        held = self.slower_than is None or not (self.too_slow or self.broken)
        return bool(self.tests) and held
