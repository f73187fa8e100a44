"""What a part waits for: by hand, at each of the ceilings."""

import pytest
from timed_models import CEILINGS

from llmcli.measure.timing.bounds import Roof
from llmcli.reports.timing import PartTime
from llmcli.reports.work import PartWork

MEMORY, L3, L2 = 200 << 20, 8 << 20, 1 << 19


def bounded(work, seconds, *, working_set=MEMORY, calls=1, host_s=None, dtype="float32"):
    roof = Roof(ceilings=CEILINGS, dtype=dtype, working_set=working_set, apart=host_s is not None)
    part = roof.bounded(PartTime(
        part="out", layer=None, seconds=seconds, host_s=host_s or seconds, calls=calls, work=work,
    ))  # fmt: skip
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


def test_what_takes_little_and_has_less_to_do_waits_for_calls():
    work = PartWork(weights=10**5, activations=100)
    assert bounded(work, 40e-6) == ("calls", (10e-6 + 1e-9) / 40e-6)
    assert bounded(work, 15e-6)[0] == "memory"  # it is near enough to the ceiling


def test_where_nothing_is_to_be_done_it_is_calls_on_a_busy_machine_too():
    assert bounded(PartWork(activations=10**5), 0.001) == ("calls", 0.001)  # 1 µs
    assert bounded(PartWork(activations=10**6), 0.001) == ("L2", 0.01)


def test_what_takes_long_keeps_its_ceiling_however_far_it_is():
    assert bounded(PartWork(weights=10**6), 0.01) == ("memory", 0.01)
    assert bounded(PartWork(flops=10**7), 0.01) == ("compute", 0.01)


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
