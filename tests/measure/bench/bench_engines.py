"""An engine that computes nothing: it logs its calls and turns a clock of its own."""

from contextlib import contextmanager
from types import SimpleNamespace

from llmcli.commands.bench.measure.sweep import Sweep
from llmcli.commands.bench.report.plan import OurOptions, Plan, RunOptions
from llmcli.commands.bench.report.row import BuildInfo
from llmcli.commands.bench.report.settings import Settings
from llmcli.measure import engines
from llmcli.records.engines import EngineInfo, SpeedTest
from llmcli.records.machine import Cache, Ceilings, MatrixRate, ReadRate


def watch(monkeypatch):
    """The clock that runs are timed with from now on: it stands unless an engine turns it."""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(engines, "perf_counter_ns", lambda: clock.now)
    return clock


def settings(**other):
    own = {"model": "tiny", "device": "cpu", "dtype": "float32", "n_threads": 1}
    return Settings(**(own | other))


def info(engine="llmcli", **other):
    return EngineInfo(
        **{
            "engine": engine, "engine_version": "1", "model_type": "llama 1M F16",
            "model_size": 2_000_000, "model_n_params": 1_000_000, "backends": "CPU",
            "device": "cpu", "dtype": "float32", "weight_format": "float32",
            "product_format": "float32", "type_k": "f32", "gpu_layers": 0, "load_s": 0.5,
        } | other
    )  # fmt: skip


CEILINGS = Ceilings(
    device="cpu", dtype="float32", threads=1, seconds=1.0,
    caches=(Cache(level="L2", bytes=100_000),), reads=(
        ReadRate(nbytes=50_000, bytes_per_s=4e9, level="L2"),
        ReadRate(nbytes=10**9, bytes_per_s=1e9, level="memory"),
    ),
    matrices=(MatrixRate(dtype="float32", flops_per_s=1e10),),
)  # fmt: skip


class FakeEngine:
    """10 ns a token that is read, 100 for one that is written; `trouble(word)` may raise.

    Its calls are written into `log`, with its name where it is not ours.
    """

    vocab, counter = 50, None

    def __init__(self, clock=None, *, name="llmcli", bos=None, trouble=None, log=None, slow=1,
                 **facts):  # fmt: skip
        self.clock = clock or SimpleNamespace(now=0)
        self.info, self.bos = info(name, **facts), bos
        self.log = [] if log is None else log
        self.held, self.room, self.inside = None, 0, 0
        self.trouble = trouble or (lambda word: None)
        self._slow = slow

    def _did(self, word, *about):
        name = "" if self.info.engine == "llmcli" else f"{self.info.engine}: "
        self.log.append("  " + name + " ".join(map(str, (word, *about))))
        self.trouble(word)

    def start(self, tokens, threads, chunk):
        self.held, self.room = None, 0
        self._did("start", tokens, threads, chunk)
        self.held, self.room = [], tokens

    @contextmanager
    def computing(self):
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def read(self, ids):
        self._did("read", len(ids), "after", len(self.held))
        self._add(ids)
        self.clock.now += 10 * len(ids) * self._slow

    def step(self, id):
        self._did("step", "after", len(self.held))
        self._add([id])
        self.clock.now += 100 * self._slow

    def rewind(self, tokens):
        self._did("rewind", "to", tokens)
        assert 0 <= tokens <= len(self.held)
        del self.held[tokens:]

    def close(self):
        self._did("close")
        self.held = None

    def _add(self, ids):
        assert self.held is not None, "not started"
        assert self.inside == 1, "every run is made in one context"
        assert all(0 <= id < self.vocab for id in ids)
        self.held += ids
        assert len(self.held) <= self.room, "no room"


TESTS = SpeedTest(n_prompt=8, n_gen=0), SpeedTest(n_prompt=0, n_gen=4)
BUILD = BuildInfo(build_commit="abc", build_number=1, cpu_info="A CPU", gpu_info="")


def all_tests(prompts, texts, both, depths):
    """Tests of these numbers of tokens, as the options order them."""
    each = [(n, 0) for n in prompts] + [(0, n) for n in texts] + both
    return [SpeedTest(n_prompt=p, n_gen=n, n_depth=depth) for depth in depths for p, n in each]


def planned(configurations=None, tests=TESTS, *, peer=None, like_for_like=False, repetitions=2,
            warmup=False, delay=0.0, seed=1, **ours):  # fmt: skip
    return Plan(
        configurations=tuple(configurations or [settings()]), tests=tuple(tests),
        default=settings(), like_for_like=like_for_like,
        runs=RunOptions(repetitions=repetitions, no_warmup=not warmup, delay=delay),
        ours=OurOptions(seed=seed, against=peer, **ours),
    )  # fmt: skip


def swept(load, *, on_row=None, on_status=lambda words: None, peer=None, ceilings=None, known=None,
          **plan):  # fmt: skip
    """(the report, the rows as they were handed out).

    Its `EngineLoader` is made of functions; without them no peer, no ceilings, no known headers.
    """
    rows = []
    loads = SimpleNamespace(
        models={}, checks={}, load=load, peer=peer,
        ceilings=ceilings or (lambda device, precision, reads: None),
        known=known or (lambda settings: None),
    )  # fmt: skip
    made = Sweep(
        planned(peer="transformers" if peer else None, **plan), loads, BUILD,
        on_row=on_row or rows.append, on_status=on_status,
    )  # fmt: skip
    return made.run(), rows
