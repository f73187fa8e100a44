"""Which tests of two results are the same, and whether B is faster than A or only luckier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from llmcli.commands.bench.measure.read import COMPARED
from llmcli.commands.bench.report.comparison import (
    ComparedTest,
    ComparisonReport,
    Difference,
    MissingSetting,
    Result,
    Side,
    Source,
    UnmatchedTest,
)
from llmcli.commands.bench.report.intervals import USUAL_RUNS, Rate, pool
from llmcli.commands.bench.report.row import EngineInfo

# Known only when a model has been loaded, so that a row which failed may say anything there.
_LEARNED = {one.name for one in fields(EngineInfo)} - {"engine"}
_LEARNED |= {"type_v", "n_gpu_layers", "flash_attn"}

_OTHER: Mapping[Side, Side] = {"a": "b", "b": "a"}

Key = tuple[str, tuple[str, ...]]  # a test's name, and the values of the fields that vary


def compare_results(a: Source, b: Source, *, slower_than: float | None = None) -> ComparisonReport:
    """B against A, test by test.

    A setting that takes several values on a side tells tests apart: its values have to be equal.
    One that is the same throughout each side does not, and is a `Difference` where the sides do
    not agree: two builds, two machines or two dtypes can be compared. Rows of a side that are the
    same test are pooled, run by run. `slower_than`: the share (0 … 1) that B may be slower.
    """
    # rows with a rate know their settings; all rows where there is none
    known = [[row for row in side.results if row.rate] or side.results for side in (a, b)]
    varying, differences, unsaid = [], [], []
    for field in COMPARED:
        if any(len({row.facts.get(field, "") for row in rows}) > 1 for rows in known):
            varying.append(field)
            continue
        one, two = (rows[0].facts.get(field) for rows in known)
        if one is not None and two is not None:
            differences += [Difference(field=field, a=one, b=two)] if one != two else []
        elif one or two:
            unsaid.append(MissingSetting(side="b" if one else "a", field=field))
    return ComparisonReport(
        a=a,
        b=b,
        **_matched({"a": a.results, "b": b.results}, varying),
        differences=tuple(differences),
        unsaid=tuple(unsaid),
        assumed_runs=USUAL_RUNS,
        slower_than=slower_than,
    )


def _matched(
    sides: Mapping[Side, Sequence[Result]], varying: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """`tests` of both sides, and `lone`: those of one, then rows that did not run."""
    rates: dict[Side, dict[Key, Rate]] = {}
    failed: list[tuple[Side, Key, str | None]] = []  # and why there is no rate
    for side, results in sides.items():
        repeated: dict[Key, list[Rate]] = {}
        for row in results:
            key = row.test, tuple(row.facts.get(field, "") for field in varying)
            if row.rate is None:
                failed.append((side, key, row.error))
            else:
                repeated.setdefault(key, []).append(row.rate)
        rates[side] = {key: pool(several) for key, several in repeated.items()}
    shown = _shown(varying, [*rates["a"], *rates["b"]] or [key for _, key, _ in failed])
    sure = [place for place, field in enumerate(varying) if field not in _LEARNED]

    def settings(key: Key) -> dict[str, str]:
        return {varying[place]: key[1][place] for place in shown}

    def certain(key: Key) -> Key:
        """What a row that failed knows of itself."""
        return key[0], tuple(key[1][place] for place in sure)

    # what ran on both sides is no counterpart of a row that failed
    alone = {
        side: {key: rate for key, rate in ran.items() if key not in rates[_OTHER[side]]}
        for side, ran in rates.items()
    }
    counterparts = {side: {certain(key): key for key in ran} for side, ran in alone.items()}
    matched, missed = [], set()
    for side, key, error in failed:
        other = _OTHER[side]
        there = counterparts[other].get(certain(key))
        missed.add((other, there))
        matched.append(
            UnmatchedTest(
                side=side,
                test=key[0],
                settings=settings(there or key),
                rate=None,
                error=error,
                other=None if there is None else rates[other][there],
            )
        )
    lone = [
        UnmatchedTest(side=side, test=key[0], settings=settings(key), rate=rate)
        for side, ran in alone.items()
        for key, rate in ran.items()
        if (side, key) not in missed
    ]
    tests = [
        ComparedTest.of(key[0], settings(key), rate, rates["b"][key])
        for key, rate in rates["a"].items()
        if key in rates["b"]
    ]
    return {"tests": tuple(tests), "lone": (*lone, *matched)}


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
