"""`bench compare`: files of results, how two rates are pooled, and how sure their ratio is.

Which tests are the same is in transcripts/bench-compare-rows.txt, what is read of every format in
bench-compare-files.txt, more files that are none there and in bench-compare-refused.txt.
"""

import json
import math
import random
import sqlite3
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest

from llmcli.commands.bench.measure.compare import COMPARED, compare_results, read_results
from llmcli.commands.bench.report.comparison import (
    Against,
    Rate,
    Result,
    Source,
    interval,
    pool,
    two_sided,
)
from llmcli.errors import UsageError
from llmcli.measure.runs import paired


def rate(mean: float, std: float = 1.0, runs: int | None = 5) -> Rate:
    return Rate(mean=mean, std=std, runs=runs)


def side(of: Rate) -> Source:
    """The result of a single test."""
    row = Result(test="pp8", facts={"model_type": "m"}, rate=of)
    return Source(name="x", format="JSON", builds=(), rows=1, results=(row,))


# Student's t and Welch's interval


@pytest.mark.parametrize(("confidence", "freedom", "t"), [  # of any table of the distribution
    (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 4, 2.776), (0.95, 8, 2.306),
    (0.95, 30, 2.042), (0.95, 120, 1.980), (0.95, 1e9, 1.960), (0.99, 5, 4.032),
    (0.90, 10, 1.812), (0.50, 3, 0.765),
])  # fmt: skip
def test_students_t(confidence: float, freedom: float, t: float) -> None:
    assert two_sided(confidence, freedom) == pytest.approx(t, abs=5e-4)


def test_one_and_two_degrees_have_a_formula() -> None:
    for confidence in (0.5, 0.9, 0.99, 0.9999):
        assert two_sided(confidence, 1) == pytest.approx(math.tan(math.pi * confidence / 2))
        square = confidence**2
        assert two_sided(confidence, 2) == pytest.approx(math.sqrt(2 * square / (1 - square)))


def test_an_interval_by_hand() -> None:
    # equal relative variances of 1 % at n = 5: 8 degrees of freedom, t = 2.306
    low, high = interval(rate(100, 1), rate(110, 1.1), independent=True) or (0, 0)
    wide = 2.3060 * math.sqrt(2 * 0.01**2 / 5)
    assert (low, high) == pytest.approx((1.1 * math.exp(-wide), 1.1 * math.exp(wide)), rel=1e-6)
    # one side without spread: the other's 4 degrees alone, t = 2.776
    low, high = interval(rate(100, 0), rate(100, 2), independent=True) or (0, 0)
    assert math.log(high) == pytest.approx(2.7764 * 0.02 / math.sqrt(5), rel=1e-4)
    assert low * high == pytest.approx(1)
    # runs that show 1/16 of it: AR(1) of 1/16 + (1 + 1/4) / 16 + 1/4 = 0.390625
    low, high = interval(*[replace(rate(100, 1, 16), correlation=1 / 16)] * 2) or (0, 0)
    grown = 1 + 2 * sum((1 - k / 16) * 0.390625**k for k in range(1, 16))
    error = math.sqrt(2 * 0.01**2 / 16 * grown / (1 - (grown - 1) / 15))
    freedom = 2 * 15 * (1 - 0.390625**2) / (1 + 0.390625**2)
    assert math.log(high) == pytest.approx(two_sided(0.95, freedom) * error)
    assert low * high == pytest.approx(1)


def simulated(draw: random.Random, mean: float, runs: int, likeness: float) -> Rate:
    """Runs of an AR(1) process around the mean, with a deviation of 3 % of it."""
    off = [draw.gauss(0, 1)]
    while len(off) < runs:
        off.append(likeness * off[-1] + math.sqrt(1 - likeness**2) * draw.gauss(0, 1))
    return Rate.of([mean * (1 + 0.03 * one) for one in off])


@pytest.mark.parametrize(("runs", "likeness", "held", "held_if_independent"), [
    ((4, 9), 0.0, 0.985, 0.95), ((5, 5), 0.7, 0.945, 0.61), ((20, 20), 0.7, 0.98, 0.58),
])
def test_an_interval_holds_the_true_ratio_whether_or_not_runs_are_alike(
    runs: tuple[int, int], likeness: float, held: float, held_if_independent: float
) -> None:
    draw = random.Random(0)
    count = [0, 0]
    for _ in range(500):
        sides = [
            simulated(draw, mean, n, likeness) for mean, n in zip((100, 120), runs, strict=True)
        ]
        for place, independent in enumerate((False, True)):
            low, high = interval(*sides, independent=independent) or (math.inf, 0)
            count[place] += low <= 1.2 <= high
    found = [one / 500 for one in count]
    assert found == pytest.approx([held, held_if_independent], abs=0.03)


@pytest.mark.parametrize("pairs", [1, 2, 5, 9])
def test_equal_engines_are_called_faster_or_slower_in_5_percent_of_cases(pairs: int) -> None:
    draw = random.Random(1)
    decided = 0
    for _ in range(1000):
        ratios = tuple(
            (1 + 0.03 * draw.gauss(0, 1)) / (1 + 0.03 * draw.gauss(0, 1)) for _ in range(pairs)
        )
        pair = Against(test="pp1", peer="transformers", number=1, of_means=1.0, order=(),
                       **vars(paired(ratios, [1.0] * pairs)))  # fmt: skip
        decided += not pair.undecided
    assert decided / 1000 == pytest.approx(0.05 if pairs > 1 else 0.0, abs=0.015)


def test_what_only_independent_runs_would_show_is_inconclusive() -> None:
    a = Rate.of([100.0, 100.5, 101.2, 101.9, 102.4, 103.1])
    assert a.correlation == pytest.approx(0.51, abs=0.01)
    for mean, verdict in ((1.0, "noise"), (0.98, "inconclusive"), (1.3, "faster")):
        other = replace(a, mean=a.mean * mean, std=a.std * mean)
        (test,) = compare_results(side(a), side(other)).tests
        assert test.verdict == verdict
    assert Rate.of([1.0, 2.0]).correlation is None
    assert Rate.of([2.0] * 5).correlation is None


def test_a_spread_that_nobody_knows() -> None:
    assert interval(rate(1, 0, 1), rate(1)) is None
    assert interval(rate(1), rate(1, 0, 1)) is None
    assert interval(rate(1, 0, None), rate(1)) is None, "one run, or five that were equal"
    assert interval(rate(2, 0.5, None), rate(2, 0.5, 5)) == interval(rate(2, 0.5), rate(2, 0.5))
    assert interval(rate(1, 0), rate(2, 0)) == (2, 2)


@pytest.mark.parametrize("mean", [1e-9, 1.0, 1e15])
@pytest.mark.parametrize("std", [0.0, 5e-324, 1e-200, 1e15])
def test_no_numbers_that_a_file_may_have_break_it(mean: float, std: float) -> None:
    for other in (rate(1e-9, 1e15, 2), rate(1e15, 1e-200), rate(1.0)):
        low, high = interval(rate(mean, std), other) or (0, 0)
        assert 0 <= low <= other.mean / mean <= high


def test_pooling_is_what_all_runs_together_give() -> None:
    parts = [[10.0, 11, 12], [20.0, 21], [5.0]]
    whole = [run for runs in parts for run in runs]
    pooled = pool([Rate.of(runs) for runs in parts])
    assert pooled.runs == 6
    assert (pooled.mean, pooled.std) == pytest.approx((fmean(whole), stdev(whole)))
    assert pool([rate(1, 2, None)]).runs is None
    assert pool([rate(1, 2, None), rate(1, 2, 3)]).runs == 8


# the bound


@pytest.mark.parametrize(("mean", "bound", "ok"), [
    (95, 0.05, True), (94.9, 0.05, False), (100, 0.0, True), (99.9, 0.0, False), (1, None, True),
])
def test_a_bound_holds_at_its_own_value(mean: float, bound: float | None, ok: bool) -> None:
    report = compare_results(side(rate(100)), side(rate(mean)), slower_than=bound)
    assert report.ok is ok
    assert bool(report.too_slow) is not ok


# files in each of llama-bench's formats

DATA = Path(__file__).parents[2] / "data" / "llama_bench"
FORMATS = ("json", "jsonl", "csv")


with sqlite3.connect(":memory:") as BASE:
    BASE.executescript((DATA / "results.sql").read_text())
# what `-o sql` writes, a dump of it, and the database made from it: nothing of it runs
SQL = {
    "as written": (DATA / "results.sql").read_bytes(), "a database": BASE.serialize(),
    "a dump": "\n".join(BASE.iterdump()).encode(),
}  # fmt: skip
NONE = {f"SQL, {name}, up to {cut}": (data[:cut], "`x` is SQL, which `bench compare` does not read")
        for name, data in SQL.items() for cut in (None, 40)}  # fmt: skip
NONE |= {
    "a picture": (b"\x89PNG\r\n\x1a\n\x00", "is no text (byte 0)"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "digits": (b'[{"n_prompt": ' + b"1" * 9000 + b"}]", "is not JSON: it has a number of"),
}


@pytest.mark.parametrize(("data", "words"), NONE.values(), ids=NONE)
def test_what_is_no_result_is_one_line(data: bytes, words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_results(data, "x")
    assert words in error.value.message
    assert "\n" not in error.value.message
    assert error.value.hint
    assert ("`-o json`" in error.value.hint) is ("SQL" in words), "the way out"
    assert len(error.value.message) < 200


@pytest.mark.parametrize("kind", FORMATS)
def test_no_cut_makes_a_traceback(kind: str) -> None:
    data = (DATA / f"results.{kind}").read_bytes()
    whole = read_results(data, "x").rows
    for end in range(0, len(data), 37):
        with suppress(UsageError):
            assert read_results(data[:end], "x").rows <= whole


def test_settings_hold_every_field_of_llama_bench_that_is_one() -> None:
    measured = {"build_commit", "build_number", "n_prompt", "n_gen", "n_depth", "test_time"}
    measured |= {"avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts"}
    (first, *_) = json.loads((DATA / "results.json").read_text())
    assert set(first) - measured <= set(COMPARED)
