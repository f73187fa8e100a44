"""The lower bound of the time of some work: by hand, and of parts one after the other."""

import gc

import pytest

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.observe.quiet import quiet
from llmcli.observe.roofline import lower_bound_seconds, time_lower_bound
from llmcli.reports.ceilings import Ceilings, MatrixRate, ReadRate
from llmcli.reports.work import PartWork

FLOAT32 = Arithmetic.of("float32")
FLOAT64 = Arithmetic.of("float64")

CEILINGS = Ceilings(
    device="cpu",
    threads=1,
    reads=(
        ReadRate(nbytes=1 << 20, bytes_per_s=100e9, level="L2"),
        ReadRate(nbytes=1 << 28, bytes_per_s=10e9, level="memory"),
    ),
    matrices=(MatrixRate(dtype="float32", flops_per_s=1e11),),
    caches=(("L2", 1 << 20),),
    seconds=0.0,
)
MEMORY, CACHED = 200 << 20, 1000


def of(work, calls=1, working_set=MEMORY):
    found = time_lower_bound(work, calls, CEILINGS, numbers=FLOAT32, working_set=working_set)
    return found.nearest, pytest.approx(found.seconds)


def test_weights_and_cache_come_from_where_all_of_a_step_fits():
    assert of(PartWork(weights=4 * 10**8, cache=10**8)) == ("memory", 0.05)
    assert of(PartWork(weights=10**6), working_set=CACHED) == ("L2", 1e-5)


def test_activations_come_from_where_those_of_one_call_fit():
    assert of(PartWork(activations=10**7), calls=10) == ("L2", 1e-4)
    assert of(PartWork(activations=10**7), calls=1) == ("memory", 1e-3)
    assert of(PartWork(weights=10**7, activations=10**6)) == ("memory", 1e-3 + 1e-5)


def test_products_take_as_long_as_they_do_while_bytes_arrive():
    assert of(PartWork(weights=10**7, flops=10**9)) == ("compute", 1e-2)


def test_parts_come_one_after_the_other():
    works = (
        ("qkv", 0, PartWork(weights=10**8)),
        ("qkv", 1, PartWork(flops=10**10)),
        ("norm", None, PartWork(activations=10**7)),
    )
    found = lower_bound_seconds(works, 10, CEILINGS, numbers=FLOAT32, working_set=MEMORY)
    assert found == pytest.approx(0.01 + 0.1 + 1e-4)


def test_without_the_rate_of_products_there_is_no_lower_bound():
    assert lower_bound_seconds((), 1, CEILINGS, numbers=FLOAT64, working_set=MEMORY) is None


def test_the_collector_is_off_within_and_as_it_was_afterwards():
    assert gc.isenabled()
    with quiet(), quiet():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), quiet():
            1 / 0  # noqa: B018
        assert not gc.isenabled()
    finally:
        gc.enable()
