"""The faults of the measure of trust are still where the source is."""

import ast

import pytest
from trust import ROOT, faults, kept


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_is_at_its_place(fault):
    planted = fault.planted((ROOT / fault.file).read_text("utf-8"))
    if fault.file.endswith(".py"):
        ast.parse(planted)
    named = [path for stage in fault.stages for path in stage]
    assert all((ROOT / path).exists() for path in named)
    assert len(named) == len({*named})


def test_names_are_unique_and_every_row_is_of_a_fault():
    names = [fault.name for fault in faults()]
    assert len(set(names)) == len(names)
    assert set(kept()) <= set(names)


def test_the_test_that_saw_a_fault_is_still_there():
    """By its file and function, for parameters come and go: run a fault again that lost it."""
    gone = []
    for name, row in kept().items():
        path, _, test = row.test.partition("::")
        definition = f"def {test.partition('[')[0]}("
        if test and not ((ROOT / path).exists() and definition in (ROOT / path).read_text("utf-8")):
            gone.append(name)
    assert gone == []
