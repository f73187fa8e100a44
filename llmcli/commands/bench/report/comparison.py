"""Rates that are compared: how sure the ratio of two is, of two engines or of two results.

Two engines are run in turns, `Against`; two results, `ComparisonReport`, were measured apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

from llmcli.measure.runs import CONFIDENCE, two_sided
from llmcli.records.document import APART, derived
from llmcli.records.engines import EngineName

Side = Literal["a", "b"]
Verdict = Literal["faster", "slower", "noise", "inconclusive", "unknown"]

USUAL_RUNS = 5  # llama-bench's own, taken where a file does not record the number
_STRONGEST = 0.8  # correlation of neighbours: of a stronger one a few runs tell nothing
_WIDEST = 600.0  # of a logarithm: its exponential is still a number


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Tokens per second of a test: mean and sample standard deviation (n − 1) of its runs.

    `runs` None: the file does not record the number. `correlation` is that of each run with
    the one before, None where there are fewer than three or the file does not list them.
    """

    mean: float
    std: float
    runs: int | None
    correlation: float | None = None

    @classmethod
    def of(cls, runs: Sequence[float]) -> Rate:
        """The statistics of these runs; of equal ones the correlation is unknown, too."""
        mean = fmean(runs)
        off = [run - mean for run in runs]
        whole = sum(one * one for one in off)
        known = len(runs) > 2 and whole != 0.0
        return cls(
            mean=mean,
            std=stdev(runs) if len(runs) > 1 else 0.0,
            runs=len(runs),
            correlation=sum(a * b for a, b in pairwise(off)) / whole if known else None,
        )

    @property
    def count(self) -> int:
        """Number of runs; llama-bench's default (5) if the file does not record it."""
        return USUAL_RUNS if self.runs is None else self.runs


def pool(rates: Sequence[Rate]) -> Rate:
    """All runs as one sample: what mean and deviation would be if they were counted together.

    Where one of them does not record its number of runs, the usual number is taken for it.
    """
    if len(rates) == 1:
        return rates[0]
    runs = sum(rate.count for rate in rates)
    mean = sum(rate.count * rate.mean for rate in rates) / runs
    within = sum((rate.count - 1) * rate.std**2 for rate in rates)
    between = sum(rate.count * (rate.mean - mean) ** 2 for rate in rates)
    known = [rate.correlation for rate in rates if rate.correlation is not None]
    return Rate(
        mean=mean,
        std=math.sqrt((within + between) / (runs - 1)),
        runs=runs,
        correlation=fmean(known) if len(known) == len(rates) else None,
    )


def interval(a: Rate, b: Rate, *, independent: bool = False) -> tuple[float, float] | None:
    """Where B ÷ A lies with 95 % confidence; None where one side cannot tell its spread.

    Welch's interval for the difference of the logarithms, their variances (σ ÷ mean)² ÷ runs.
    Unless the runs are taken as `independent`, wider by what their likeness to their neighbours
    hides, as on a machine that others use: the variance of a mean of an AR(1) process.
    """
    if any(rate.count < 2 or (rate.runs is None and not rate.std) for rate in (a, b)):
        return None
    parts = [_variance(rate, independent) for rate in (a, b)]
    variance = sum(part for part, _ in parts)
    ratio = b.mean / a.mean
    if variance == 0.0:
        return ratio, ratio
    freedom = 1.0 / sum((part / variance) ** 2 / degrees for part, degrees in parts)
    return _around(ratio, math.sqrt(variance), max(freedom, 1.0))


def _around(ratio: float, error: float, freedom: float) -> tuple[float, float]:
    wide = min(two_sided(CONFIDENCE, freedom) * error, _WIDEST)
    return ratio * math.exp(-wide), ratio * math.exp(wide)


def _variance(rate: Rate, independent: bool) -> tuple[float, float]:
    """Variance of the mean's logarithm, and its degrees of freedom.

    Runs that are not `independent` are AR(1) with a coefficient `like`: an estimate without its
    bias, and a standard error. A sample of n runs shows (1 + 4ρ) ÷ n too little of it (Kendall
    1954); where the order of the runs is not known it shows none.
    """
    runs, shown = rate.count, rate.correlation or 0.0
    like = shown + (1.0 + 4.0 * shown) / runs + 1.0 / math.sqrt(runs)
    like = 0.0 if independent else min(max(like, 0.0), _STRONGEST)
    # variance of the mean, as a multiple of that of independent runs; and what the runs'
    # deviation from their own mean shows of theirs from the true one
    rest = 1.0 - like
    grown = 1.0 + 2.0 * like / rest * (1.0 - (1.0 - like**runs) / (runs * rest))
    share = 1.0 - (grown - 1.0) / (runs - 1)
    freedom = (runs - 1) * (1.0 - like**2) / (1.0 + like**2)
    return (rate.std / rate.mean) ** 2 / runs * grown / share, freedom


@dataclass(frozen=True, kw_only=True)
class Against:
    """One test by two engines, run in turns: ours ÷ theirs in tokens per second, pairwise.

    `quartiles` are the first and the third of the ratios, `of_means` is the ratio of the mean
    rates that the rows have. `order` is that of the runs, `number` that of our row.
    """

    test: str
    peer: EngineName
    ratios: tuple[float, ...]
    median: float
    lowest: float
    highest: float
    order: tuple[EngineName, ...]
    number: int
    quartiles: tuple[float, float]
    of_means: float

    @derived
    def interval(self) -> tuple[float, float] | None:
        """Where the true ratio lies with 95 % confidence; None of a single pair.

        Student's interval for the mean of the logarithms.
        """
        if len(self.ratios) < 2:
            return None
        logs = [math.log(ratio) for ratio in self.ratios]
        error = stdev(logs) / math.sqrt(len(logs))
        return _around(math.exp(fmean(logs)), error, len(logs) - 1)

    @derived
    def undecided(self) -> bool:
        """Whether the runs leave open which engine is faster: 1 lies in the interval, if any."""
        low, high = self.interval or (1.0, 1.0)
        return bool(low <= 1 <= high)


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
    meanwhile, None where it does not record that.
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
        return cls(
            test=test,
            settings=settings,
            a=a,
            b=b,
            ratio=b.mean / a.mean,
            low=low,
            high=high,
            independent=interval(a, b, independent=True),
        )

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
