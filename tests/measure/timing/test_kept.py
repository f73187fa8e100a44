"""Runs in turns: how many are enough, which is kept, and the ratios of pairs."""

import math
from array import array
from random import Random
from statistics import median_low

import pytest

from llmcli.commands.timing.measure.clock import MOST, Kept, Marks, Run
from llmcli.commands.timing.report import Overhead
from llmcli.measure.runs import FEWEST, TIGHT, StoppingRule, are_tight, in_turns, paired, spread_of


def pairs_run(until, bare, watched, *, at_most=10_000):
    """How many pairs are run whose times the two functions give, and when the last one ends."""
    now, bare_s, watched_s = until.begin, [], []
    while not until.over(watched_s, bare_s, now):
        bare_s.append(bare(len(bare_s)))
        watched_s.append(watched(len(watched_s)))
        now += bare_s[-1] + watched_s[-1]
        assert len(bare_s) < at_most
    return len(bare_s), now


def noisy(share, seed=0):
    dice = Random(seed)
    return lambda number: 0.01 * dice.gauss(1.0, share)


def slow_at_first(number):
    return 1.0 if number == 0 else 0.1


@pytest.mark.parametrize(("bare", "watched", "least", "most"), [
    # runs that are alike end soon, and a slow first one is no reason to go on to the end
    (lambda n: 0.1, lambda n: 0.101, FEWEST, FEWEST),
    (noisy(0.005), noisy(0.005), 1, 2 * FEWEST),
    (slow_at_first, lambda n: 0.1, 1, FEWEST + 3),
    # runs that scatter end when the time is up
    (noisy(0.2), noisy(0.2, 1), 21, 10_000),
    (noisy(0.5), noisy(0.5, 1), 21, 10_000),
    # a pair that would end too late is not begun
    (lambda n: 20.0, lambda n: 20.0, 1, 1), (lambda n: 4.0, lambda n: 4.0, 1, 1),
    (lambda n: 2.0, lambda n: 2.0, 2, 2), (lambda n: 1.6, lambda n: 1.6, 3, 3),
])  # fmt: skip
def test_how_many_pairs_are_run(bare, watched, least, most):
    number, now = pairs_run(StoppingRule(pairs=None, begin=5.0, end=15.0), bare, watched)
    assert least <= number <= most
    if number > 1:  # but for how much longer the last one took than the one before
        assert now <= 15.0 + 0.05


def test_pairs_that_were_requested_are_run_however_long_they_take():
    for number in (1, 3, 40):
        until = StoppingRule(pairs=number, end=10.0)
        assert pairs_run(until, lambda n: 0.1, lambda n: 100.0)[0] == number


def test_how_far_it_is():
    assert [StoppingRule(pairs=4).done(pairs, 9.0) for pairs in (0, 4)] == [(1, 5), (5, 5)]
    until = StoppingRule(pairs=None, begin=5.0, end=15.0)
    shares = [until.done(3, now) for now in (5.0, 10.0, 99.0)]
    assert shares == [(0, 1000), (500, 1000), (1000, 1000)]


def test_the_spread_is_that_of_the_quartiles():
    alike = [1.0] * 5
    assert spread_of(alike, alike) == 0.0
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0], alike) == pytest.approx(2 / 3)
    assert spread_of([1.0], [1.0]) == math.inf
    both = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert spread_of(both, both) == pytest.approx(2 / 3), "of the times, though the ratios agree"
    assert not are_tight(alike[:4], alike[:4])
    assert are_tight(alike, alike)
    edge = [1.0, 1.0, 1.0, 1.0 + 0.99 * TIGHT, 1.5]
    assert are_tight(edge, alike)
    assert not are_tight([*edge[:3], 1.001 + TIGHT, 1.5], alike)


def run(wall_s):
    """Whose only mark says which one it is."""
    return Run(
        wall_s=wall_s,
        marks=Marks(names=("end",), seconds=array("d", [wall_s]), host_s=array("d", [wall_s])),
    )


@pytest.mark.parametrize("runs", [1, 2, 3, 10, 11, 100])
@pytest.mark.parametrize("order", ["mixed", "rising", "falling", "alike"])
def test_the_median_run_is_the_one_that_is_kept(runs, order):
    dice = Random(runs)
    walls = [dice.random() for _ in range(runs)]
    walls = {"mixed": walls, "rising": sorted(walls), "falling": sorted(walls)[::-1],
             "alike": [1.0] * runs}[order]  # fmt: skip
    kept = Kept()
    for done, wall in enumerate(walls, 1):
        kept.add(run(wall))
        assert kept.median.wall_s == median_low(walls[:done])  # of an interrupted run, too
    assert kept.median.wall_s == median_low(walls) == kept.median.marks.seconds[0]


@pytest.mark.parametrize("order", ["mixed", "rising", "falling"])
def test_of_thousands_few_are_kept_and_one_of_them_is_near_the_median(order):
    runs = 3_000
    walls = [float(wall) for wall in range(runs)]
    if order == "mixed":
        Random(0).shuffle(walls)
    elif order == "falling":
        walls.reverse()
    kept = Kept()
    for wall in walls:
        kept.add(run(wall))
        assert len(kept) <= MOST
    assert abs(kept.median.wall_s - median_low(walls)) < 0.02 * runs


def test_order_statistics_are_those_of_the_pairs_not_of_the_sides():
    found = paired([10, 30, 50, 80, 5], [10, 10, 10, 10, 10])
    assert found.ratios == (1, 3, 5, 8, 0.5)
    assert (found.lowest, found.median, found.highest) == (0.5, 3, 8)
    assert found.quartiles == (1, 5)
    swapped = paired([20, 10], [10, 20])  # the same on both sides, if pairs are left out of account
    assert swapped.ratios == (2, 0.5)
    assert swapped.quartiles == (0.875, 1.625)
    assert paired([3], [2]).quartiles == (1.5, 1.5)
    with pytest.raises(ValueError, match="argument 2"):
        paired([1, 2], [1])
    with pytest.raises(ValueError, match="no pairs"):
        paired([], [])


def test_the_overhead_is_within_noise_where_half_of_the_pairs_straddle_1():
    cost = Overhead.of((1.0, 1.1, 1.2, 1.3, 1.4), (1.0,) * 5)
    assert (cost.lowest, cost.median, cost.highest) == (1.0, 1.2, 1.4)
    assert cost.quartiles == pytest.approx((1.1, 1.3))
    assert not cost.within_noise
    assert Overhead.of((0.9, 0.95, 1.0, 1.3, 1.4), cost.bare_s).within_noise


def test_each_side_runs_first_in_turn():
    ran = []
    sides = [lambda name=name: ran.append(name) or name for name in "abc"]
    turns = in_turns(*sides)
    assert [next(turns) for _ in range(3)] == [["a", "b", "c"]] * 3
    assert "".join(ran) == "abcbcacab"
