"""Sweeps: rows as they are measured, what fails beside them, and two engines in turns.

sweeps.txt has the calls of engines, the progress and the rows of each of `CASES`.
"""

import dataclasses
import gc
import re
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean

import pytest
from bench_engines import CEILINGS, TESTS, FakeEngine, all_tests, info, settings, swept, watch
from fake_process import MIB, FakeProcess
from zoo import llama

from llmcli.commands.bench.measure import sweep as module
from llmcli.errors import CheckpointError, OutOfMemory, UsageError
from llmcli.graph.precision import Precision
from llmcli.measure.engines import WorkCounter
from llmcli.measure.peaks import PhaseMemory
from llmcli.records.engines import SpeedTest
from llmcli.records.text import PhasePeak

PP, TG = TESTS[0], SpeedTest(n_prompt=0, n_gen=2)
DEEP = SpeedTest(n_prompt=4, n_gen=2, n_depth=6)
DEEP_PP, DEEP_TG = (dataclasses.replace(DEEP, **none) for none in ({"n_gen": 0}, {"n_prompt": 0}))


def counting(clock=None, *, rounds=False, log=None, **facts):
    """A fake whose work is known."""
    engine = FakeEngine(clock, log=log, **facts)
    precision = Precision.of(engine.info.dtype)
    if rounds:
        precision = dataclasses.replace(precision, formats={"head.W": "Q8_0"})
    engine.counter = WorkCounter(config=llama(), precision=precision)
    return engine


def raising(error, word, *calls):
    """A trouble: raises `error` at the calls of a word with those numbers, all without."""
    number = count(1)

    def trouble(called):
        if called == word and (next(number) in calls or not calls):
            raise error

    return trouble


def failing(error, word="read", *calls, **rest):
    return {"trouble": raising(error, word, *calls), "repetitions": 1, **rest}


NO = UsageError("no", hint="do that")
BROKEN = CheckpointError("it is broken", hint="another one")
MODELS = [settings(), settings(model="other")]
CASES = {
    "tests in order, of a depth in one room": {
        "tests": all_tests([8], [2], [(2, 1)], [0, 3]), "repetitions": 1,
    },
    "a depth is read once for all tests that begin with it, and warmed up behind it": {
        "tests": [
            DEEP_PP, SpeedTest(n_prompt=0, n_gen=5, n_depth=6),
            SpeedTest(n_prompt=4, n_gen=0, n_depth=5),
        ],
        "warmup": True,
    },
    "the memory is emptied before each repetition and keeps the depth": {
        "tests": [DEEP], "repetitions": 3,
    },
    "a warm-up is the whole prompt and one token": {
        "tests": [SpeedTest(n_prompt=4, n_gen=2), TG], "warmup": True, "repetitions": 1,
    },
    "batches are read, and the engine is told the micro-batch": {
        "tests": [SpeedTest(n_prompt=10, n_gen=0, n_depth=9)], "repetitions": 1,
        "configurations": [settings(n_batch=4, n_ubatch=3, n_threads=2)],
    },
    "a delay passes before each test": {"tests": [PP, TG], "delay": 0.5, "repetitions": 1},
    "an engine is kept as long as it serves": {
        "configurations": [
            settings(n_ubatch=4), settings(n_ubatch=8, n_threads=3), settings(dtype="bfloat16"),
            settings(dtype="bfloat16", n_batch=4),
        ],
        "tests": [PP],
    },
    "the old engines are closed before a new one is loaded": {
        "configurations": MODELS, "tests": [PP], "peer": 1, "repetitions": 1,
    },
    "two engines take turns": {"tests": [PP], "peer": 3, "repetitions": 4},
    # what fails
    "memory that is not there for a room is asked for by each test": failing(
        OutOfMemory("no"), "start", 1, 3, tests=[DEEP_TG, DEEP],
    ),
    "so are positions that the model has not learned": failing(
        NO, "start", 1, tests=[DEEP_TG, DEEP],
    ),
    "a start": failing(OutOfMemory("too much"), "start", 2, tests=[TG, DEEP, PP]),
    "a prompt": failing(MemoryError(), "read", 2, tests=[PP, DEEP, PP]),
    "a rewind": failing(MemoryError("all of it"), "rewind", 3, tests=[TG, DEEP, PP]),
    "an allocator": failing(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate\nmore"), tests=[PP],
    ),
    "a pipe": failing(BrokenPipeError(32, "Broken pipe"), tests=[PP]),
    "a bug without words": failing(ValueError(), tests=[PP]),
    "a usage, before what is not": failing(NO, "step", tests=[TG, PP]),
    "after a failure the depth is read again": failing(
        MemoryError(), "step", 1, tests=[DEEP_TG, DEEP],
    ),
    "a model that does not load, once for all of its configurations": {
        "loads": {"broken": BROKEN}, "repetitions": 1,
        "configurations": [
            settings(model="broken"), settings(model="broken", n_ubatch=3), settings()
        ],
    },
    "an interrupt": failing(KeyboardInterrupt(), "step", 2, tests=[PP, TG]),
    "an interrupt while a row is written": {"writing": KeyboardInterrupt()},
    "a row that cannot be written": {"writing": BrokenPipeError()},
    # a peer that fails, and one that is not loaded
    "a peer that does not load": {"tests": [PP], "peer": NO},
    "a peer that fails late": {"tests": [PP], "peer": raising(RuntimeError("x"), "read", 2)},
    "ours did not load": {"tests": [PP], "peer": 1, "loads": {"tiny": BROKEN}},
    "ours did not load and its headers are known": {
        "tests": [PP], "peer": 1, "loads": {"tiny": BROKEN},
        "known": lambda chosen: info(model_type=f"{chosen.model} 70B F16", load_s=None),
    },
    # engines whose work is known
    "work and the roofline": {"engine": counting, "tests": [PP], "ceilings": CEILINGS},
    "without ceilings": {"engine": counting, "tests": [PP]},
    "ceilings for an engine whose work is not known": {"tests": [PP], "ceilings": CEILINGS},
    "ceilings of each dtype and number of threads, with room for the longest test": {
        "engine": counting, "tests": [PP, SpeedTest(n_prompt=0, n_gen=1, n_depth=40)],
        "ceilings": CEILINGS, "repetitions": 1, "configurations": [
            *(settings(model=name, dtype=dtype) for dtype in ("float32", "float64")
              for name in ("one", "other")),
            settings(n_threads=2), settings(n_threads=2, n_ubatch=3),
        ],
    },
    "on the device meta nothing is timed, shapes are computed once": {
        "engine": lambda clock, log, **of: counting(log=log, device="meta", **of),
        "ceilings": CEILINGS, "repetitions": 5,
    },
} | {
    f"activations of the peer{', like for like' * alike}{', rounded' * rounds}": {
        "engine": partial(counting, rounds=rounds),
        "tests": [PP], "configurations": [settings(), settings(activations="8")],
        "like_for_like": alike, "repetitions": 1,
    }
    for alike in (False, True) for rounds in (False, True)
}  # fmt: skip


def logged(clock, log, *, engine=None, trouble=None, peer=None, loads=(), ceilings=None,
           writing=None, **options):  # fmt: skip
    """`peer` is how slow the other engine is, why it does not load, or its trouble.

    `writing`: what comes of a row that is written.
    """

    def load(chosen):
        log.append(f"load {chosen.model} {chosen.dtype}")
        if chosen.model in loads:
            raise loads[chosen.model]
        if engine:
            return engine(clock, log=log, dtype=chosen.dtype)
        return FakeEngine(clock, log=log, trouble=trouble)

    def other(chosen):
        log.append(f"load {chosen.model} of the peer")
        if isinstance(peer, Exception):
            raise peer
        how = {"slow": peer} if isinstance(peer, int) else {"trouble": peer}
        return FakeEngine(clock, log=log, name="transformers", **how)

    def asked(device, precision, reads):
        log.append(f"ceilings of {precision.dtype}, {reads} bytes" if ceilings else "no ceilings")
        made = sum(line.startswith("ceilings of") for line in log)
        return ceilings and dataclasses.replace(ceilings, threads=made)

    def on_row(row):
        said = f"= {row.number} {row.test.name} by {row.engine}"
        if row.engine_version is not None:
            said += f" ({row.engine_version or 'no version'}, {row.model_type})"
        said += " in shapes" * row.meta + f", activations {row.settings.activations}"
        if writing:
            log.append(f"{said}: {type(writing).__name__}")
            raise writing
        if row.error:
            error = (row.error_code, row.error_kind, row.error)
            log.append(f"{said}: {error} {row.hint or ''}".rstrip())
            return
        times = f"first {row.samples_ttft_ns}, tokens {row.samples_token_ns}"
        log.append(f"{said}: {row.samples_ns}, {times}")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row.test_time)
        if row.flops:
            bound = f"{row.roofline_ns} ns" if row.roofline_ns else "no roofline"
            log.append(f"  {row.flops} FLOPs, {bound}")
        if row.meta:
            assert row.prefill_resident_bytes is row.decode_resident_bytes is None
            log.append(f"  {row.estimated_memory_bytes} bytes")
        if row.against_ratio:
            log.append(f"  against the peer {row.against_ratios} {' '.join(row.against_order)}")

    rows = []
    try:
        report, _ = swept(
            load, peer=other if peer else None, ceilings=asked, on_status=log.append,
            on_row=lambda row: rows.append(row) or on_row(row), **options,
        )  # fmt: skip
    except BrokenPipeError:
        log.append("raised")
        return
    assert report.rows == tuple(rows)
    made = sum(line.startswith("ceilings of") for line in log)
    assert [one.threads for one in report.ceilings] == list(range(1, made + 1))
    paired = [row.against_ratios for row in rows if row.against_ratio]
    assert [pair.ratios for pair in report.against] == paired
    log += ["interrupted"] * report.interrupted


def test_sweeps(monkeypatch, as_written):
    found = {}
    for name, case in CASES.items():
        log = found[name] = []
        monkeypatch.setattr(module, "sleep", lambda s, log=log: log.append(f"sleep {s}"))
        logged(watch(monkeypatch), log, **case)
    as_written(Path(__file__).parent / "sweeps.txt", found)


def costing(clock, *costs, **how):
    """An engine that takes so many nanoseconds for each prompt or token."""
    engine, left = FakeEngine(clock, **how), iter(costs)
    engine.read = engine.step = lambda ids: setattr(clock, "now", clock.now + next(left))
    return engine


def test_statistics_are_those_of_a_hand_computation(monkeypatch):
    clock = watch(monkeypatch)
    _, [one] = swept(lambda chosen: FakeEngine(clock), tests=[TG], repetitions=1)
    assert (one.stddev_ns, one.stddev_ts, one.avg_ts) == (0, 0, 1e7)
    assert one.samples_token_ns == (100,) * 2
    _, [one] = swept(lambda chosen: costing(clock, 300, 100), tests=[TG], repetitions=1)
    assert (one.token_p50_ns, one.token_p90_ns, one.token_p99_ns) == (200, 280, 298)
    one = dataclasses.replace(TG, n_gen=1)
    _, [one] = swept(lambda chosen: FakeEngine(clock), tests=[one], repetitions=1)
    assert (one.token_p50_ns, one.token_p99_ns) == (100, 100)
    _, [row] = swept(lambda chosen: costing(clock, 100, 250, 400), tests=[PP], repetitions=3)
    assert row.samples_ns == row.samples_ttft_ns == (100, 250, 400)
    rates = [8e9 / 100, 8e9 / 250, 8e9 / 400]  # tokens per second of each run
    assert row.samples_ts == pytest.approx(rates)
    assert row.avg_ts == pytest.approx(mean(rates))
    assert row.avg_ts != pytest.approx(8e9 / row.avg_ns)  # not tokens by mean time
    apart = sum((rate - mean(rates)) ** 2 for rate in rates)
    assert row.stddev_ts == pytest.approx((apart / 2) ** 0.5)
    assert (row.avg_ns, row.stddev_ns, row.token_p50_ns) == (250, 150, None)
    report, _ = swept(
        lambda chosen: costing(clock, 10, 20, 40), tests=[PP], repetitions=3,
        peer=lambda chosen: costing(clock, 20, 10, 40, name="transformers"),
    )  # fmt: skip
    [pair] = report.against
    assert pair.ratios == (2.0, 0.5, 1.0)  # theirs in ns ÷ ours: in tokens per second ours ÷ theirs
    assert (pair.median, pair.lowest, pair.highest) == (1.0, 0.5, 2.0)


def test_ids_are_those_of_any_engine_with_bos_in_front():
    held = []
    for bos in (3, None):
        engine = FakeEngine(bos=bos)
        engine.close = lambda engine=engine: held.append(engine.held)
        swept(lambda chosen, engine=engine: engine, tests=[SpeedTest(n_prompt=6, n_gen=4)])
    ours, theirs = held
    assert ours[0] == ours[6] == 3
    differ = {n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b}
    assert differ <= {0, 6}


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_nothing_is_collected_within_a_run(error):
    seen = []

    def step(word):
        if word == "step":
            seen.append(gc.isenabled())
            if error:
                raise error

    swept(lambda chosen: FakeEngine(trouble=step), tests=[TG], repetitions=1)
    assert seen == [False] * len(seen) != []
    assert gc.isenabled()


def greedy(memory):
    """Holds 200 MiB while it reads, 50 while it writes, 300 while it starts."""
    held = {"start": 300, "read": 200, "step": 50}
    load = PhasePeak(phase="load", resident_bytes=5, device_bytes=None)
    return FakeEngine(
        trouble=lambda word: memory.hold(held.get(word, 0)), load_peak=load, base_bytes=3
    )


def test_each_phase_has_its_own_peak_and_a_depth_is_read(monkeypatch):
    tests = [SpeedTest(n_prompt=8, n_gen=2), TG, SpeedTest(n_prompt=0, n_gen=2, n_depth=4)]
    memory = FakeProcess(monkeypatch)
    for warmup in (False, True):
        _, rows = swept(lambda c: greedy(memory), tests=tests, warmup=warmup)
        found = [
            (row.load_resident_bytes, row.prefill_resident_bytes, row.decode_resident_bytes)
            for row in rows
        ]
        whole, text = (5, 300 * MIB, 150 * MIB), (5, None, 150 * MIB)  # nothing was read
        assert found == [whole, text, whole]
        # the most of the whole test, its start included
        assert [row.peak_memory_bytes for row in rows] == [400 * MIB] * 3
        assert all(row.base_bytes == 3 for row in rows)
        assert all(row.load_device_bytes is row.decode_device_bytes is None for row in rows)
    # memory of two engines in one process is in no row
    _, rows = swept(lambda c: greedy(memory), peer=lambda c: greedy(memory), tests=[PP])
    for row in rows:
        assert row.samples_ns
        assert row.peak_memory_bytes is row.prefill_resident_bytes is None
        assert row.base_bytes is row.load_resident_bytes is None


def test_marks_of_the_memory_are_read_outside_the_times(monkeypatch):
    clock = watch(monkeypatch)
    before = PhaseMemory.phase

    def slow(held, name):
        clock.now += 10**9
        return before(held, name)

    monkeypatch.setattr(PhaseMemory, "phase", slow)
    _, [row] = swept(
        lambda c: FakeEngine(clock), tests=[SpeedTest(n_prompt=8, n_gen=2, n_depth=3)], warmup=True
    )
    assert row.samples_ns == (80 + 200,) * 2
    assert (row.samples_ttft_ns, row.samples_token_ns) == ((80,) * 2, (100,) * 4)
