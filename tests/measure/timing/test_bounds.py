"""What a part waits for: by hand, at each of the ceilings."""

from dataclasses import replace

import pytest
from timed_models import CEILINGS

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.timing.measure.clock import Roof
from llmcli.commands.timing.report import PartTime
from llmcli.records.work import PartWork

MEMORY, L3, L2 = 200 << 20, 8 << 20, 1 << 19
STREAMED, COMPUTED = PartWork(weights=10**8), PartWork(flops=10**9)  # 10 ms each
ACTIVATIONS = PartWork(activations=10 * 10**6)
NO_START = replace(CEILINGS, start_s=0.0)


def bounded(
    work, seconds, *, working_set=MEMORY, calls=1, operations=1, host_s=None, dtype="float32",
    ceilings=CEILINGS,
):  # fmt: skip
    roof = Roof(
        ceilings=ceilings, numbers=Arithmetic.of(dtype), working_set=working_set,
        apart=host_s is not None,
    )  # fmt: skip
    part = roof.judged(PartTime(
        part="out", layer=None, seconds=seconds, host_s=host_s or seconds, calls=calls,
        operations=operations, work=work,
    ), 4 * seconds)  # fmt: skip
    assert part.share == 1 / 4
    assert (part.bound is None) == (part.nearest is None)
    assert part.bound in (part.nearest, "calls", "kernel")
    return part


@pytest.mark.parametrize(
    ("work", "seconds", "given", "bound", "share"),
    [
        # streamed weights, keys and values wait for memory, products of many rows for arithmetic
        (PartWork(weights=10**8, flops=10**8), 0.0125, {}, "memory", 0.8),
        (PartWork(cache=10**8), 0.0125, {}, "memory", 0.8),
        (PartWork(weights=4 * 10**8, cache=10**8), 0.0625, {}, "memory", 0.8),
        (PartWork(weights=10**6, flops=10**10), 0.125, {}, "compute", 0.8),
        # weights that stay in a cache are judged by it: 400 % of the memory is 80 % of the L3
        (STREAMED, 0.0025, {"working_set": L3}, "L3", 0.8),
        (STREAMED, 0.00125, {"working_set": L2}, "L2", 0.8),
        # activations by the cache that holds those of one call: 1 MB at a time, 10 MB at once
        (ACTIVATIONS, 0.000125, {"calls": 10}, "L2", 0.8),
        (ACTIVATIONS, 0.00025, {"calls": 1}, "L3", 0.8),
        # both kinds of bytes take their time one after the other
        (PartWork(weights=10**8, activations=10**7), 0.0102, {"calls": 10}, "memory", 101 / 102),
        # from half of a ceiling on it is what a part waits for, however many operations
        (STREAMED, 0.0199, {}, "memory", 0.01 / 0.0199),
        (STREAMED, 0.0199, {"operations": 10**6}, "memory", 0.01 / 0.0199),
        (STREAMED, 0.0201, {}, "kernel", 0.01 / 0.0201),
        (COMPUTED, 0.0199, {}, "compute", 0.01 / 0.0199),
        (COMPUTED, 0.0199, {"operations": 10**6}, "compute", 0.01 / 0.0199),
        (COMPUTED, 0.0201, {}, "kernel", 0.01 / 0.0201),
        # below it calls, where their start explains half of the rest: 10 ms of 30, 2 µs each
        (STREAMED, 0.03, {"operations": 5001}, "calls", 1 / 3),
        (STREAMED, 0.03, {"operations": 4999}, "kernel", 1 / 3),
        # a GPU that waits for the host waits for calls
        (STREAMED, 0.0125, {"host_s": 0.012}, "calls", 0.8),
        (STREAMED, 0.0125, {"host_s": 0.001}, "memory", 0.8),
        # without counted work there is no bound, and no ceiling of what was not measured
        (PartWork(), 1.0, {}, None, None),
        (PartWork(weights=10**8, flops=10**12), 0.0125, {"dtype": "float64"}, "memory", 0.8),
        # without a measured start nothing is said to be one
        (PartWork(weights=10), 0.1, {"operations": 10**6, "ceilings": NO_START}, "kernel", 1e-8),
    ],
)
def test_what_a_part_waits_for(work, seconds, given, bound, share):
    part = bounded(work, seconds, **given)
    assert part.bound == bound
    assert part.of_bound == (share and pytest.approx(share))


def test_a_tenth_of_a_ceiling_is_not_bound_by_it():
    """A product that is computed badly: little of it is its start."""
    part = bounded(PartWork(flops=10**10), 1.0, operations=100)
    assert (part.bound, part.nearest, part.of_bound) == ("kernel", "compute", 0.1)
