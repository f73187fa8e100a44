"""Which tests of two results are the same, and whether B is faster than A or only luckier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

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

_OTHER: Mapping[Side, Side] = {"a": "b", "b": "a"}

Key = tuple[str, tuple[str, ...]]  # a test's name, and the values of the fields that vary
Failed = tuple[Side, Key, str | None]  # a row without a rate: its side, and why there is none


def compare_results(a: Source, b: Source, *, slower_than: float | None = None) -> ComparisonReport:
    """B against A, test by test.

    A setting that takes several values on a side tells tests apart: its values have to be equal.
    One that is the same throughout each side does not, and is a `Difference` where the sides do
    not agree: two builds, two machines or two dtypes can be compared. Rows of a side that are the
    same test are pooled, run by run. `slower_than`: the share (0 … 1) that B may be slower.
    """
    varying = tuple(field for field in COMPARED if _varies(a, field) or _varies(b, field))
    rates: dict[Side, dict[Key, Rate]] = {}
    failed: list[Failed] = []
    sides: Mapping[Side, Source] = {"a": a, "b": b}
    for side, source in sides.items():
        repeated: dict[Key, list[Rate]] = {}
        for row in source.results:
            key = row.test, tuple(row.facts.get(field, "") for field in varying)
            if row.rate is None:
                failed.append((side, key, row.error))
            else:
                repeated.setdefault(key, []).append(row.rate)
        rates[side] = {key: pool(several) for key, several in repeated.items()}
    ran = [*rates["a"], *rates["b"]]
    shown = _shown(varying, ran or [key for _, key, _ in failed])

    def settings(key: Key) -> dict[str, str]:
        return {varying[place]: key[1][place] for place in shown}

    tests = []
    for key, rate in rates["a"].items():
        if (other := rates["b"].get(key)) is not None:
            low, high = interval(rate, other) or (None, None)
            independent = interval(rate, other, independent=True)
            tests.append(
                ComparedTest(
                    test=key[0],
                    settings=settings(key),
                    a=rate,
                    b=other,
                    ratio=other.mean / rate.mean,
                    low=low,
                    high=high,
                    independent=independent,
                )
            )
    differences, unsaid = _differences(a, b, [one for one in COMPARED if one not in varying])
    return ComparisonReport(
        a=a,
        b=b,
        tests=tuple(tests),
        lone=tuple(_unmatched(rates, failed, varying, settings)),
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


def _shown(fields: Sequence[str], keys: Sequence[Key]) -> Sequence[int]:
    """Places of as few fields as tell the keys apart that all of them do.

    Two models differ in name, size and number of parameters; the name says which it is.
    """
    shown: tuple[int, ...] = ()
    known = 1
    for place in sorted(range(len(fields)), key=lambda place: fields[place] != "model_type"):
        more = (*shown, place)
        count = len({tuple(values[at] for at in more) for _, values in keys})
        if count > known:
            shown, known = more, count
    return sorted(shown)


def _unmatched(
    rates: Mapping[Side, Mapping[Key, Rate]],
    failed: Sequence[Failed],
    varying: Sequence[str],
    settings: Callable[[Key], dict[str, str]],
) -> Iterator[UnmatchedTest]:
    """Tests that only one side has, then rows that did not run with what the other side says."""
    sure = [place for place, field in enumerate(varying) if field not in _LEARNED]

    def known(key: Key) -> Key:
        """What a row that failed knows of itself."""
        return key[0], tuple(key[1][place] for place in sure)

    # what ran on this side as well is no counterpart of a row that failed on it
    others = {
        side: {known(key): key for key in rates[_OTHER[side]] if key not in ran}
        for side, ran in rates.items()
    }
    counterparts = [others[side].get(known(key)) for side, key, _ in failed]
    missed = {(_OTHER[row[0]], other) for row, other in zip(failed, counterparts, strict=True)}
    for side, ran in rates.items():
        for key, rate in ran.items():
            if key not in rates[_OTHER[side]] and (side, key) not in missed:
                yield UnmatchedTest(side=side, test=key[0], settings=settings(key), rate=rate)
    for (side, key, error), other in zip(failed, counterparts, strict=True):
        yield UnmatchedTest(
            side=side,
            test=key[0],
            settings=settings(other or key),
            rate=None,
            error=error,
            other=None if other is None else rates[_OTHER[side]][other],
        )


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
