"""Sweeps: rows as they are measured, whatever fails beside them, and two engines in turns."""

import dataclasses
import re
from statistics import mean

import pytest
from bench_engines import CEILINGS, FakeEngine, info, raises, settings, swept, watch, words
from fake_process import MIB, FakeProcess
from zoo import llama

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.commands.bench.measure import counts
from llmcli.commands.bench.measure import sweep as module
from llmcli.commands.bench.report.results import Test as Case
from llmcli.commands.bench.request import all_tests
from llmcli.errors import CheckpointError, OutOfMemory, UsageError
from llmcli.observe.held import Held
from llmcli.reports.text import PhasePeak

PP, TG = Case(n_prompt=8, n_gen=0, depth=0), Case(n_prompt=0, n_gen=4, depth=0)


def test_statistics_are_those_of_a_hand_computation(monkeypatch):
    clock = watch(monkeypatch)
    _, [one] = swept(lambda chosen: FakeEngine(clock), tests=[TG], repetitions=1)
    assert (one.stddev_ns, one.stddev_ts, one.token_ns, one.avg_ts) == (0, 0, (100,) * 4, 1e7)
    engine = FakeEngine(clock)
    costs = iter([100, 250, 400])
    engine.read = lambda ids: setattr(clock, "now", clock.now + next(costs))
    _, [row] = swept(lambda chosen: engine, tests=[PP], repetitions=3)
    assert row.samples_ns == row.first_ns == (100, 250, 400)
    rates = [8e9 / 100, 8e9 / 250, 8e9 / 400]  # tokens per second of each run
    assert row.samples_ts == pytest.approx(rates)
    assert row.avg_ts == pytest.approx(mean(rates))
    assert row.avg_ts != pytest.approx(8e9 / row.avg_ns)  # not tokens by mean time
    apart = sum((rate - mean(rates)) ** 2 for rate in rates)
    assert row.stddev_ts == pytest.approx((apart / 2) ** 0.5)
    assert (row.avg_ns, row.stddev_ns) == (250, pytest.approx(150))


def test_rows_come_in_order_and_as_they_are_measured():
    engine, seen = FakeEngine(), []
    tests = all_tests([8], [4], [(2, 2)], [0, 3])

    def on_row(row):
        seen.append((row.number, row.test.name, len(words(engine, "start"))))

    report, _ = swept(lambda chosen: engine, tests=tests, on_row=on_row)
    assert seen == [
        (1, "pp8", 1), (2, "tg4", 2), (3, "pp2+tg2", 3),
        (4, "pp8 @ d3", 4), (5, "tg4 @ d3", 4), (6, "pp2+tg2 @ d3", 4),
    ]  # fmt: skip
    rooms = [entry[1] for entry in words(engine, "start")]
    assert rooms == [8, 4, 4, 11]  # the last is the largest at that depth
    assert [row.number for row in report.rows] == [1, 2, 3, 4, 5, 6]
    assert not report.interrupted
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert all(re.fullmatch(stamp, row.test_time) for row in report.rows)


def test_an_engine_is_kept_as_long_as_it_serves():
    loaded = []

    def load(chosen):
        loaded.append((chosen, FakeEngine()))
        return loaded[-1][1]

    chosen = [settings(n_ubatch=4), settings(n_ubatch=8, n_threads=3), settings(dtype="bfloat16")]
    report, _ = swept(load, configurations=chosen)
    assert [one for one, _ in loaded] == [chosen[0], chosen[2]]
    starts = words(loaded[0][1], "start")
    assert [entry[2:] for entry in starts] == [(1, 4)] * 2 + [(3, 8)] * 2
    assert [row.settings for row in report.rows] == [one for one in chosen for _ in range(2)]
    assert all(engine.log[-1] == ("close",) for _, engine in loaded)


def test_the_old_engines_are_closed_before_a_new_one_is_loaded():
    log = []

    def load(chosen):
        log.append(("load",))
        return FakeEngine(log=log)

    swept(load, peer=load, configurations=[settings(), settings(model="other")], tests=[PP])
    assert [word for word, *_ in log if word in ("load", "close")] == [
        "load", "load", "close", "close", "load", "load", "close", "close",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfMemory("too much"), (5, "out_of_memory", "too much")),
        (MemoryError(), (5, "out_of_memory", "out of memory")),
        (MemoryError("all of it"), (5, "out_of_memory", "out of memory: all of it")),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate\nmore"),
            (5, "out_of_memory",
             "out of memory: [enforce fail] DefaultCPUAllocator: can't allocate"),
        ),
        (KeyError("x"), (1, "error", "internal error: KeyError: 'x'")),
        (ValueError(), (1, "error", "internal error: ValueError: no message")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("word", ["start", "read", "rewind"])
def test_a_test_that_fails_is_a_row_and_the_others_are_run(word, error, told):
    engine = FakeEngine()
    engine.trouble = raises(error, lambda did, *of: did == word and failing)
    failing = False

    def fail_in_the_second(line):
        nonlocal failing
        failing = line.startswith("benchmark 2/")

    tests = [TG, Case(n_prompt=8, n_gen=2, depth=3), PP]
    report, _ = swept(lambda chosen: engine, tests=tests, on_progress=fail_in_the_second)
    assert [row.error for row in report.rows] == [None, told, None]
    assert [len(row.samples_ns) for row in report.rows] == [2, 0, 2]
    assert report.rows[1].info == engine.info
    assert report.rows[1].avg_ts == report.rows[1].avg_ns == 0


def test_what_can_be_done_stands_beside_an_error():
    no = UsageError("no", hint="do that")
    engine = FakeEngine(trouble=raises(no, lambda word, *of: word == "step"))
    report, _ = swept(lambda chosen: engine, tests=[TG, PP])
    assert [row.hint for row in report.rows] == ["do that", None]
    engine = FakeEngine(trouble=raises(MemoryError(), lambda word, *of: word == "read"))
    report, _ = swept(lambda chosen: engine, tests=[PP, TG])
    assert "shorter tests" in report.rows[0].hint
    assert report.rows[1].hint is None


def test_after_a_failure_the_depth_is_read_again():
    engine = FakeEngine()
    engine.trouble = raises(
        MemoryError(), lambda word, *of: (word, len(words(engine, "step"))) == ("step", 1)
    )
    tests = [Case(n_prompt=0, n_gen=n, depth=3) for n in (4, 2)]
    report, _ = swept(lambda chosen: engine, tests=tests)
    assert [bool(row.error) for row in report.rows] == [True, False]
    assert [entry[1] for entry in words(engine, "start")] == [7, 5]
    assert words(engine, "read") == [("read", 3, 0)] * 2


def test_a_model_that_does_not_load_is_a_row_for_each_test():
    tried = []

    def load(chosen):
        tried.append(chosen.model)
        if chosen.model == "broken":
            raise CheckpointError("it is broken", hint="another one")
        return FakeEngine()

    chosen = [settings(model="broken"), settings(model="broken", n_ubatch=3), settings()]
    report, rows = swept(load, configurations=chosen)
    assert [row.error and row.error[0] for row in rows] == [4, 4, 4, 4, None, None]
    assert [row.hint for row in rows] == ["another one"] * 4 + [None] * 2
    assert rows[0].error == (4, "checkpoint", "it is broken")
    assert (rows[0].info, rows[0].engine) == (None, "llmcli")
    assert tried == ["broken", "tiny"]  # once for both of its configurations
    assert report.rows == tuple(rows)


def test_an_interrupt_keeps_the_rows_that_are_whole():
    engine = FakeEngine(
        trouble=raises(KeyboardInterrupt(), lambda word, *of: word == "step" and of[0] == 2)
    )
    report, rows = swept(lambda chosen: engine)
    assert report.interrupted
    assert [row.test for row in rows] == [PP]
    assert report.rows == tuple(rows)
    assert engine.log[-1] == ("close",)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_a_row_that_is_written_when_an_interrupt_comes_is_kept_but_no_error_is(error):
    engine = FakeEngine()

    def on_row(row):
        raise error

    if error is KeyboardInterrupt:
        report, _ = swept(lambda chosen: engine, on_row=on_row)
        assert (report.interrupted, len(report.rows)) == (True, 1)
    else:
        with pytest.raises(error):
            swept(lambda chosen: engine, on_row=on_row)
    assert engine.log[-1] == ("close",)


def test_two_engines_take_turns(monkeypatch):
    clock, log = watch(monkeypatch), []

    def named(name, slow=1):
        engine = FakeEngine(clock, name=name, slow=slow)
        engine.trouble = lambda word, *about: log.append(name) if word == "read" else None
        return engine

    report, rows = swept(
        lambda chosen: named("llmcli"),
        peer=lambda chosen: named("llama.cpp", 3),
        peer_name="llama.cpp",
        tests=[PP],
        repetitions=4,
    )
    turns = ["llmcli", "llama.cpp", "llama.cpp", "llmcli"] * 2
    assert log == turns
    [pair] = report.against
    assert list(pair.order) == turns
    assert pair.ratios == (3.0,) * 4
    assert (pair.median, pair.lowest, pair.highest) == (3.0, 3.0, 3.0)
    assert (pair.test, pair.peer, pair.number) == (PP, "llama.cpp", 1)
    assert [(row.number, row.engine, row.avg_ns) for row in rows] == [
        (1, "llmcli", 80),
        (2, "llama.cpp", 240),
    ]


def test_ratios_are_of_pairs(monkeypatch):
    clock = watch(monkeypatch)
    ours, theirs = FakeEngine(clock), FakeEngine(clock, name="transformers")
    costs = {"ours": iter([10, 20, 40]), "theirs": iter([20, 10, 40])}
    ours.read = lambda ids: setattr(clock, "now", clock.now + next(costs["ours"]))
    theirs.read = lambda ids: setattr(clock, "now", clock.now + next(costs["theirs"]))
    report, _ = swept(lambda c: ours, peer=lambda c: theirs, tests=[PP], repetitions=3)
    [pair] = report.against
    assert pair.ratios == (2.0, 0.5, 1.0)  # theirs in ns ÷ ours: in tokens per second ours ÷ theirs
    assert (pair.median, pair.lowest, pair.highest) == (1.0, 0.5, 2.0)


def test_a_peer_that_fails_leaves_our_rows():
    def load(chosen):
        raise CheckpointError("not for me")

    report, rows = swept(lambda c: FakeEngine(), peer=load, peer_name="transformers", tests=[PP])
    assert [(row.engine, row.error and row.error[0]) for row in rows] == [
        ("llmcli", None),
        ("transformers", 4),
    ]
    assert len(rows[0].samples_ns) == 2
    assert report.against == ()
    late = FakeEngine(name="transformers")
    late.trouble = raises(
        RuntimeError("x"), lambda word, *of: (word, len(words(late, "read"))) == ("read", 2)
    )
    report, rows = swept(lambda c: FakeEngine(), peer=lambda c: late, tests=[PP])
    assert [bool(row.error) for row in rows] == [False, True]
    assert report.against == ()


def test_progress_is_told_as_llama_bench_tells_it_and_a_delay_passes_before_each_test(monkeypatch):
    lines, slept = [], []
    monkeypatch.setattr(module, "sleep", slept.append)
    swept(lambda c: FakeEngine(), tests=[PP, TG], warmup=True, on_progress=lines.append)
    assert lines == [
        "benchmark 1/2: starting", "benchmark 1/2: warmup prompt run",
        "benchmark 1/2: prompt run 1/2", "benchmark 1/2: prompt run 2/2",
        "benchmark 2/2: starting", "benchmark 2/2: warmup generation run",
        "benchmark 2/2: generation run 1/2", "benchmark 2/2: generation run 2/2",
    ]  # fmt: skip
    assert slept == []
    swept(lambda c: FakeEngine(), delay_s=0.5)
    assert slept == [0.5, 0.5]


class Counting(FakeEngine):
    """A fake whose work is known."""

    config = llama()
    reads = "prompt"

    def __init__(self, *, rounds=False, **facts):
        super().__init__()
        self.info = info(**facts)
        self._formats = {"head.W": "Q8_0"} if rounds else {}

    @property
    def numbers(self):
        return dataclasses.replace(Arithmetic.of(self.info.dtype), formats=self._formats)


def test_work_and_the_roofline_stand_in_rows_of_an_engine_that_has_them():
    asked = []

    def ceilings(engine, reads):
        asked.append(reads)
        return CEILINGS

    chosen = [settings(), settings(n_ubatch=3), settings(n_threads=2)]
    report, rows = swept(lambda c: Counting(), configurations=chosen, ceilings=ceilings)
    assert len(asked) == 2  # for each number of threads
    longest = counts.working_set(Counting.config, Arithmetic.of("float32"), PP)
    assert asked == [longest] * 2
    assert report.ceilings == (CEILINGS,) * 2
    assert all(row.work.flops > 0 and row.roofline_ns > 0 for row in rows)
    _, rows = swept(lambda c: Counting())
    assert all(row.work.flops > 0 and row.roofline_ns is None for row in rows)
    _, rows = swept(lambda c: FakeEngine(), ceilings=ceilings)
    assert all(row.work is None and row.roofline_ns is None for row in rows)


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("like_for_like", [True, False])
def test_activations_of_the_peer_are_left_out_where_there_are_no_such_products(
    rounds, like_for_like
):
    chosen, said = [settings(), settings(activations="8")], []
    _, rows = swept(
        lambda c: Counting(rounds=rounds), configurations=chosen, like_for_like=like_for_like,
        on_progress=said.append,
    )  # fmt: skip
    both = rounds or not like_for_like
    assert [row.settings.activations for row in rows] == ["auto"] * 2 + ["8"] * 2 * both
    assert said[-1].startswith("benchmark 4/4" if both else "benchmark 2/")


def test_on_the_device_meta_nothing_is_timed():
    engine = Counting(device="meta")
    _, rows = swept(lambda c: engine, ceilings=lambda e, reads: CEILINGS, repetitions=5)
    assert all(row.meta and not row.samples_ns and row.error is None for row in rows)
    assert all(row.roofline_ns > 0 and row.estimated_memory_bytes > 0 for row in rows)
    assert all(row.peak_memory_bytes is None and not row.peaks for row in rows)  # not measured
    assert words(engine, "read") == [("read", 8, 0)]  # shapes are computed once: it would run
    assert len(words(engine, "step")) == 1
    engine.trouble = raises(ValueError("5 into 4"), lambda word, *of: word == "read")
    _, rows = swept(lambda c: engine)
    assert [bool(row.error) for row in rows] == [True, False]


class Greedy(FakeEngine):
    """Holds 200 MiB while it reads, 50 while it writes, 300 while it starts."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def start(self, *how):
        super().start(*how)
        self.memory.hold(300)

    def read(self, ids):
        super().read(ids)
        self.memory.hold(200)

    def step(self, id):
        super().step(id)
        self.memory.hold(50)


def test_each_phase_has_its_own_peak_and_a_depth_is_read(monkeypatch):
    load = PhasePeak(phase="load", resident_bytes=5, device_bytes=None)
    engine = Greedy(FakeProcess(monkeypatch))
    engine.info = info(load_peak=load, base_bytes=3)
    tests = [Case(n_prompt=8, n_gen=2, depth=0), TG, Case(n_prompt=0, n_gen=2, depth=4)]
    for warmup in (False, True):
        _, rows = swept(lambda c: engine, tests=tests, warmup=warmup)
        found = [{one.phase: one.resident_bytes for one in row.peaks} for row in rows]
        whole = {"load": 5, "prefill": 300 * MIB, "decode": 150 * MIB}
        text = {"load": 5, "decode": 150 * MIB}  # nothing was read
        assert found == [whole, text, whole]
        # the most of the whole test, its start included
        assert [row.peak_memory_bytes for row in rows] == [400 * MIB] * 3
        assert all(row.info.base_bytes == 3 for row in rows)
        assert all(one.device_bytes is None for row in rows for one in row.peaks)


def test_memory_of_two_engines_in_one_process_is_nobodys():
    load = PhasePeak(phase="load", resident_bytes=5, device_bytes=None)

    def named(name):
        engine = FakeEngine(name=name)
        engine.info = info(name, load_peak=load, base_bytes=3)
        return engine

    _, rows = swept(lambda c: named("llmcli"), peer=lambda c: named("transformers"), tests=[PP])
    for row in rows:
        assert row.samples_ns
        assert (row.peak_memory_bytes, row.peaks) == (None, ())
        assert (row.info.base_bytes, row.info.load_peak) == (None, None)


def test_marks_of_the_memory_are_read_outside_the_times(monkeypatch):
    clock = watch(monkeypatch)
    before = Held.phase

    def slow(held, name):
        clock.now += 10**9
        return before(held, name)

    monkeypatch.setattr(Held, "phase", slow)
    _, [row] = swept(
        lambda c: FakeEngine(clock), tests=[Case(n_prompt=8, n_gen=2, depth=3)], warmup=True
    )
    assert row.samples_ns == (80 + 200,) * 2
    assert (row.first_ns, row.token_ns) == ((80,) * 2, (100,) * 4)


def test_a_row_that_failed_says_what_the_headers_do_and_no_other_engine_is_loaded():
    asked, tried = [], []

    def load(chosen):
        raise CheckpointError("not with these settings", hint="others")

    def known(chosen):
        asked.append(chosen)
        return info(model_type="llama 70B F16", load_s=None)

    _, rows = swept(
        load, peer=lambda c: tried.append(c), peer_name="transformers", tests=[PP], known=known
    )
    assert not tried
    assert [row.error for row in rows] == [(4, "checkpoint", "not with these settings")] * 2
    assert [row.hint for row in rows] == ["others"] * 2
    assert [row.info.model_type for row in rows] == ["llama 70B F16"] * 2
    assert [row.info.engine for row in rows] == ["llmcli", "transformers"]
    assert [row.info.version for row in rows] == ["1", ""]  # nothing is known of the other
    assert all(row.info.load_s is None for row in rows)
    assert asked[0] == settings()
    _, [row] = swept(load, tests=[PP])
    assert row.info is None


def test_there_are_ceilings_for_each_device_dtype_and_number_of_threads():
    asked = []

    def ceilings(engine, reads):
        asked.append((engine.info.dtype, reads))
        return dataclasses.replace(CEILINGS, threads=len(asked))

    chosen = [settings(model=name, dtype=dtype) for dtype in ("float32", "float64")
              for name in ("one", "other")]  # fmt: skip
    deep = Case(n_prompt=0, n_gen=1, depth=40)
    report, rows = swept(
        lambda chosen: Counting(dtype=chosen.dtype), configurations=chosen, tests=[PP, deep],
        ceilings=ceilings,
    )  # fmt: skip
    both = [Arithmetic.of(dtype) for dtype in ("float32", "float64")]
    reads = [counts.working_set(Counting.config, numbers, deep) for numbers in both]
    assert asked == [("float32", reads[0]), ("float64", reads[1])]  # room for the longest test
    assert [one.threads for one in report.ceilings] == [1, 2]
    assert rows[0].roofline_ns > 0
    assert rows[-1].roofline_ns is None  # in float64 nothing was measured
