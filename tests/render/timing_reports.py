"""A report of `timing` for the tests of what is drawn from it, made by hand: it adds up."""

from __future__ import annotations

from dataclasses import replace

from llmcli.commands.timing import report as made
from llmcli.records.ceilings import Ceilings, MatrixRate, ReadRate
from llmcli.records.checks import ViewCheck
from llmcli.records.work import PartWork

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


def parts_of(name: str) -> list[tuple[int | None, str]]:
    """The parts of a phase with their layers, in the order of the forward pass."""
    inside = [(layer, part) for layer in range(LAYERS) for part in IN_LAYERS]
    return [(None, "embed"), *inside, (None, "head"), *[(None, "sample")] * (name == "decode")]


def part_time(
    part: str, layer: int | None, calls: int, seconds: float, work: PartWork
) -> made.PartTime:
    waits = reached = None
    if part in PRODUCTS or part == "head":
        waits, reached = "memory", 0.75
    elif part in ("attention", "norm"):
        waits, reached = "calls", 0.04
    return made.PartTime(
        part=part, layer=layer, seconds=seconds, host_s=seconds, calls=calls, work=work,
        bound=waits, of_bound=reached, nearest=None if reached is None else "memory",
    )  # fmt: skip


def spans(name: str, calls: int, slow: dict[tuple[int | None, str], float]) -> list[made.Span]:
    """Each call with its parts, its gap at the end."""
    out, now = [], 0.0
    for call in range(calls):
        begin, inside = now, []
        for layer, part in parts_of(name):
            seconds = SECONDS[part] + slow.get((layer, part), 0.0) / calls
            inside.append(made.Span(
                phase=name, call=call, layer=layer, part=part, begin=now, seconds=seconds
            ))  # fmt: skip
            now += seconds
        now += GAP_S
        out += [replace(inside[0], layer=None, part=None, begin=begin, seconds=now - begin)]
        out += inside
    return out


def phase(
    name: str, tokens: int, past: int, slow: dict[tuple[int | None, str], float]
) -> made.PhaseTime:
    """`slow`: seconds more of a (layer, part)."""
    calls, rows = (1, tokens) if name == "prefill" else (tokens, 1)
    parts = [
        part_time(
            part, layer, calls, SECONDS[part] * calls + slow.get((layer, part), 0.0),
            sum([work(part, rows, layer is not None)] * calls, PartWork()),
        )
        for layer, part in parts_of(name)
    ]  # fmt: skip
    parts.append(part_time("gaps", None, calls, GAP_S * calls, PartWork()))
    totals = []
    for part in dict.fromkeys(time.part for time in parts):
        own = [time for time in parts if time.part == part]
        totals.append(part_time(
            part, None, sum(time.calls for time in own), sum(time.seconds for time in own),
            sum((time.work for time in own), PartWork()),
        ))  # fmt: skip
    seconds = sum(time.seconds for time in parts)
    ratios = tuple(1 + 0.004 * at for at in range(-1, 9))
    return made.PhaseTime(
        name=name, tokens=tokens, past=past, calls=calls, seconds=seconds, bare_s=seconds / 1.014,
        parts=tuple(parts), totals=tuple(totals), gaps_s=parts[-1].seconds,
        work=sum((time.work for time in parts), PartWork()),
        overhead=made.Overhead(
            watched_s=tuple(seconds * ratio for ratio in ratios), bare_s=(seconds,) * len(ratios),
            ratios=ratios, median=1.014, lowest=0.996, highest=1.032, quartiles=(1.005, 1.023),
        ),
        peak=700 << 20, spans=tuple(spans(name, calls, slow)),
        gemv_s=sum(time.seconds for time in parts if time.work.gemv),
        gemm_s=sum(time.seconds for time in parts if time.work.gemm),
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
    }  # fmt: skip
    return made.TimingReport(**(fields | changes))
