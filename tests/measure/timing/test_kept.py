"""Of many runs the median one is found, with the marks of few of them in hand."""

from array import array
from random import Random
from statistics import median_low

import pytest

from llmcli.commands.timing.measure.clock import Marks
from llmcli.commands.timing.measure.run import MOST, InstrumentedRun, Kept


def run(wall_s):
    """Whose only mark says which one it is."""
    return InstrumentedRun(
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
    runs = 10_000
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
