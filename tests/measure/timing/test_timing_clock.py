"""Clocks and what they count, from marks to parts; runs in turns, and which of them is kept."""

import math
import sys
from array import array
from dataclasses import replace
from random import Random
from statistics import median_low

import pytest
import torch
from timed_models import CEILINGS, FakeDevice, small, timed
from zoo import CONFIGS

from llmcli.commands.timing.measure import clock as clock_module
from llmcli.commands.timing.measure.clock import (
    MOST,
    EventClock,
    HostClock,
    Kept,
    Marks,
    OperationCount,
    in_order,
    judged,
    over_layers,
    part_times,
    pieces,
)
from llmcli.commands.timing.report import Overhead, PartTime
from llmcli.graph.graph import graph
from llmcli.graph.precision import Precision
from llmcli.measure.ceilings import Roofline
from llmcli.measure.runs import FEWEST, TIGHT, StoppingRule, are_tight, in_turns, paired, spread_of
from llmcli.ops.elements import add
from llmcli.records.work import Cost


def test_the_hosts_clock_gives_each_mark_the_time_since_the_one_before(monkeypatch):
    times = iter((5, 25, 26, 36) * 2)
    monkeypatch.setattr(clock_module, "perf_counter_ns", lambda: 10**6 * next(times))
    clock = HostClock()
    for name in ("slow", "other"):  # it begins anew with every run
        clock.start()
        clock(name)
        clock("quick")
        clock.stop()
        marks = clock.marks()
        assert marks.names == (name, "quick", "end")
        assert list(marks.seconds) == pytest.approx([0.020, 0.001, 0.010])
        assert marks.host_s == marks.seconds


def test_the_devices_clock_reads_the_devices_time_and_waits_once_a_run():
    device = FakeDevice()
    clock = EventClock(device.event, device.wait)
    for run in (1, 2):
        clock.start()
        for name in "abc":
            clock(name)
        clock.stop()
        assert device.waits == run
        marks = clock.marks()
        assert marks.names == ("a", "b", "c", "end")
        assert list(marks.seconds) == pytest.approx([20.0] * 4)  # milliseconds are seconds now
        assert max(marks.host_s) < 20.0  # the host did not wait for any of it
        assert device.events == 5  # made in the first run, recorded again in the second


def test_each_mark_has_the_operations_since_the_one_before():
    one = torch.ones(2, 2)
    with OperationCount() as count:
        one + one  # before the start: of nobody
        count.start()
        count("none")
        torch.nn.functional.linear(one, one)  # one call, whatever is in it
        assert one.shape == (2, 2)  # looked up, not computed
        count("product")
        (one * 2).view(4).add_(1)
        count("three")
        one.sum()
        count.stop()
    one.sum()  # nobody counts any more
    marks = count.marks()
    assert marks.names == ("none", "product", "three", "end")
    assert list(marks.seconds) == [0, 1, 3, 1]


def test_no_compiler_is_imported():
    """Of PyTorch: its 65 MiB would be in the peaks of what is measured next."""
    before = set(sys.modules)
    timed(small("llama"))
    assert not [name for name in set(sys.modules) - before if name.startswith("torch._dynamo")]


def test_parts_have_those_of_a_whole_run():
    report = timed(small("llama"), new_tokens=4)
    rows = torch.ones(1, 1, 8)
    with OperationCount() as count:  # our kernel's output, or PyTorch's sum
        count.start()
        add(rows, rows)
        count.stop()
    (one,) = count.marks().seconds
    for phase in report.phases:
        found = {part.part: part for part in phase.totals}
        assert found["residual"].operations == 2 * 2 * phase.calls * one  # two sums in each layer
        assert found["ffn_down"].operations >= 2 * phase.calls
        layers = {part.layer: part.operations for part in phase.parts if part.part == "residual"}
        assert layers == {0: 2 * phase.calls * one, 1: 2 * phase.calls * one}
        assert all(part.operations for part in phase.totals if part.bound)


MODEL = graph(CONFIGS["qk norm"])
ORDER = in_order(MODEL)
CALL = (
    "step", "embed", "blocks.0.resid_pre", "blocks.0.ln1.out", "blocks.0.attn.k", "blocks.0.attn.v",
    "blocks.0.attn.k_norm", "blocks.0.attn.k_rot", "blocks.0.attn.z", "blocks.0.attn_out",
    "blocks.0.resid_mid", "blocks.0.ln2.out", "blocks.0.mlp.gate", "blocks.0.mlp.up",
    "blocks.0.mlp.act", "blocks.0.mlp.post", "blocks.0.mlp_out", "blocks.0.resid_post",
    "blocks.1.resid_pre", "blocks.1.ln1.out", "ln_final.out", "logits_raw", "logits",
)  # fmt: skip


def marks(*names, each=1.0, host=0.5):
    return Marks(
        names=names, seconds=array("d", [each] * len(names)), host_s=array("d", [host] * len(names))
    )


def test_marks_are_scaled_on_the_device_and_the_host():
    scaled = replace(marks("a", "b"), wall_s=3.0).scaled(0.5)
    assert (scaled.seconds, scaled.host_s) == (array("d", [0.5] * 2), array("d", [0.25] * 2))
    assert scaled.wall_s == 1.5


def run_of(*names):
    return list(pieces(marks(*names), MODEL))


def times(parts):
    return {(part.part, part.layer): part.seconds for part in parts}


def test_each_mark_is_the_end_of_its_part():
    parts = part_times(run_of(*CALL, "end"), {}, {}, ORDER)
    assert times(parts) == {
        ("embed", None): 2.0,  # with the sum of the positions, which `resid_pre` is
        ("norm", 0): 3.0, ("norm", 1): 1.0, ("norm", None): 1.0,
        ("qkv", 0): 2.0, ("rope", 0): 1.0, ("attention", 0): 1.0, ("out", 0): 1.0,
        ("ffn_up", 0): 2.0, ("ffn_act", 0): 2.0, ("ffn_down", 0): 1.0, ("residual", 0): 2.0,
        ("head", None): 2.0, ("gaps", None): 3.0,
    }  # fmt: skip
    assert sum(part.host_s for part in parts) == pytest.approx(0.5 * (len(CALL) + 1))
    # neighbours of one part are computed once, and others as often as they come
    parts = part_times(run_of(*CALL, *CALL, "end"), {}, {}, ORDER)
    calls = {(part.part, part.layer): part.calls for part in parts}
    assert calls["qkv", 0] == 2  # q|k|v are one product a call
    assert calls["norm", 0] == 6  # ln1, keys and queries, ln2
    assert calls["head", None] == 2
    # a name that nobody knows is a gap
    parts = part_times(run_of("step", "blocks.0.attn.magic", "logits", "end"), {}, {}, ORDER)
    assert times(parts) == {("head", None): 1.0, ("gaps", None): 3.0}


def test_parts_come_in_the_order_of_the_work_and_take_it_with_them():
    works = {
        ("embed", None): Cost(weights=3),
        ("norm", 0): Cost(weights=5),
        ("out", 7): Cost(flops=11),  # never timed
    }
    run = run_of("sample", *CALL, "end")
    parts = part_times(run, works, {("norm", 0): 4, ("gaps", None): 9}, ORDER)
    assert [(part.part, part.layer) for part in parts[:2]] == [("embed", None), ("norm", 0)]
    assert parts[-1].part == "gaps"
    assert parts[0].work == Cost(weights=3)
    assert sum(part.work.flops for part in parts) == 0
    assert [(p.part, p.operations) for p in parts if p.operations] == [("norm", 4), ("gaps", 9)]
    totals = over_layers(parts, ORDER)
    assert [part.part for part in totals][-2:] == ["sample", "gaps"]
    assert sum(part.operations for part in totals) == 13
    assert sum(part.seconds for part in totals) == sum(part.seconds for part in parts)
    assert next(part for part in totals if part.part == "norm").work == Cost(weights=5)


def test_a_token_belongs_to_the_call_that_reads_it_and_what_comes_last_to_the_last():
    run = run_of("sample", *CALL, "sample", *CALL, "end")
    assert {piece.call for piece in run} == {0, 1}
    assert [piece.call for piece in run if piece.part == "sample"] == [0, 1]
    assert run[-1].call == 1


def test_calls_of_a_prompt_without_logits_are_calls_too():
    run = run_of(*CALL[:-3], *CALL[:-3], *CALL, "end")
    assert {piece.call for piece in run} == {0, 1, 2}
    assert [piece.call for piece in run if piece.part == "embed"] == [0, 1, 2]
    assert [piece.call for piece in run if piece.place == ("head", None)] == [2]
    assert run[-1].call == 2
    assert sum(piece.seconds for piece in run) == 3 * len(CALL) - 6 + 1


MEMORY, L3, L2 = 200 << 20, 8 << 20, 1 << 19
STREAMED, COMPUTED = Cost(weights=10**8), Cost(flops=10**9)  # 10 ms each
ACTIVATIONS = Cost(activations=10 * 10**6)
NO_START = replace(CEILINGS, start_s=0.0)


@pytest.mark.parametrize(("work", "seconds", "given", "bound", "share"), [
    # streamed weights, keys and values wait for memory, products of many rows for arithmetic
    (Cost(weights=10**8, flops=10**8), 0.0125, {}, "memory", 0.8),
    (Cost(cache=10**8), 0.0125, {}, "memory", 0.8),
    (Cost(weights=4 * 10**8, cache=10**8), 0.0625, {}, "memory", 0.8),
    (Cost(weights=10**6, flops=10**10), 0.125, {}, "compute", 0.8),
    # weights that stay in a cache are judged by it: 400 % of the memory is 80 % of the L3
    (STREAMED, 0.0025, {"working_set": L3}, "L3", 0.8),
    (STREAMED, 0.00125, {"working_set": L2}, "L2", 0.8),
    # activations by the cache that holds those of one call: 1 MB at a time, 10 MB at once
    (ACTIVATIONS, 0.000125, {"calls": 10}, "L2", 0.8),
    (ACTIVATIONS, 0.00025, {"calls": 1}, "L3", 0.8),
    # both kinds of bytes take their time one after the other
    (Cost(weights=10**8, activations=10**7), 0.0102, {"calls": 10}, "memory", 101 / 102),
    # from half of a ceiling on it is what a part waits for, however many operations
    (STREAMED, 0.0199, {}, "memory", 0.01 / 0.0199),
    (STREAMED, 0.0199, {"operations": 10**6}, "memory", 0.01 / 0.0199),
    (STREAMED, 0.0201, {}, "kernel/memory", 0.01 / 0.0201),
    (COMPUTED, 0.0199, {}, "compute", 0.01 / 0.0199),
    (COMPUTED, 0.0199, {"operations": 10**6}, "compute", 0.01 / 0.0199),
    (COMPUTED, 0.0201, {}, "kernel/compute", 0.01 / 0.0201),
    # below it calls, where their start explains half of the rest: 10 ms of 30, 2 µs each
    (STREAMED, 0.03, {"operations": 5001}, "calls/memory", 1 / 3),
    (STREAMED, 0.03, {"operations": 4999}, "kernel/memory", 1 / 3),
    # a GPU that waits for the host waits for calls
    (STREAMED, 0.0125, {"host_s": 0.012}, "calls/memory", 0.8),
    (STREAMED, 0.0125, {"host_s": 0.001}, "memory", 0.8),
    # without counted work there is no bound, and no ceiling of what was not measured
    (Cost(), 1.0, {}, None, None),
    (Cost(weights=10**8, flops=10**12), 0.0125, {"dtype": "float64"}, "memory", 0.8),
    # without a measured start nothing is said to be one
    (Cost(weights=10), 0.1, {"operations": 10**6, "ceilings": NO_START}, "kernel/memory", 1e-8),
    # a product that is computed badly: little of it is its start
    (Cost(flops=10**10), 1.0, {"operations": 100}, "kernel/compute", 0.1),
])
def test_what_a_part_waits_for(work, seconds, given, bound, share):
    """`kernel/memory`: not for memory, though that is nearest."""
    usual = {"working_set": MEMORY, "dtype": "float32", "ceilings": CEILINGS, "host_s": None}
    usual |= {"calls": 1, "operations": 1} | given
    device = "cpu" if usual["host_s"] is None else "cuda:0"  # which works behind the host
    roof = Roofline(
        ceilings=replace(usual["ceilings"], device=device),
        precision=Precision.of(usual["dtype"]), working_set=usual["working_set"],
    )  # fmt: skip
    part = judged(PartTime(
        part="out", layer=None, seconds=seconds, host_s=usual["host_s"] or seconds,
        calls=usual["calls"], operations=usual["operations"], work=work,
    ), 4 * seconds, roof)  # fmt: skip
    assert part.share == 1 / 4
    assert part.bound in (part.nearest, "calls", "kernel")
    assert bound == (part.bound if part.bound == part.nearest else f"{part.bound}/{part.nearest}")
    assert part.of_bound == (share and pytest.approx(share))


# runs in turns: how many are enough, which is kept, and the ratios of pairs


def pairs_run(until, bare, watched):
    """How many pairs are run whose times the two functions give, and when the last one ends."""
    now, bare_s, watched_s = until.begin, [], []
    while not until.over(watched_s, bare_s, now):
        bare_s.append(bare(len(bare_s)))
        watched_s.append(watched(len(watched_s)))
        now += bare_s[-1] + watched_s[-1]
        assert len(bare_s) < 10_000
    return len(bare_s), now


def noisy(share, seed=0):
    dice = Random(seed)
    return lambda number: 0.01 * dice.gauss(1.0, share)


@pytest.mark.parametrize(("bare", "watched", "least", "most"), [
    # runs that are alike end soon, and a slow first one is no reason to go on to the end
    (lambda n: 0.1, lambda n: 0.101, FEWEST, FEWEST),
    (noisy(0.005), noisy(0.005), 1, 2 * FEWEST),
    (lambda n: 0.1 if n else 1.0, lambda n: 0.1, 1, FEWEST + 3),
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
    return replace(marks("end", each=wall_s), wall_s=wall_s)


@pytest.mark.parametrize("runs", [1, 2, 3, 10, 11, 100, 3000])
@pytest.mark.parametrize("order", ["mixed", "rising", "falling", "alike"])
def test_the_median_run_is_the_one_that_is_kept(runs, order):
    """Of thousands few are kept, and one of them is near the median."""
    dice = Random(runs)
    walls = [dice.random() for _ in range(runs)]
    walls = {"mixed": walls, "rising": sorted(walls), "falling": sorted(walls)[::-1],
             "alike": [1.0] * runs}[order]  # fmt: skip
    kept, off = Kept(), 0.0 if runs <= 100 else 0.02
    for done, wall in enumerate(walls, 1):
        kept.add(run(wall))
        assert len(kept) <= MOST
        if not off:
            assert kept.median.wall_s == median_low(walls[:done])  # of an interrupted run, too
    assert abs(kept.median.wall_s - median_low(walls)) <= off
    assert kept.median.wall_s == kept.median.seconds[0]


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
