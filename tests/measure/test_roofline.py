"""The lower bound of the time of some work: by hand, and of parts one after the other."""

import gc

import pytest

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.observe.quiet import quiet
from llmcli.observe.roofline import lower_bound_seconds, time_lower_bound
from llmcli.reports.ceilings import Ceilings, MatrixRate, ReadRate
from llmcli.reports.work import PartWork

FLOAT32, FLOAT64 = Arithmetic.of("float32"), Arithmetic.of("float64")
CEILINGS = Ceilings(
    device="cpu", threads=1, seconds=0.0, caches=(("L2", 1 << 20),),
    reads=(
        ReadRate(nbytes=1 << 20, bytes_per_s=100e9, level="L2"),
        ReadRate(nbytes=1 << 28, bytes_per_s=10e9, level="memory"),
    ),
    matrices=(MatrixRate(dtype="float32", flops_per_s=1e11),),
)  # fmt: skip
MEMORY, CACHED = 200 << 20, 1000


@pytest.mark.parametrize(
    ("work", "calls", "working_set", "nearest", "seconds"),
    [
        # weights and cache come from where all of a step fits
        (PartWork(weights=4 * 10**8, cache=10**8), 1, MEMORY, "memory", 0.05),
        (PartWork(weights=10**6), 1, CACHED, "L2", 1e-5),
        # activations come from where those of one call fit
        (PartWork(activations=10**7), 10, MEMORY, "L2", 1e-4),
        (PartWork(activations=10**7), 1, MEMORY, "memory", 1e-3),
        (PartWork(weights=10**7, activations=10**6), 1, MEMORY, "memory", 1e-3 + 1e-5),
        # products take as long as they do while bytes arrive
        (PartWork(weights=10**7, flops=10**9), 1, MEMORY, "compute", 1e-2),
    ],
)
def test_where_a_part_reads_and_how_long_it_takes(work, calls, working_set, nearest, seconds):
    found = time_lower_bound(work, calls, CEILINGS, numbers=FLOAT32, working_set=working_set)
    assert (found.nearest, found.seconds) == (nearest, pytest.approx(seconds))


def test_parts_come_one_after_the_other():
    works = (
        ("qkv", 0, PartWork(weights=10**8)), ("qkv", 1, PartWork(flops=10**10)),
        ("norm", None, PartWork(activations=10**7)),
    )  # fmt: skip
    found = lower_bound_seconds(works, 10, CEILINGS, numbers=FLOAT32, working_set=MEMORY)
    assert found == pytest.approx(0.01 + 0.1 + 1e-4)
    # without the rate of products there is none
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
