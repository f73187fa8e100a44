"""Ratios of runs in turns."""

import pytest

from llmcli.commands.timing.measure.phase import overhead
from llmcli.observe.ratios import paired


def test_order_statistics_are_those_of_the_pairs_not_of_the_sides():
    found = paired([10, 30, 50, 80, 5], [10, 10, 10, 10, 10])
    assert found.values == (1, 3, 5, 8, 0.5)
    assert (found.lowest, found.median, found.highest) == (0.5, 3, 8)
    assert found.quartiles == (1, 5)
    swapped = paired([20, 10], [10, 20])  # the same on both sides, if pairs are left out of account
    assert swapped.values == (2, 0.5)
    assert swapped.quartiles == (0.875, 1.625)


def test_one_pair_is_its_own_quartiles():
    assert paired([3], [2]).quartiles == (1.5, 1.5)


def test_what_is_no_pair_is_refused():
    with pytest.raises(ValueError, match="argument 2"):
        paired([1, 2], [1])
    with pytest.raises(ValueError, match="no pairs"):
        paired([], [])


def test_timing_has_the_same_rule():
    watched, bare = [1.1, 1.0, 1.3], [1.0, 1.0, 1.0]
    looked = overhead(watched, bare)
    assert looked.ratios == paired(watched, bare).values
    assert looked.quartiles == paired(watched, bare).quartiles
