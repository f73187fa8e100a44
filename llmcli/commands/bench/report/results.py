"""Rows of a benchmark, with llama-bench's fields and ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Literal

from llmcli.commands.bench.report.intervals import interval_of_pairs
from llmcli.commands.bench.report.llama_names import CACHE_OF
from llmcli.records.ceilings import Ceilings
from llmcli.records.checks import ViewCheck
from llmcli.records.machine_load import MachineLoad
from llmcli.records.text import PhasePeak
from llmcli.records.work import PartWork

EngineName = Literal["llmcli", "transformers", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class Test:
    """`n_prompt` tokens read at once, then `n_gen` one by one, after `depth` cached ones."""

    n_prompt: int
    n_gen: int
    depth: int

    @property
    def name(self) -> str:
        """`pp512`, `tg128`, `pp512+tg128`, with ` @ d1024` behind where there is a depth."""
        both = [f"{word}{n}" for word, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(both) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """Tokens of one run that are counted."""
        return self.n_prompt + self.n_gen

    @property
    def capacity(self) -> int:
        """Tokens that the cache must have room for."""
        return self.depth + self.tokens


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One configuration of a sweep: what llama-bench's options request, in our words.

    `model` as the user named it. `n_gpu_layers`, `type_k` … are kept as requested: what is
    not supported makes the row an error. `device` is `auto`, `cpu`, `cuda:0` or `meta`;
    `activations` are their bits.
    """

    model: str
    device: str
    dtype: str
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    flash_attn: str
    no_kv_offload: bool
    embeddings: bool
    activations: str = "auto"

    @property
    def chunk(self) -> int:
        """Tokens of one forward call: `n_ubatch`, which is at most `n_batch` (llama.cpp's rule)."""
        return min(self.n_ubatch, self.n_batch)

    def pieces(self, tokens: int) -> list[int]:
        """A prompt in pieces of `n_batch`; each is read in calls of `chunk`."""
        whole, rest = divmod(tokens, self.n_batch)
        return [self.n_batch] * whole + [rest] * (rest > 0)

    def same_engine(self, other: Settings) -> bool:
        """Whether one engine serves both: they differ at most in what `Engine.start` takes."""
        return self == replace(
            other, n_batch=self.n_batch, n_ubatch=self.n_ubatch, n_threads=self.n_threads
        )


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What a benchmark measures: every test of every configuration, in that order.

    `default` is the configuration without any option. `against`: the peer that runs the same
    tests in turns with us. Weights are random where `random_weights` says so, drawn from `seed`
    as the tokens are. `like_for_like`: of two configurations that differ in their `activations`
    alone the second goes where the model has no products for which they are rounded.
    """

    configurations: tuple[Settings, ...]
    tests: tuple[Test, ...]
    default: Settings
    repetitions: int = 5
    warmup: bool = True
    delay_s: float = 0.0
    seed: int = 0
    against: EngineName | None = None
    like_for_like: bool = False
    ceilings: bool = True
    random_weights: bool = False
    quantize: Literal["auto", "none", "int8", "int4"] = "auto"
    revision: str | None = None
    offline: bool = False
    verbose: bool = False

    @property
    def longest(self) -> Test:
        """The test that needs the most room."""
        return max(self.tests, key=lambda test: test.capacity)

    @property
    def shapes_only(self) -> bool:
        """Whether nothing is loaded: every configuration is on the device `meta`."""
        return all(settings.device == "meta" for settings in self.configurations)


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What the engine says of itself and of the model that it has loaded.

    `type_k`, `backend`, `device` are those in force. `dtype` is that of the activations,
    `weight_format` and `product_format` are those of weights and of what they are multiplied with;
    another engine may call them as its file does. `model_size` are bytes of the weights as
    they are computed with, `bits_per_weight` of the same. `load_s` is None where nothing was
    loaded (then all this is known from the model's headers) or where loading it was no reading
    of a file. `base_bytes` were resident before it was loaded, `load_peak` the most during it.
    """

    engine: EngineName
    version: str
    model_type: str
    model_size: int
    model_n_params: int
    backend: str
    device: str
    dtype: str
    weight_format: str
    product_format: str
    type_k: str
    n_gpu_layers: int
    load_s: float | None
    bits_per_weight: float
    base_bytes: int | None = None
    load_peak: PhasePeak | None = None

    @property
    def formats(self) -> str:
        """`float32`, or `Q4_1 + Q8_0, int8 products, float32 activations, bf16 cache`."""
        found = [self.weight_format]
        if self.product_format != self.weight_format:
            found += [f"{self.product_format} products", f"{self.dtype} activations"]
        if CACHE_OF.get(self.weight_format) != self.type_k:
            found.append(f"{self.type_k} cache")
        return ", ".join(found)


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One test of one configuration by one engine: its runs, or why there are none.

    `samples_ns` has a run each. `first_ns` are the times to the first logits of runs that read a
    prompt; `token_ns` those of every single generated token, run after run. `work` is of one run.
    `error` is (exit code, kind, message) of a row that could not run, `hint` what can be done
    about it; its `info` is what is known of the model from its headers, None where they cannot
    be read.

    `peak_memory_bytes` is the most that this process (or its GPU) held during the test, `peaks`
    the most of `load`, `prefill` (what is read: the depth, prompts) and `decode`. There are none
    where two engines share the process. `estimated_memory_bytes`: what a test of which only
    shapes were computed would take. `against`: of our row, where a peer ran the same test.
    """

    number: int
    settings: Settings
    test: Test
    engine: EngineName
    test_time: str
    info: EngineInfo | None = None
    samples_ns: tuple[int, ...] = ()
    first_ns: tuple[int, ...] = ()
    token_ns: tuple[int, ...] = ()
    peak_memory_bytes: int | None = None
    peaks: tuple[PhasePeak, ...] = ()
    estimated_memory_bytes: int | None = None
    work: PartWork | None = None
    roofline_ns: float | None = None
    error: tuple[int, str, str] | None = None
    hint: str | None = None
    meta: bool = False
    against: Against | None = None

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each run."""
        return tuple(1e9 * self.test.tokens / ns for ns in self.samples_ns)

    @property
    def avg_ns(self) -> float:
        """Mean of the runs, 0 without any."""
        return fmean(self.samples_ns) if self.samples_ns else 0.0

    @property
    def stddev_ns(self) -> float:
        """Sample standard deviation (n − 1), 0 for less than two runs."""
        return stdev(self.samples_ns) if len(self.samples_ns) > 1 else 0.0

    @property
    def avg_ts(self) -> float:
        """Mean of the runs' rates (not tokens by mean time), 0 without any."""
        return fmean(self.samples_ts) if self.samples_ns else 0.0

    @property
    def stddev_ts(self) -> float:
        """Sample standard deviation of the rates, 0 for less than two runs."""
        return stdev(self.samples_ts) if len(self.samples_ns) > 1 else 0.0

    @property
    def roofline_share(self) -> float | None:
        """The lower bound of the time by the measured ceilings ÷ the mean time."""
        if self.roofline_ns is None or not self.samples_ns:
            return None
        return self.roofline_ns / self.avg_ns


@dataclass(frozen=True, kw_only=True)
class Against:
    """The same test by two engines, run in turns: ours ÷ theirs in tokens per second, pairwise.

    `quartiles` are the first and the third of the ratios, `of_means` is the ratio of the mean
    rates that the rows have. `order` is that of the runs, `number` that of our row.
    """

    test: Test
    peer: EngineName
    ratios: tuple[float, ...]
    median: float
    lowest: float
    highest: float
    order: tuple[EngineName, ...]
    number: int = 0
    quartiles: tuple[float, float] = (0.0, math.inf)
    of_means: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the true ratio lies with 95 % confidence; None of a single pair."""
        return interval_of_pairs(self.ratios)

    @property
    def undecided(self) -> bool:
        """Whether the runs leave open which engine is faster: 1 lies in the interval, if any."""
        low, high = self.interval or (1.0, 1.0)
        return low <= 1 <= high


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All rows in the order in which they were measured.

    `ceilings`: one for each device, number of threads and arithmetic. `checks`: whether the two
    engines of a comparison compute the same model. `machine_load`: what other programs took.
    """

    rows: tuple[BenchRow, ...]
    against: tuple[Against, ...] = field(default=())
    ceilings: tuple[Ceilings, ...] = field(default=())
    interrupted: bool = False
    checks: tuple[ViewCheck, ...] = field(default=())
    machine_load: MachineLoad | None = None

    @property
    def cpu_threads(self) -> int:
        """The most threads that computed on the CPU, 1 where none did."""
        found = [r.settings.n_threads for r in self.rows if r.info and r.info.device == "cpu"]
        return max(found, default=1)
