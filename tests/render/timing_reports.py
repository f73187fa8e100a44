"""A report of `timing` for the tests of what is drawn from it, made by hand: it adds up."""

from __future__ import annotations

from dataclasses import replace

from llmcli.commands.timing import report as made
from llmcli.reports.ceilings import Ceilings, MatrixRate, ReadRate
from llmcli.reports.checks import ViewCheck
from llmcli.reports.work import PartWork

LAYERS = 4
PRODUCTS = ("qkv", "out", "ffn_up", "ffn_down")  # a weight each, in every layer
IN_LAYERS = ("norm", "qkv", "rope", "attention", "out", "ffn_up", "ffn_act", "ffn_down", "residual")
# seconds of a part in one layer in one call
SECONDS = {
    "embed": 2e-5, "norm": 3e-5, "qkv": 2e-4, "rope": 4e-5, "attention": 1.5e-4, "out": 1e-4,
    "ffn_up": 4e-4, "ffn_act": 2e-5, "ffn_down": 2e-4, "residual": 1e-5, "head": 1e-3,
    "sample": 5e-5,
}  # fmt: skip
GAP_S = 4e-5  # in each call

CEILINGS = Ceilings(
    device="cpu", threads=2,
    reads=(
        ReadRate(nbytes=1 << 20, bytes_per_s=120e9, level="L2"),
        ReadRate(nbytes=16 << 20, bytes_per_s=60e9, level="L3"),
        ReadRate(nbytes=1 << 30, bytes_per_s=20e9, level="memory"),
    ),
    matrices=(
        MatrixRate(dtype="float32", flops_per_s=2e11, way="direct"),
        MatrixRate(dtype="bfloat16", flops_per_s=1.5e11, way="through float32"),
    ),
    caches=(("L2", 2 << 20), ("L3", 32 << 20)), seconds=1.1,
)  # fmt: skip


def work(part: str, rows: int, layer: bool) -> PartWork:
    """Of one call with `rows` rows."""
    if part in PRODUCTS or part == "head":
        rows = 1 if part == "head" else rows
        weights = 4_000_000 if layer else 20_000_000
        flops = rows * weights // 2
        return PartWork(
            flops=flops, flops_full=flops, weights=weights, activations=rows * 4000,
            gemv=int(rows == 1), gemm=int(rows > 1),
        )  # fmt: skip
    if part == "attention":
        return PartWork(flops=rows * 60_000, flops_full=rows * 120_000, cache=rows * 50_000)
    return PartWork(activations=rows * 8000) if part in ("norm", "embed") else PartWork()


def bound(part: str) -> tuple[str | None, float | None]:
    if part in PRODUCTS or part == "head":
        return "memory", 0.75
    if part in ("attention", "norm"):
        return "calls", 0.04
    return None, None


def part_time(part: str, layer: int | None, calls: int, rows: int, slow: float) -> made.PartTime:
    waits, reached = bound(part)
    one = work(part, rows, layer is not None)
    seconds = SECONDS[part] * calls + slow
    return made.PartTime(
        part=part, layer=layer, seconds=seconds, host_s=seconds, calls=calls,
        work=sum([one] * calls, PartWork()), bound=waits, of_bound=reached,
        nearest=None if reached is None else "memory",
    )  # fmt: skip


def spans(name: str, calls: int, slow: dict[tuple[int, str], float]) -> tuple[made.Span, ...]:
    """Each call with its parts in the order of the forward pass, its gap at the end."""
    out: list[made.Span] = []
    now = 0.0
    for call in range(calls):
        inside: list[made.Span] = []
        begin = now
        order = [(None, "embed")]
        order += [(layer, part) for layer in range(LAYERS) for part in IN_LAYERS]
        order += [(None, "head"), *([(None, "sample")] if name == "decode" else [])]
        for layer, part in order:
            more = slow.get((layer, part), 0.0) / calls if layer is not None else 0.0
            seconds = SECONDS[part] + more
            inside.append(
                made.Span(phase=name, call=call, layer=layer, part=part, begin=now, seconds=seconds)
            )
            now += seconds
        now += GAP_S
        whole = made.Span(
            phase=name, call=call, layer=None, part=None, begin=begin, seconds=now - begin
        )
        out += [whole, *inside]
    return tuple(out)


def phase(name: str, tokens: int, past: int, slow: dict[tuple[int, str], float]) -> made.PhaseTime:
    """`slow`: seconds more of a (layer, part)."""
    calls, rows = (1, tokens) if name == "prefill" else (tokens, 1)
    parts = [part_time("embed", None, calls, rows, 0.0)]
    for layer in range(LAYERS):
        parts += [
            part_time(part, layer, calls, rows, slow.get((layer, part), 0.0)) for part in IN_LAYERS
        ]
    parts.append(part_time("head", None, calls, rows, 0.0))
    if name == "decode":
        parts.append(part_time("sample", None, calls, rows, 0.0))
    gaps = made.PartTime(
        part="gaps", layer=None, seconds=GAP_S * calls, host_s=GAP_S * calls, calls=calls,
        work=PartWork(),
    )  # fmt: skip
    parts.append(gaps)
    totals = []
    for part in ("embed", *IN_LAYERS, "head", "sample", "gaps"):
        own = [time for time in parts if time.part == part]
        if own:
            seconds = sum(time.seconds for time in own)
            totals.append(
                replace(
                    own[0], layer=None, seconds=seconds, host_s=seconds,
                    calls=sum(time.calls for time in own),
                    work=sum((time.work for time in own), PartWork()),
                )
            )  # fmt: skip
    seconds = sum(time.seconds for time in parts)
    products = {"gemv": 0.0, "gemm": 0.0}
    for time in parts:
        for kind in products:
            if getattr(time.work, kind):
                products[kind] += time.seconds
    ratios = tuple(1 + 0.004 * at for at in range(-1, 9))
    return made.PhaseTime(
        name="prefill" if name == "prefill" else "decode", tokens=tokens, past=past, calls=calls,
        seconds=seconds, bare_s=seconds / 1.014, parts=tuple(parts), totals=tuple(totals),
        gaps_s=gaps.seconds, work=sum((time.work for time in parts), PartWork()),
        overhead=made.Overhead(
            watched_s=tuple(seconds * ratio for ratio in ratios), bare_s=(seconds,) * len(ratios),
            ratios=ratios, median=1.014, lowest=0.996, highest=1.032, quartiles=(1.005, 1.023),
        ),
        peak=700 << 20, spans=spans(name, calls, slow),
        gemv_s=products["gemv"], gemm_s=products["gemm"],
    )  # fmt: skip


def timing_report(slow: dict[tuple[int, str], float] | None = None, **changes) -> made.TimingReport:
    """Twelve tokens read and eight written by a model of four layers."""
    fields = {
        "prompt_tokens": 12, "batch": 1, "dtype": "float32",
        "stages": (
            made.Stage(name="import torch", seconds=1.2),
            made.Stage(name="read the headers", seconds=0.021),
            made.Stage(name="load the weights", seconds=0.4, nbytes=100_000_000, peak=650 << 20),
            made.Stage(name="tokenize", seconds=0.0011),
        ),
        "phases": (phase("prefill", 12, 0, slow or {}), phase("decode", 8, 12, slow or {})),
        "ceilings": CEILINGS, "base": 200 << 20, "peak": 700 << 20, "estimated": 490 << 20,
        "weight_bytes": 84_000_000, "working_set": 84_400_000,
        "checks": (
            ViewCheck(
                name="adds_up", words="parts and gaps add up to the wall time", value=0.001,
                tolerance=0.02,
            ),
        ),
        "splits": (
            made.SplitTime(
                phase="decode", part="attention", group_s=0.0048,
                pieces=(("scores", 0.002), ("mask and softmax", 0.003), ("mix", 0.001)),
            ),
        ),
    }  # fmt: skip
    return made.TimingReport(**(fields | changes))
