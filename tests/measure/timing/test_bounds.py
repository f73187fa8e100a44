"""What a part waits for: by hand, at each of the ceilings."""

from dataclasses import replace

import pytest
from timed_models import CEILINGS

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.timing.measure.phase import Roof
from llmcli.commands.timing.report import PartTime
from llmcli.reports.work import PartWork

MEMORY, L3, L2 = 200 << 20, 8 << 20, 1 << 19


def roofed(
    work, seconds, *, working_set=MEMORY, calls=1, operations=1, host_s=None, dtype="float32",
    ceilings=CEILINGS,
):  # fmt: skip
    roof = Roof(
        ceilings=ceilings, numbers=Arithmetic.of(dtype), working_set=working_set,
        apart=host_s is not None,
    )  # fmt: skip
    return roof.bounded(PartTime(
        part="out", layer=None, seconds=seconds, host_s=host_s or seconds, calls=calls,
        operations=operations, work=work,
    ))  # fmt: skip


def bounded(work, seconds, **rest):
    part = roofed(work, seconds, **rest)
    assert (part.bound is None) == (part.nearest is None)
    assert part.bound in (part.nearest, "calls", "kernel")
    return part.bound, part.of_bound and pytest.approx(part.of_bound)


def test_streamed_weights_wait_for_memory():
    assert bounded(PartWork(weights=10**8, flops=10**8), 0.0125) == ("memory", 0.8)


def test_weights_that_stay_in_a_cache_are_judged_by_it():
    """100 MB in 2.5 ms: 400 % of the memory, 80 % of the L3 in which all of them lie."""
    work = PartWork(weights=10**8)
    assert bounded(work, 0.0025, working_set=L3) == ("L3", 0.8)
    assert bounded(work, 0.00125, working_set=L2) == ("L2", 0.8)


def test_keys_and_values_are_streamed_too():
    assert bounded(PartWork(cache=10**8), 0.0125) == ("memory", 0.8)


def test_products_of_many_rows_wait_for_arithmetic():
    assert bounded(PartWork(weights=10**6, flops=10**10), 0.125) == ("compute", 0.8)


def test_activations_come_from_the_cache_that_holds_those_of_one_part():
    work = PartWork(activations=10 * 10**6)
    assert bounded(work, 0.000125, calls=10) == ("L2", 0.8)  # 1 MB at a time
    assert bounded(work, 0.00025, calls=1) == ("L3", 0.8)  # 10 MB at once


def test_both_kinds_of_bytes_take_their_time_one_after_the_other():
    work = PartWork(weights=10**8, activations=10 * 10**6)
    assert bounded(work, 0.0102, calls=10) == ("memory", 0.0101 / 0.0102)


@pytest.mark.parametrize(
    ("work", "ceiling"),
    [
        (PartWork(weights=10**8), "memory"),  # 10 ms each
        (PartWork(flops=10**9), "compute"),
    ],
)
def test_from_half_of_a_ceiling_on_it_is_what_a_part_waits_for(work, ceiling):
    assert bounded(work, 0.0199) == (ceiling, 0.01 / 0.0199)
    assert bounded(work, 0.0201) == ("kernel", 0.01 / 0.0201)
    assert bounded(work, 0.0199, operations=10**6)[0] == ceiling


def test_below_it_is_calls_where_their_start_explains_half_of_the_rest():
    """10 ms of 30 are the least; 2 µs an operation."""
    work = PartWork(weights=10**8)
    assert bounded(work, 0.03, operations=5001) == ("calls", 1 / 3)
    assert bounded(work, 0.03, operations=4999) == ("kernel", 1 / 3)


def test_a_tenth_of_a_ceiling_is_not_bound_by_it():
    """A product that is computed badly: little of it is its start."""
    part = roofed(PartWork(flops=10**10), 1.0, operations=100)
    assert (part.bound, part.nearest, part.of_bound) == ("kernel", "compute", 0.1)


def test_without_a_measured_start_nothing_is_said_to_be_one():
    ceilings = replace(CEILINGS, start_s=0.0)
    assert roofed(PartWork(weights=10), 0.1, operations=10**6, ceilings=ceilings).bound == "kernel"


def test_a_gpu_that_waits_for_the_host_waits_for_calls():
    work = PartWork(weights=10**8)
    assert bounded(work, 0.0125, host_s=0.012)[0] == "calls"
    assert bounded(work, 0.0125, host_s=0.001) == ("memory", 0.8)


def test_without_counted_work_there_is_no_bound():
    assert bounded(PartWork(), 1.0) == (None, None)


def test_an_arithmetic_that_was_not_measured_has_no_ceiling():
    assert bounded(PartWork(weights=10**8, flops=10**12), 0.0125, dtype="float64") == (
        "memory", 0.8,
    )  # fmt: skip
