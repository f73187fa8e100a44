"""One row of a benchmark as a file has it, validated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from llmcli.commands.bench.report.comparison import Rate, Result
from llmcli.commands.bench.report.intervals import correlation
from llmcli.commands.bench.report.llama_names import count_words, size_words
from llmcli.commands.bench.report.results import Test
from llmcli.errors import UsageError

# What makes a test what it is, by llama-bench's names and then ours; n_prompt, n_gen and n_depth
# are in the test's own name. A file need not have all of them.
SETTINGS = (
    "engine", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "dtype", "weight_format", "product_format", "device", "n_batch", "n_ubatch",
    "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers",
    "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "use_mmap", "use_direct_io", "load_mode", "embeddings",
    "no_op_offload", "no_host", "repack",
)  # fmt: skip
HINT = "give what llama-bench or `llmcli bench` has written with -o json, jsonl or csv"
_MOST_TOKENS = 10**12  # of a test: what is beyond these is a mistake
_DOUBTFUL = 0.01  # between a mean and that of the runs
_SLOWEST, _FASTEST = 1e-9, 1e15  # tokens per second


def to_result(row: Mapping[str, Any], where: str) -> Result:
    """A row of any format; `where` it stands. Raises UsageError for what cannot be."""
    test = _test(row, where)
    facts = {field: _spelled(field, row[field]) for field in SETTINGS if field in row}
    error = _error(row.get("error"))
    if row.get("meta") in (True, 1, "1", "true") and not error:
        error = "not timed: on the meta device nothing is computed"
    rate = None if error else _rate(row, test, where)
    if rate is None and not error:
        error = "not timed"
    doubt = _doubt(row, rate, where)
    return Result(test=test.name, facts=facts, rate=rate, error=error, doubt=doubt)


def _doubt(row: Mapping[str, Any], rate: Rate | None, where: str) -> str:
    """Where a row's mean is not that of its runs, which are what is compared."""
    if rate is None or row.get("avg_ts") is None:
        return ""
    mean = _number(row, "avg_ts", where)
    if abs(mean - rate.mean) <= _DOUBTFUL * rate.mean:
        return ""
    return f"{where} says {mean:g} tokens per second, and its runs {rate.mean:g}"


def _test(row: Mapping[str, Any], where: str) -> Test:
    """Files from before llama-bench knew depths have none."""
    counts = [_count(row, field, where) for field in ("n_prompt", "n_gen")]
    depth = _count(row, "n_depth", where) if "n_depth" in row else 0
    if not any(counts):
        raise UsageError(f"{where} reads and writes no token", hint=HINT)
    return Test(n_prompt=counts[0], n_gen=counts[1], depth=depth)


def _count(row: Mapping[str, Any], field: str, where: str) -> int:
    number = _number(row, field, where)
    if number != int(number) or not 0 <= number <= _MOST_TOKENS:
        raise UsageError(f"{where}: `{field}` is no number of tokens: `{number:g}`", hint=HINT)
    return int(number)


def _number(row: Mapping[str, Any], field: str, where: str) -> float:
    """A finite number, also where the format knows only text."""
    if row.get(field) is None:
        raise UsageError(f"{where} has no `{field}`", hint=HINT)
    value = row[field]
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{where}: `{field}` is no number: `{_short(value)}`", hint=HINT)
    return number


def _rate(row: Mapping[str, Any], test: Test, where: str) -> Rate | None:
    """From the single runs where they are listed, else from mean and deviation.

    None for a mean of 0: nothing has run. The runs' times have more digits than their rates.
    """
    rates = _samples(row, "samples_ts", where)
    times = _samples(row, "samples_ns", where)
    if times:
        rates = [1e9 * test.tokens / ns for ns in times]
    for one in rates:  # numbers near the largest that there is cannot be averaged
        _checked(Rate(mean=one, std=0.0, runs=1), where)
    if rates:
        rate = Rate(
            mean=fmean(rates),
            std=stdev(rates) if len(rates) > 1 else 0.0,
            runs=len(rates),
            correlation=correlation(rates),
        )
        return _checked(rate, where)
    runs = _count(row, "runs", where) if row.get("runs") not in (None, "") else 0
    mean = _number(row, "avg_ts", where)
    std = _number(row, "stddev_ts", where) if row.get("stddev_ts") is not None else 0.0
    return _checked(Rate(mean=mean, std=std, runs=runs or None), where) if mean else None


def _samples(row: Mapping[str, Any], field: str, where: str) -> list[float]:
    """The runs, none where the format has no lists."""
    values = row.get(field)
    if not isinstance(values, list):
        return []
    numbers = [_number({field: value}, field, where) for value in values]
    if numbers and min(numbers) <= 0:
        raise UsageError(f"{where}: `{field}` has a run of `{min(numbers):g}`", hint=HINT)
    return numbers


def _checked(rate: Rate, where: str) -> Rate:
    if not (_SLOWEST <= rate.mean <= _FASTEST and 0 <= rate.std <= _FASTEST):
        said = f"{rate.mean:g} ± {rate.std:g}"
        raise UsageError(f"{where}: no test runs at `{said}` tokens per second", hint=HINT)
    return rate


def _error(value: Any) -> str:
    """Why a row did not run: words, or the object that `error` is in a document of ours."""
    if isinstance(value, Mapping):
        value = value.get("message") or "error"
    return str(value) if value else ""


def _spelled(field: str, value: Any) -> str:
    """One spelling for what JSON and CSV write differently."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    text = str(value).strip()
    if field == "model_filename":  # the same file lies elsewhere on another machine
        return re.split(r"[/\\]", text)[-1]
    if field in ("model_size", "model_n_params") and re.fullmatch(r"\d{1,18}", text):
        if int(text) == 0:  # no model was loaded
            return ""
        return (size_words if field == "model_size" else count_words)(int(text))
    return text


def build_of(row: Mapping[str, Any]) -> str:
    """`commit (number)` of the program that measured, empty where the row does not say."""
    commit, number = row.get("build_commit"), row.get("build_number")
    if not commit:
        return ""
    return str(commit) if number in (None, "") else f"{commit} ({number})"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "…"
