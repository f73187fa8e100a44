"""The fields of a benchmark's row as data: llama-bench's, in its order, then ours.

Every format is written from these lists. llama-bench's are those of its `-o` formats, so that
what reads its results reads ours; none of them is ever null. Times are nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from llmcli.commands.bench.report.llama_names import FLASH
from llmcli.commands.bench.report.results import BenchRow
from llmcli.records.text import PhasePeak

Kind = Literal["text", "integer", "boolean", "real", "integers", "reals", "texts"]
Value = str | int | bool | float | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """What measured: the program's commit and number, and the machine that it ran on."""

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str


@dataclass(frozen=True)
class Field:
    """One field: its name, its type, and its value for a row."""

    name: str
    kind: Kind
    value: Callable[[BenchRow, BuildInfo], Value]


def _constant(name: str, kind: Kind, value: Value) -> Field:
    """llama-bench's default of an option that has no effect here."""
    return Field(name, kind, lambda row, by: value)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that `percent` of them do not exceed, between two of them in proportion.

    None without any.
    """
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def device_words(device: str) -> str:
    """`CUDA0`, `none` (the CPU alone), `auto` …: what llama-bench calls a device."""
    if device == "cpu":
        return "none"
    kind, _, index = device.partition(":")
    return f"CUDA{index or 0}" if kind == "cuda" else {"mps": "Metal"}.get(kind, device)


def backend(row: BenchRow) -> str:
    """`CPU`, `CUDA` …: of the engine, or the requested one where none was loaded.

    `CPU,transformers` of a peer, as llama-bench joins several: a reader that groups rows by
    llama-bench's fields never takes two engines for one.
    """
    kind = row.settings.device.partition(":")[0]
    found = {"cuda": "CUDA", "mps": "Metal", "meta": "meta"}.get(kind, "CPU")
    if row.info is not None:
        found = row.info.backend
    return found if row.engine == "llmcli" else f"{found},{row.engine}"


def _commit(row: BenchRow, by: BuildInfo) -> str:
    """Of the engine: a peer's version, or its name where it is not known."""
    if row.engine == "llmcli":
        return by.build_commit
    return (row.info.version if row.info is not None else "") or row.engine


def _model_type(row: BenchRow) -> str:
    return row.settings.model if row.info is None else row.info.model_type


def _type(row: BenchRow, requested: str) -> str:
    return requested if requested != "auto" or row.info is None else row.info.type_k


def _bits(row: BenchRow) -> float | None:
    return None if row.info is None else row.info.bits_per_weight


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _first(row: BenchRow) -> int | None:
    """Cut off as `avg_ns` is, which it equals where nothing but a prompt is read."""
    return int(fmean(row.first_ns)) if row.first_ns else None


def _held(phase: str) -> tuple[Field, Field]:
    """The most that was held during a phase: resident, and on a GPU."""

    def found(row: BenchRow) -> PhasePeak | None:
        return next((peak for peak in row.peaks if peak.phase == phase), None)

    def resident(row: BenchRow, by: BuildInfo) -> int | None:
        return None if (peak := found(row)) is None else peak.resident_bytes

    def device(row: BenchRow, by: BuildInfo) -> int | None:
        return None if (peak := found(row)) is None else peak.device_bytes

    return (
        Field(f"{phase}_resident_bytes", "integer", resident),
        Field(f"{phase}_device_bytes", "integer", device),
    )


FIELDS: tuple[Field, ...] = (
    Field("build_commit", "text", _commit),
    Field("build_number", "integer", lambda row, by: by.build_number * (row.engine == "llmcli")),
    Field("cpu_info", "text", lambda row, by: by.cpu_info),
    Field("gpu_info", "text", lambda row, by: by.gpu_info),
    Field("backends", "text", lambda row, by: backend(row)),
    Field("model_filename", "text", lambda row, by: row.settings.model),
    Field("model_type", "text", lambda row, by: _model_type(row)),
    Field("model_size", "integer", lambda row, by: row.info.model_size if row.info else 0),
    Field("model_n_params", "integer", lambda row, by: row.info.model_n_params if row.info else 0),
    Field("n_batch", "integer", lambda row, by: row.settings.n_batch),
    Field("n_ubatch", "integer", lambda row, by: row.settings.n_ubatch),
    Field("n_threads", "integer", lambda row, by: row.settings.n_threads),
    _constant("cpu_mask", "text", "0x0"),
    _constant("cpu_strict", "boolean", False),
    _constant("poll", "integer", 50),
    Field("type_k", "text", lambda row, by: _type(row, row.settings.type_k)),
    Field("type_v", "text", lambda row, by: _type(row, row.settings.type_v)),
    Field("n_gpu_layers", "integer", lambda row, by: row.settings.n_gpu_layers),
    _constant("n_cpu_moe", "integer", 0),
    _constant("split_mode", "text", "layer"),
    _constant("main_gpu", "integer", 0),
    Field("no_kv_offload", "boolean", lambda row, by: row.settings.no_kv_offload),
    Field("flash_attn", "integer", lambda row, by: FLASH.get(row.settings.flash_attn, -1)),
    Field("devices", "text", lambda row, by: device_words(row.settings.device)),
    _constant("tensor_split", "text", "0.00"),
    _constant("tensor_buft_overrides", "text", "none"),
    _constant("use_mmap", "boolean", True),
    Field("embeddings", "boolean", lambda row, by: row.settings.embeddings),
    _constant("no_op_offload", "integer", 0),
    _constant("no_host", "boolean", False),
    Field("n_prompt", "integer", lambda row, by: row.test.n_prompt),
    Field("n_gen", "integer", lambda row, by: row.test.n_gen),
    Field("n_depth", "integer", lambda row, by: row.test.depth),
    Field("test_time", "text", lambda row, by: row.test_time),
    Field("avg_ns", "integer", lambda row, by: int(row.avg_ns)),
    Field("stddev_ns", "integer", lambda row, by: int(row.stddev_ns)),
    Field("avg_ts", "real", lambda row, by: row.avg_ts),
    Field("stddev_ts", "real", lambda row, by: row.stddev_ts),
)

# what llama-bench adds where a format has lists
SAMPLES: tuple[Field, ...] = (
    Field("samples_ns", "integers", lambda row, by: row.samples_ns),
    Field("samples_ts", "reals", lambda row, by: row.samples_ts),
)

OURS: tuple[Field, ...] = (
    Field("engine", "text", lambda row, by: row.engine),
    Field("engine_version", "text", lambda row, by: row.info.version if row.info else None),
    Field("device", "text", lambda row, by: (row.info or row.settings).device),
    Field("dtype", "text", lambda row, by: (row.info or row.settings).dtype),
    Field("weight_format", "text", lambda row, by: row.info.weight_format if row.info else None),
    Field("product_format", "text", lambda row, by: row.info.product_format if row.info else None),
    Field("gpu_layers", "integer", lambda row, by: row.info.n_gpu_layers if row.info else None),
    Field("bits_per_weight", "real", lambda row, by: _bits(row)),
    Field("load_s", "real", lambda row, by: row.info.load_s if row.info else None),
    # lists are in JSON alone, and a mean with its deviation says little without their number
    Field("runs", "integer", lambda row, by: len(row.samples_ns)),
    Field("ttft_ns", "integer", lambda row, by: _first(row)),
    Field("token_p50_ns", "integer", lambda row, by: _rounded(percentile(row.token_ns, 50))),
    Field("token_p90_ns", "integer", lambda row, by: _rounded(percentile(row.token_ns, 90))),
    Field("token_p99_ns", "integer", lambda row, by: _rounded(percentile(row.token_ns, 99))),
    Field("peak_memory_bytes", "integer", lambda row, by: row.peak_memory_bytes),
    Field("base_bytes", "integer", lambda row, by: row.info.base_bytes if row.info else None),
    *_held("load"),
    *_held("prefill"),
    *_held("decode"),
    Field("estimated_memory_bytes", "integer", lambda row, by: row.estimated_memory_bytes),
    Field("flops", "integer", lambda row, by: row.work.flops if row.work else None),
    Field("flops_full", "integer", lambda row, by: row.work.flops_full if row.work else None),
    Field("bytes", "integer", lambda row, by: row.work.bytes if row.work else None),
    Field("roofline_ns", "integer", lambda row, by: _rounded(row.roofline_ns)),
    Field("roofline_share", "real", lambda row, by: row.roofline_share),
    Field("against_ratio", "real", lambda row, by: row.against.median if row.against else None),
    Field("meta", "boolean", lambda row, by: row.meta),
    Field("error_code", "integer", lambda row, by: row.error[0] if row.error else None),
    Field("error_kind", "text", lambda row, by: row.error[1] if row.error else None),
    Field("error", "text", lambda row, by: row.error[2] if row.error else None),
)

OUR_SAMPLES: tuple[Field, ...] = (
    Field("samples_ttft_ns", "integers", lambda row, by: row.first_ns),
    Field("against_ratios", "reals", lambda row, by: row.against.ratios if row.against else ()),
    Field("against_order", "texts", lambda row, by: row.against.order if row.against else ()),
)
