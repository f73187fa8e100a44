"""What is in the timed region, and what is outside it."""

import gc

import pytest
from bench_engines import FakeEngine, raises, settings, watch, words

from llmcli.commands.bench.measure.run import Bench, Run
from llmcli.commands.bench.report.results import Test as Case
from llmcli.errors import OutOfMemory, UsageError


def through(engine, test, *, repetitions=1, warmup=False, room=None, said=None, bench=None, **how):
    """All repetitions of a test: (the bench, its runs)."""
    said = said or (lambda line: None)
    bench = bench or Bench(engine, settings(**how), seed=1)
    bench.prepare(test, room or test.capacity, warmup=warmup, said=said)
    return bench, [bench.repeat(test, n, repetitions, said) for n in range(repetitions)]


@pytest.mark.parametrize(
    ("test", "run"),
    [
        ((7, 3, 20), Run(total=70 + 300, first=70, tokens=(100, 100, 100))),
        ((7, 0, 0), Run(total=70, first=70, tokens=())),  # the first token is of a prompt only
        ((0, 2, 0), Run(total=200, first=None, tokens=(100, 100))),
    ],
)
def test_a_run_is_prompt_and_tokens_and_nothing_else(monkeypatch, test, run):
    prompt, gen, depth = test
    test = Case(n_prompt=prompt, n_gen=gen, depth=depth)
    _, runs = through(FakeEngine(watch(monkeypatch)), test, repetitions=2, warmup=True)
    assert runs == [run] * 2


def test_the_memory_is_emptied_before_each_repetition_and_keeps_the_depth():
    engine = FakeEngine()
    test = Case(n_prompt=4, n_gen=2, depth=6)
    through(engine, test, repetitions=3)
    assert words(engine, "read") == [("read", 6, 0)] + [("read", 4, 6)] * 3
    assert words(engine, "step") == [("step", 10), ("step", 11)] * 3


def test_a_depth_is_read_once_for_all_tests_that_begin_with_it():
    engine = FakeEngine()
    one, other = Case(n_prompt=4, n_gen=0, depth=6), Case(n_prompt=0, n_gen=9, depth=6)
    said = []
    bench, _ = through(engine, one, room=15, said=said.append)
    through(engine, other, bench=bench, warmup=True, said=said.append)
    assert words(engine, "start") == [("start", 15, 1, 512)]
    assert words(engine, "read") == [("read", 6, 0), ("read", 4, 6)]
    assert said == [
        "depth run 1/1", "prompt run 1/1",
        "warmup generation run", "depth run 1/1 (cached)", "generation run 1/1",
    ]  # fmt: skip
    through(engine, Case(n_prompt=4, n_gen=0, depth=5), bench=bench)
    assert words(engine, "start")[-1] == ("start", 9, 1, 512)
    assert words(engine, "read")[-2:] == [("read", 5, 0), ("read", 4, 5)]


@pytest.mark.parametrize("error", [OutOfMemory, UsageError])
def test_a_test_has_a_memory_of_its_own_where_the_shared_one_does_not_fit(error):
    engine = FakeEngine(trouble=raises(error("no"), lambda word, *of: of[:1] == (90,)))
    through(engine, Case(n_prompt=4, n_gen=0, depth=6), room=90)
    assert [entry[1] for entry in words(engine, "start")] == [90, 10]
    with pytest.raises(error):
        through(engine, Case(n_prompt=80, n_gen=4, depth=6), room=90)


def test_a_warm_up_is_the_whole_prompt_and_one_token():
    engine, said = FakeEngine(), []
    through(engine, Case(n_prompt=4, n_gen=5, depth=0), warmup=True, said=said.append)
    assert words(engine, "read") == [("read", 4, 0)] * 2
    assert words(engine, "step")[0] == ("step", 0)
    assert len(words(engine, "step")) == 6
    assert said == ["warmup prompt run", "warmup generation run", "prompt run 1/1"]
    text = FakeEngine()
    through(text, Case(n_prompt=0, n_gen=2, depth=0), warmup=True)
    assert not words(text, "read")


def test_prompts_go_in_by_batches_and_the_engine_is_told_the_micro_batch():
    engine = FakeEngine()
    through(engine, Case(n_prompt=10, n_gen=0, depth=9), n_batch=4, n_ubatch=3, n_threads=2)
    assert engine.log[0] == ("start", 19, 2, 3)
    assert [entry[1] for entry in words(engine, "read")] == [4, 4, 1, 4, 4, 2]


def test_ids_are_those_of_any_engine_with_bos_in_front():
    ours, theirs = FakeEngine(bos=3), FakeEngine(bos=None)
    test = Case(n_prompt=6, n_gen=4, depth=0)
    for engine in (ours, theirs):
        through(engine, test)
    assert ours.held[0] == ours.held[6] == 3
    differ = {n for n, (a, b) in enumerate(zip(ours.held, theirs.held, strict=True)) if a != b}
    assert differ <= {0, 6}


def test_nothing_is_collected_within_a_run():
    class Asking(FakeEngine):
        def step(self, id):
            super().step(id)
            self.enabled = gc.isenabled()

    engine = Asking()
    through(engine, Case(n_prompt=0, n_gen=1, depth=0))
    assert engine.enabled is False
    assert gc.isenabled()
    bad = FakeEngine(trouble=raises(ZeroDivisionError(), lambda word, *of: word == "step"))
    with pytest.raises(ZeroDivisionError):
        through(bad, Case(n_prompt=0, n_gen=1, depth=0))
    assert gc.isenabled()


def test_after_an_error_a_memory_is_made_anew():
    engine = FakeEngine()
    test = Case(n_prompt=4, n_gen=0, depth=6)
    bench, _ = through(engine, test)
    bench.forget()
    through(engine, test, bench=bench)
    assert len(words(engine, "start")) == 2
    assert words(engine, "read").count(("read", 6, 0)) == 2
