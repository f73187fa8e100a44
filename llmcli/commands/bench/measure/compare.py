"""Which tests of two results are the same, and whether B is faster than A or only luckier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from llmcli.commands.bench.measure.read import COMPARED
from llmcli.commands.bench.report.comparison import (
    ComparedTest,
    ComparisonReport,
    Difference,
    MissingSetting,
    Rate,
    Result,
    Side,
    Source,
    UnmatchedTest,
)
from llmcli.commands.bench.report.intervals import USUAL_RUNS, interval, pool
from llmcli.commands.bench.report.row import EngineInfo

# Known only when a model has been loaded, so that a row which failed may say anything there.
_LEARNED = {one.name for one in fields(EngineInfo)} - {"engine"}
_LEARNED |= {"type_v", "n_gpu_layers", "flash_attn"}

Key = tuple[str, tuple[str, ...]]  # a test's name, and the values of the fields that vary


def compare_results(a: Source, b: Source, *, slower_than: float | None = None) -> ComparisonReport:
    """B against A, test by test.

    A setting that takes several values on a side tells tests apart: its values have to be equal.
    One that is the same throughout each side does not, and is a `Difference` where the sides do
    not agree: two builds, two machines or two dtypes can be compared. Rows of a side that are the
    same test are pooled, run by run. `slower_than`: the share (0 … 1) that B may be slower.
    """
    varying = tuple(field for field in COMPARED if _varies(a, field) or _varies(b, field))
    one, two = _Tests.of("a", a.results, varying), _Tests.of("b", b.results, varying)
    ran = [*one.rates, *two.rates]
    naming = _Naming.of(varying, ran or [key for key, _ in (*one.failed, *two.failed)])
    tests = [
        _compared(key, naming, rate, two.rates[key])
        for key, rate in one.rates.items()
        if key in two.rates
    ]
    fixed = [field for field in COMPARED if field not in varying]
    differences, unsaid = _differences(a, b, fixed)
    return ComparisonReport(
        a=a,
        b=b,
        tests=tuple(tests),
        lone=tuple(_lone(one, two, naming)),
        differences=tuple(differences),
        unsaid=tuple(unsaid),
        assumed_runs=USUAL_RUNS,
        slower_than=slower_than,
    )


def _ran(rows: Sequence[Result]) -> Sequence[Result]:
    """Rows with a rate: they know their settings. All rows where there is none."""
    return [row for row in rows if row.rate] or rows


def _varies(side: Source, field: str) -> bool:
    return len({row.facts.get(field, "") for row in _ran(side.results)}) > 1


@dataclass(frozen=True, kw_only=True)
class _Tests:
    """One side: the rate of each test, and the rows that have none."""

    side: Side
    rates: Mapping[Key, Rate]
    failed: Sequence[tuple[Key, str | None]]

    @classmethod
    def of(cls, side: Side, rows: Iterable[Result], fields: Sequence[str]) -> _Tests:
        found: dict[Key, list[Rate]] = {}
        failed = []
        for row in rows:
            key = row.test, tuple(row.facts.get(field, "") for field in fields)
            if row.rate is None:
                failed.append((key, row.error))
            else:
                found.setdefault(key, []).append(row.rate)
        rates = {key: pool(several) for key, several in found.items()}
        return cls(side=side, rates=rates, failed=failed)


@dataclass(frozen=True, kw_only=True)
class _Naming:
    """The fields that vary, and the places of those that are shown."""

    fields: tuple[str, ...]
    shown: tuple[int, ...]

    @classmethod
    def of(cls, fields: tuple[str, ...], keys: Sequence[Key]) -> _Naming:
        """As few fields as tell the keys apart that all of them do.

        Two models differ in name, size and number of parameters; the name says which it is.
        """
        shown: tuple[int, ...] = ()
        known = 1
        for place in sorted(range(len(fields)), key=lambda place: fields[place] != "model_type"):
            more = (*shown, place)
            count = len({tuple(values[at] for at in more) for _, values in keys})
            if count > known:
                shown, known = more, count
        return cls(fields=fields, shown=tuple(sorted(shown)))

    def settings(self, key: Key) -> dict[str, str]:
        return {self.fields[place]: key[1][place] for place in self.shown}

    def sure(self, key: Key) -> Key:
        """What a row that failed knows of itself."""
        pairs = zip(self.fields, key[1], strict=True)
        return key[0], tuple(value for field, value in pairs if field not in _LEARNED)


def _compared(key: Key, naming: _Naming, a: Rate, b: Rate) -> ComparedTest:
    low, high = interval(a, b) or (None, None)
    independent = interval(a, b, independent=True)
    return ComparedTest(
        test=key[0],
        settings=naming.settings(key),
        a=a,
        b=b,
        ratio=b.mean / a.mean,
        low=low,
        high=high,
        independent=independent,
    )


def _lone(one: _Tests, two: _Tests, naming: _Naming) -> Iterator[UnmatchedTest]:
    """Tests that only one side has, then rows that did not run with what the other side says."""
    failed: list[UnmatchedTest] = []
    missed: set[tuple[Side, Key]] = set()
    for here, there in ((one, two), (two, one)):
        # what ran here as well is no counterpart of a row that failed here
        others = {naming.sure(key): key for key in there.rates if key not in here.rates}
        for key, error in here.failed:
            other = others.get(naming.sure(key))
            if other is not None:
                missed.add((there.side, other))
            failed.append(
                UnmatchedTest(
                    side=here.side,
                    test=key[0],
                    settings=naming.settings(key if other is None else other),
                    rate=None,
                    error=error,
                    other=None if other is None else there.rates[other],
                )
            )
    for here, there in ((one, two), (two, one)):
        for key, rate in here.rates.items():
            if key not in there.rates and (here.side, key) not in missed:
                settings = naming.settings(key)
                yield UnmatchedTest(side=here.side, test=key[0], settings=settings, rate=rate)
    yield from failed


def _differences(
    a: Source, b: Source, fields: Iterable[str]
) -> tuple[list[Difference], list[MissingSetting]]:
    """What is one value throughout each side: where they disagree, and what one does not say."""
    differences: list[Difference] = []
    unsaid: list[MissingSetting] = []
    for field in fields:
        one, two = (_ran(side.results)[0].facts.get(field) for side in (a, b))
        if one is not None and two is not None:
            if one != two:
                differences.append(Difference(field=field, a=one, b=two))
        elif one or two:
            unsaid.append(MissingSetting(side="b" if one else "a", field=field))
    return differences, unsaid
