"""Work and the roofline of a test, against sums that are made call by call.

Order, pieces and ids are llama-bench's.
"""

import dataclasses

import pytest
import torch
from bench_engines import CEILINGS, settings
from zoo import CONFIGS, llama

from llmcli import devices
from llmcli.graph.arithmetic import Arithmetic
from llmcli.graph.cost import cost_by_part, total_cost
from llmcli.graph.memory import PlannedRun, memory_need
from llmcli.graph.spec import Call
from llmcli.measure.engines import WorkCounter, random_ids
from llmcli.records.engines import SpeedTest
from llmcli.records.machine import MatrixRate, ReadRate
from llmcli.records.work import PartWork

BFLOAT16 = Arithmetic.of("bfloat16")
SIZES = 2048, 512  # of a batch and of a call, llama-bench's
LLAMA = WorkCounter(config=llama(), numbers=Arithmetic.of("float32"))


def made(flops_per_s, *reads):
    """Ceilings of a machine with these rates."""
    matrices = (MatrixRate(dtype="float32", flops_per_s=flops_per_s),)
    return dataclasses.replace(CEILINGS, reads=reads, matrices=matrices)


@pytest.mark.parametrize("name", ["gpt2", "llama", "window", "layers that differ"])
def test_work_is_that_of_every_call(name):
    config, test = CONFIGS[name], SpeedTest(n_prompt=11, n_gen=3, n_depth=5)
    calls = [("prefill", 5, 4, "none"), ("prefill", 9, 2, "last")]  # 6 at a time: two batches,
    calls += [("prefill", 11, 4, "none"), ("prefill", 15, 1, "last")]  # each ends with logits
    calls += [("decode", past, 1, "last") for past in (16, 17, 18)]
    parts = [
        total_cost(
            config, Call(batch=1, tokens=tokens, past=past, phase=phase), numbers=BFLOAT16,
            logits=logits,
        )
        for phase, past, tokens, logits in calls
    ]  # fmt: skip
    found = WorkCounter(config=config, numbers=BFLOAT16).work(test, 6, 4)
    assert found == sum(parts, PartWork())


def test_a_depth_is_not_counted_but_read():
    flat, deep = (
        LLAMA.work(SpeedTest(n_prompt=0, n_gen=1, n_depth=d), *SIZES)
        for d in (0, 30)
    )
    assert deep.weights == flat.weights
    # 30 keys and values more of 2 heads of 8 numbers in 2 layers, and their products
    assert deep.cache - flat.cache == 2 * 30 * 2 * (8 + 8) * 4
    assert deep.flops - flat.flops == 2 * 30 * 4 * (2 * 8 + 2 * 8)


def test_the_roofline_is_the_sum_over_parts_of_what_they_wait_for():
    test = SpeedTest(n_prompt=0, n_gen=1)
    work = LLAMA.work(test, *SIZES)

    def least(bytes_per_s, flops_per_s):
        memory = ReadRate(nbytes=10**9, bytes_per_s=bytes_per_s, level="memory")
        ceilings = made(flops_per_s, memory)
        return LLAMA.roofline_ns(test, *SIZES, ceilings)

    assert least(1e9, 1e30) == pytest.approx(work.bytes)  # a byte takes a nanosecond
    assert least(1e30, 1e9) == pytest.approx(work.flops)
    both = least(1e9, 4e8)  # norms wait for their bytes, matrices for their products
    calls = [(Call(batch=1, tokens=1, past=0, phase="decode"), "last")]
    parts = cost_by_part(LLAMA.config, calls, numbers=LLAMA.numbers)
    longer = sum(max(part.bytes, part.flops / 0.4) for part in parts.values())
    assert both == pytest.approx(longer)
    assert max(work.bytes, work.flops / 0.4) + 100 < longer < work.bytes + work.flops / 0.4 - 100


def test_weights_come_from_where_all_that_a_step_reads_lies_and_activations_from_their_own():

    def least(tokens, nbytes):
        cache = ReadRate(nbytes=nbytes, bytes_per_s=4e9, level="L2")
        ceilings = made(1e30, cache, CEILINGS.reads[1])
        test = SpeedTest(n_prompt=0, n_gen=tokens)
        return LLAMA.roofline_ns(test, *SIZES, ceilings)

    test = SpeedTest(n_prompt=0, n_gen=1)
    one = LLAMA.work(test, *SIZES)
    streamed = one.weights + one.cache
    assert least(1, streamed) == pytest.approx((streamed + one.activations) / 4)
    # what a part passes on still fits
    assert least(1, streamed - 1) == pytest.approx(streamed + one.activations / 4)
    # a second token reads it all again, out of the same cache: not twice as much at a time
    two = LLAMA.work(SpeedTest(n_prompt=0, n_gen=2), *SIZES)
    assert least(2, streamed + 1000) == pytest.approx(two.bytes / 4)


def test_a_step_reads_the_weights_and_the_keys_of_all_tokens_before():
    empty, full = (
        LLAMA.working_set(SpeedTest(n_prompt=p, n_gen=g, n_depth=d))
        for p, g, d in ((0, 1, 0), (8, 3, 20))
    )
    one = LLAMA.work(SpeedTest(n_prompt=0, n_gen=1), *SIZES)
    assert empty == one.weights + one.cache
    assert full - empty == 2 * 30 * 2 * (8 + 8) * 4  # as above: 30 tokens more


def test_there_is_no_roofline_where_the_dtype_was_not_measured():
    test = SpeedTest(n_prompt=1, n_gen=0)
    counter = WorkCounter(config=llama(), numbers=BFLOAT16)
    assert counter.roofline_ns(test, *SIZES, CEILINGS) is None


def test_memory_is_that_of_all_tokens():
    one, other = (
        LLAMA.memory_bytes(SpeedTest(n_prompt=n, n_gen=1, n_depth=d), 512)
        for n, d in ((4, 0), (2, 2))
    )
    assert one == other
    weights = sum(  # two numbers each of the vocabulary, and the layers
        (43 * 16 * 2, 16, *(2 * 16, 2 * 16 * 32, 2 * 16 * 16, 3 * 16 * 30) * 2)
    )
    assert one > 4 * weights
    long = SpeedTest(n_prompt=900, n_gen=0)
    needs = [LLAMA.memory_bytes(long, n) for n in (1, 64, 512)]
    assert needs[0] < needs[1] < needs[2]


def test_memory_is_that_of_the_device_and_not_of_the_processor(monkeypatch):
    """Apple's GPU multiplies bfloat16 beside a processor that may not."""
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("mps"))
    monkeypatch.setattr(devices.processor, "has_bfloat16", lambda: False)
    found = WorkCounter(config=llama(), numbers=BFLOAT16).memory_bytes(
        SpeedTest(n_prompt=900, n_gen=0), 512
    )
    run = PlannedRun(llama(), BFLOAT16, batch=1, context=900, chunk=512, native=True)
    assert found == memory_need(run).needed_bytes


@pytest.mark.parametrize(("tokens", "batch", "ubatch", "calls"), [
    (10, 100, 100, [(0, 10, "last")]),
    (10, 100, 4, [(0, 4, "none"), (4, 4, "none"), (8, 2, "last")]),
    (10, 6, 4, [(0, 4, "none"), (4, 2, "last"), (6, 4, "last")]),
    (12, 6, 100, [(0, 6, "last"), (6, 6, "last")]),  # n_batch at a time at most
    (0, 6, 4, []),
])
def test_a_prompt_is_read_in_batches_and_those_in_micro_batches(tokens, batch, ubatch, calls):
    chosen = settings(n_batch=batch, n_ubatch=ubatch)
    for depth in (0, 5):
        found = list(LLAMA.calls(tokens, batch, chosen.chunk, depth))
        assert [(call.past - depth, call.tokens, logits) for call, logits in found] == calls
        assert all(call.phase == "prefill" and call.batch == 1 for call, _ in found)
    assert chosen.chunk == min(batch, ubatch)


def test_ids_are_random_repeatable_and_begin_with_bos():
    ids = random_ids(1, "pp512 0", 512, 97, None)
    assert ids == random_ids(1, "pp512 0", 512, 97, None)
    assert len(ids) == 512
    assert set(ids) <= set(range(97))
    assert len(set(ids)) > 80
    assert ids != random_ids(1, "pp512 1", 512, 97, None)
    assert ids != random_ids(2, "pp512 0", 512, 97, None)
    assert random_ids(1, "pp512 0", 512, 97, 5) == [5, *ids[1:]]
    assert random_ids(1, "pp512 0", 0, 97, 5) == []
