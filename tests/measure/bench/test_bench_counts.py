"""Work and the roofline of a test, against sums that are made call by call."""

import dataclasses

import pytest
from bench_engines import CEILINGS, settings
from small_models import CONFIGS, llama

from llmcli.anatomy.spec import Call
from llmcli.anatomy.work import part_work, total_work
from llmcli.measure.bench import counts
from llmcli.reports.bench import Test as Case
from llmcli.reports.ceilings import MatrixRate, ReadRate
from llmcli.reports.work import PartWork


@pytest.mark.parametrize("name", ["gpt2", "llama", "window", "layers that differ"])
def test_work_is_that_of_every_call(name):
    config, test = CONFIGS[name], Case(n_prompt=11, n_gen=3, depth=5)
    calls = [("prefill", 5, 4), ("prefill", 9, 2), ("prefill", 11, 4), ("prefill", 15, 1)]
    calls += [("decode", 16, 1), ("decode", 17, 1), ("decode", 18, 1)]
    parts = [
        total_work(
            config, Call(batch=1, tokens=tokens, past=past, phase=phase), dtype="bfloat16"
        )
        for phase, past, tokens in calls
    ]  # fmt: skip
    found = counts.work(config, "bfloat16", test, settings(n_batch=6, n_ubatch=4))
    assert found == sum(parts, PartWork())


def test_a_depth_is_not_counted_but_read():
    config = llama()
    flat, deep = (
        counts.work(config, "float32", Case(n_prompt=0, n_gen=1, depth=d), settings())
        for d in (0, 30)
    )
    assert deep.weights == flat.weights
    # 30 keys and values more of 2 heads of 8 numbers in 2 layers, and their products
    assert deep.cache - flat.cache == 2 * 30 * 2 * (8 + 8) * 4
    assert deep.flops - flat.flops == 2 * 30 * 4 * (2 * 8 + 2 * 8)


def test_the_roofline_is_the_sum_over_parts_of_what_they_wait_for():
    config, test = llama(), Case(n_prompt=0, n_gen=1, depth=0)
    work = counts.work(config, "float32", test, settings())
    numbers = work.weights + work.cache

    def least(bytes_per_s, flops_per_s):
        ceilings = dataclasses.replace(
            CEILINGS,
            reads=(ReadRate(nbytes=10**9, bytes_per_s=bytes_per_s, level="memory"),),
            matrices=(MatrixRate(dtype="float32", flops_per_s=flops_per_s),),
        )
        return counts.roofline_ns(config, "float32", test, settings(), ceilings)

    assert least(1e9, 1e30) == pytest.approx(numbers)  # a byte takes a nanosecond
    assert least(1e30, 1e9) == pytest.approx(work.flops)
    both = least(1e9, 4e8)  # norms wait for their bytes, matrices for their products
    parts = part_work(config, Call(batch=1, tokens=1, past=0, phase="decode"), dtype="float32")
    longer = sum(max(part.weights + part.cache, part.flops / 0.4) for *_, part in parts)
    assert both == pytest.approx(longer)
    assert max(numbers, work.flops / 0.4) + 100 < longer < numbers + work.flops / 0.4 - 100


def test_reading_is_as_fast_as_what_one_call_reads_allows():
    config = llama()

    def least(tokens, nbytes):
        ceilings = dataclasses.replace(
            CEILINGS,
            reads=(
                ReadRate(nbytes=nbytes, bytes_per_s=4e9, level="L2"),
                ReadRate(nbytes=10**9, bytes_per_s=1e9, level="memory"),
            ),
            matrices=(MatrixRate(dtype="float32", flops_per_s=1e30),),
        )
        test = Case(n_prompt=0, n_gen=tokens, depth=0)
        return counts.roofline_ns(config, "float32", test, settings(), ceilings)

    one = counts.work(config, "float32", Case(n_prompt=0, n_gen=1, depth=0), settings())
    numbers = one.weights + one.cache
    assert least(1, numbers) == pytest.approx(numbers / 4)
    assert least(1, numbers - 1) == pytest.approx(numbers)
    # a second token reads it all again, out of the same cache: not twice as much at a time
    two = counts.work(config, "float32", Case(n_prompt=0, n_gen=2, depth=0), settings())
    assert least(2, numbers + 1000) == pytest.approx((two.weights + two.cache) / 4)


def test_there_is_no_roofline_where_the_dtype_was_not_measured():
    test = Case(n_prompt=1, n_gen=0, depth=0)
    assert counts.roofline_ns(llama(), "bfloat16", test, settings(), CEILINGS) is None


def test_memory_is_that_of_all_tokens():
    config = llama()
    one, other = (
        counts.memory_bytes(config, "float32", Case(n_prompt=n, n_gen=1, depth=d), settings())
        for n, d in ((4, 0), (2, 2))
    )
    assert one == other
    weights = sum(  # two numbers each of the vocabulary, and the layers
        (43 * 16 * 2, 16, *(2 * 16, 2 * 16 * 32, 2 * 16 * 16, 3 * 16 * 30) * 2)
    )
    assert one > 4 * weights
    long = Case(n_prompt=900, n_gen=0, depth=0)
    needs = [
        counts.memory_bytes(config, "float32", long, settings(n_ubatch=n)) for n in (1, 64, 512)
    ]
    assert needs[0] < needs[1] < needs[2]
