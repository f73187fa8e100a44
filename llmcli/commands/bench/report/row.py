"""A row of a benchmark: llama-bench's fields and ours, under the names that every format has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, quantiles, stdev
from typing import Any

from llmcli.commands.bench.report.comparison import Against
from llmcli.commands.bench.report.settings import Settings, device_words
from llmcli.errors import LlmcliError
from llmcli.records.document import APART, ViewCheck, derived
from llmcli.records.engines import FLASH, EngineInfo, SpeedTest, TimedRun
from llmcli.records.machine import Ceilings, MachineLoad
from llmcli.records.text import PhasePeak
from llmcli.records.work import Cost


def size_words(nbytes: int) -> str:
    """Bytes of a model as llama-bench writes them: `258.05 MiB`, `1.25 GiB`."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def count_words(number: int) -> str:
    """Parameters of a model as llama-bench writes them: `134.52 M`, `1.10 B`."""
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """What measured: the program's commit and number, and the machine that it ran on."""

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One test of one configuration by one engine: its runs, or why there are none.

    Fields are the keys of `-o json`, in that order: up to `samples_ts` llama-bench's, which are
    never null, then ours; `number` and `samples_token_ns` are in the document alone. Units:
    `…_bytes` bytes, `…_ns` nanoseconds, `…_ts` tokens per second. Fields with a default are
    llama-bench's defaults of options without effect here, or unknown.

    Program and model:
    `build_commit`, `build_number`: of llmcli; for a peer its version and 0.
    `backends`: the device's kind; for a peer followed by a comma and its name.
    `model_filename`: the model as the user named it.
    `model_size`: bytes of the weights in the formats that they are computed with.
    `bits_per_weight`: 8 × `model_size` ÷ `model_n_params`.
    `load_s`: seconds to open and load the model, without fetching it.

    Settings:
    `type_k`, `type_v`: types of cached keys and values; for `auto` those in use.
    `n_gpu_layers`: as requested, -1 for all. `gpu_layers`: those on a GPU; the head counts as one.
    `flash_attn`: as requested, -1 auto, 0 off, 1 on.
    `devices`: as requested. `device`: the one in use.
    `dtype`: of activations. `weight_format`: of weights. `product_format`: of what weights are
    multiplied with. A peer may have its file's names for them.

    Times:
    `test_time`: when the test began, RFC 3339 in UTC.
    `avg_ts`, `stddev_ts`: mean and sample standard deviation (n - 1) of the rates of the runs, of
    which there are `runs`; 0 without runs.
    `ttft_ns`: mean time to the logits of the prompt's last token.
    `token_p50_ns`, `token_p90_ns`, `token_p99_ns`: percentiles of the times of generated tokens.
    `samples_token_ns`: each generated token, run after run.

    Memory, null where two engines share the process:
    `base_bytes`: resident before the model was loaded.
    `…_resident_bytes`, `…_device_bytes`: the most that the process and its GPU held during `load`,
    `prefill` (reading the depth and prompts) and `decode`.
    `peak_memory_bytes`: the most during the whole test.
    `estimated_memory_bytes`: what the test would take, where only shapes were computed (`meta`).

    Work of one run:
    `flops`: of the pairs that the causal mask leaves. `flops_full`: of the whole rectangle of
    queries and keys.
    `bytes`: read and written.
    `roofline_ns`: the least time that the measured ceilings allow. `roofline_share`: that ÷ the
    mean time of a run.

    Comparison with a peer, in rows of llmcli:
    `against_ratios`: our tokens per second ÷ the peer's, pair by pair. `against_ratio`: their
    median. `against_order`: the engines in the order of their runs.

    `error_code`, `error_kind`, `error`: exit code, kind and message.
    `number`: place among the rows, from 1.
    """

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    cpu_mask: str = "0x0"
    cpu_strict: bool = False
    poll: int = 50
    type_k: str
    type_v: str
    n_gpu_layers: int
    n_cpu_moe: int = 0
    split_mode: str = "layer"
    main_gpu: int = 0
    no_kv_offload: bool
    flash_attn: int
    devices: str
    tensor_split: str = "0.00"
    tensor_buft_overrides: str = "none"
    use_mmap: bool = True
    embeddings: bool
    no_op_offload: int = 0
    no_host: bool = False
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    engine: str
    engine_version: str | None
    device: str
    dtype: str
    weight_format: str | None
    product_format: str | None
    gpu_layers: int | None
    bits_per_weight: float | None
    load_s: float | None
    runs: int
    ttft_ns: int | None
    token_p50_ns: int | None
    token_p90_ns: int | None
    token_p99_ns: int | None
    peak_memory_bytes: int | None = None
    base_bytes: int | None = None
    load_resident_bytes: int | None = None
    load_device_bytes: int | None = None
    prefill_resident_bytes: int | None = None
    prefill_device_bytes: int | None = None
    decode_resident_bytes: int | None = None
    decode_device_bytes: int | None = None
    estimated_memory_bytes: int | None = None
    flops: int | None = None
    flops_full: int | None = None
    bytes: int | None = None
    roofline_ns: int | None = None
    roofline_share: float | None = None
    against_ratio: float | None = None
    meta: bool = False
    error_code: int | None = None
    error_kind: str | None = None
    error: str | None = None
    samples_ttft_ns: tuple[int, ...]
    against_ratios: tuple[float, ...] = ()
    against_order: tuple[str, ...] = ()
    number: int
    samples_token_ns: tuple[int, ...]
    settings: Settings = field(metadata=APART)
    info: EngineInfo = field(metadata=APART)
    hint: str | None = field(default=None, metadata=APART)

    @property
    def test(self) -> SpeedTest:
        """The test of this row."""
        return SpeedTest(n_prompt=self.n_prompt, n_gen=self.n_gen, n_depth=self.n_depth)

    @classmethod
    def of(
        cls,
        number: int,
        settings: Settings,
        test: SpeedTest,
        info: EngineInfo,
        build: BuildInfo,
        test_time: str,
        runs: Sequence[TimedRun] = (),
        *,
        peaks: Sequence[PhasePeak] = (),
        work: Cost | None = None,
        roofline_ns: float | None = None,
        error: LlmcliError | None = None,
        **more: Any,
    ) -> Row:
        """What was requested, what ran, and the statistics of its runs.

        `more`: fields of the row by name.
        """
        times = [run.total for run in runs]
        rates = tuple(1e9 * test.tokens / ns for ns in times)
        first = tuple(run.first for run in runs if run.first is not None)
        tokens = tuple(ns for run in runs for ns in run.tokens)
        # a percentile between two values is interpolated
        cuts = quantiles(tokens, n=100, method="inclusive") if len(tokens) > 1 else [*tokens] * 99
        p50, p90, p99 = (round(cuts[percent - 1]) if cuts else None for percent in (50, 90, 99))
        found = vars(settings) | vars(test) | vars(info) | vars(build)
        for peak in peaks:
            found[f"{peak.phase}_resident_bytes"] = peak.resident_bytes
            found[f"{peak.phase}_device_bytes"] = peak.device_bytes
        found |= {
            "model_filename": settings.model,
            "type_k": settings.type_k if settings.type_k != "auto" else info.type_k,
            "type_v": settings.type_v if settings.type_v != "auto" else info.type_k,
            "flash_attn": FLASH.get(settings.flash_attn, -1),
            "devices": device_words(settings.device),
            "bits_per_weight": info.bits_per_weight,
        }
        if work is not None:
            found |= {"flops": work.flops, "flops_full": work.flops_full, "bytes": work.bytes}
        if error is not None:
            more |= {"error_code": error.code, "error_kind": error.kind}
            more |= {"error": error.message, "hint": error.hint}
        if info.engine != "llmcli":  # a reader that groups rows never takes two engines for one
            found["backends"] = f"{info.backends},{info.engine}"
            found |= {"build_commit": info.engine_version or info.engine, "build_number": 0}
        names = [one.name for one in fields(cls)]
        return cls(
            **{name: value for name, value in found.items() if name in names},
            number=number,
            settings=settings,
            info=info,
            test_time=test_time,
            # cut off, as llama-bench does; the rate is the mean of rates, not tokens by mean time
            avg_ns=int(fmean(times)) if times else 0,
            stddev_ns=int(stdev(times)) if len(times) > 1 else 0,
            avg_ts=fmean(rates) if rates else 0.0,
            stddev_ts=stdev(rates) if len(rates) > 1 else 0.0,
            samples_ns=tuple(times),
            samples_ts=rates,
            runs=len(times),
            ttft_ns=int(fmean(first)) if first else None,
            token_p50_ns=p50,
            token_p90_ns=p90,
            token_p99_ns=p99,
            samples_ttft_ns=first,
            samples_token_ns=tokens,
            roofline_ns=None if roofline_ns is None else round(roofline_ns),
            roofline_share=None if roofline_ns is None or not times else roofline_ns / fmean(times),
            **more,
        )


# the fields of a row and their types as declared, `float` of `float | None`
KINDS = {one.name: str(one.type).partition(" ")[0] for one in fields(Row)}
KEYS = tuple(KINDS)[: list(KINDS).index("number")]
LISTS = tuple(name for name in KEYS if KINDS[name].startswith("tuple"))  # in JSON alone
THEIRS = KEYS[: KEYS.index("samples_ns")]
OURS = tuple(name for name in KEYS[KEYS.index("engine") :] if name not in LISTS)


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All rows in the order in which they were measured.

    `models`: those that were loaded, as documents describe them. `ceilings`: one for each device,
    number of threads and arithmetic. `checks`: whether the two engines of a comparison compute the
    same model. `machine_load`: what other programs took.
    """

    models: tuple[Mapping[str, Any], ...] = ()
    rows: tuple[Row, ...] = ()
    against: tuple[Against, ...] = ()
    ceilings: tuple[Ceilings, ...] = ()
    machine_load: MachineLoad | None = None
    checks: tuple[ViewCheck, ...] = ()
    interrupted: bool = False

    @derived
    def finish_reason(self) -> str:
        """`interrupted`, or `complete`."""
        return "interrupted" if self.interrupted else "complete"
