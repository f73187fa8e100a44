"""Order, pieces and ids are llama-bench's."""

import pytest
from bench_engines import settings

from llmcli.commands.bench.measure.counts import calls as prompt_calls
from llmcli.commands.bench.measure.run import random_ids
from llmcli.commands.bench.report.results import Test as Case
from llmcli.commands.bench.request import all_tests


def test_at_each_depth_prompts_then_generations_then_pairs():
    names = [test.name for test in all_tests([512, 0, 16], [128], [(8, 4), (0, 0)], [0, 64])]
    assert names == [
        "pp512", "pp16", "tg128", "pp8+tg4",
        "pp512 @ d64", "pp16 @ d64", "tg128 @ d64", "pp8+tg4 @ d64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "batch", "ubatch", "pieces", "calls"),
    [
        (10, 100, 100, [10], [(0, 10, "last")]),
        (10, 100, 4, [10], [(0, 4, "none"), (4, 4, "none"), (8, 2, "last")]),
        (10, 6, 4, [6, 4], [(0, 4, "none"), (4, 2, "last"), (6, 4, "last")]),
        (12, 6, 100, [6, 6], [(0, 6, "last"), (6, 6, "last")]),  # n_batch at a time at most
        (0, 6, 4, [], []),
    ],
)
def test_a_prompt_is_read_in_batches_and_those_in_micro_batches(
    tokens, batch, ubatch, pieces, calls
):
    chosen = settings(n_batch=batch, n_ubatch=ubatch)
    assert chosen.pieces(tokens) == pieces
    for depth in (0, 5):
        found = list(prompt_calls(tokens, chosen, depth))
        assert [(call.past - depth, call.tokens, logits) for call, logits in found] == calls
        assert all(call.phase == "prefill" and call.batch == 1 for call, _ in found)
    assert chosen.chunk == min(batch, ubatch)


def test_one_engine_serves_what_it_is_told_at_its_start():
    one = settings()
    for same in ({"n_batch": 1}, {"n_ubatch": 1}, {"n_threads": 7}):
        assert one.same_engine(settings(**same))
    for other in ({"model": "x"}, {"dtype": "bfloat16"}, {"device": "meta"}, {"type_k": "f16"}):
        assert not one.same_engine(settings(**other))


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


def test_the_memory_has_room_for_depth_prompt_and_text():
    assert Case(n_prompt=5, n_gen=3, depth=7).capacity == 15
