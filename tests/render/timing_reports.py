"""A report of `timing` for the tests of what is drawn from it, made by hand: it adds up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmcli.commands.timing import report as made
from llmcli.commands.timing.measure.clock import over_layers, part_times
from llmcli.records.document import ViewCheck
from llmcli.records.machine import Cache, Ceilings, MachineLoad, MatrixRate, ReadRate
from llmcli.records.work import Cost

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
    device="cpu", dtype="float32", threads=2,
    reads=(
        ReadRate(nbytes=1 << 20, bytes_per_s=120e9, level="L2"),
        ReadRate(nbytes=16 << 20, bytes_per_s=60e9, level="L3"),
        ReadRate(nbytes=1 << 30, bytes_per_s=20e9, level="memory"),
    ),
    matrices=(
        MatrixRate(dtype="float32", flops_per_s=2e11, way="direct"),
        MatrixRate(dtype="bfloat16", flops_per_s=1.5e11, way="through float32"),
    ),
    caches=(Cache(level="L2", bytes=2 << 20), Cache(level="L3", bytes=32 << 20)), seconds=1.1,
)  # fmt: skip
idle = partial(
    MachineLoad, seconds=1.0, processors=2, others=0.0, stolen=0.0, load_average=None
)  # fmt: skip


def work(part: str, rows: int, layer: bool) -> Cost:
    """Of one call with `rows` rows."""
    if part in PRODUCTS or part == "head":
        rows = 1 if part == "head" else rows
        weights = 4_000_000 if layer else 20_000_000
        flops = rows * weights // 2
        return Cost(
            flops=flops, flops_full=flops, weights=weights, activations=rows * 4000,
            gemv=int(rows == 1), gemm=int(rows > 1),
        )  # fmt: skip
    if part == "attention":
        return Cost(flops=rows * 60_000, flops_full=rows * 120_000, cache=rows * 50_000)
    return Cost(activations=rows * 8000) if part in ("norm", "embed") else Cost()


def parts_of(name: str) -> list[tuple[int | None, str]]:
    """The parts of a phase with their layers, in the order of the forward pass."""
    inside = [(layer, part) for layer in range(LAYERS) for part in IN_LAYERS]
    return [(None, "embed"), *inside, (None, "head"), *[(None, "sample")] * (name == "decode")]


def pieces(name: str, calls: int, slow: dict[str, float]) -> tuple[made.Piece]:
    """Each call with its parts, its gap at the end."""
    found, now = [], 0.0
    for call in range(calls):
        for layer, part in (*parts_of(name), (None, "gaps")):
            seconds = GAP_S if part == "gaps" else SECONDS[part]
            seconds += slow.get(part, 0.0) / calls if layer == 2 else 0.0
            found.append(made.Piece(
                part=part, layer=layer, call=call, begin=now, seconds=seconds, host_s=seconds
            ))  # fmt: skip
            now += seconds
    return tuple(found)


def phase(name: str, tokens: int, past: int, **slow: float) -> made.PhaseTime:
    """`slow`: seconds more of these parts in layer 2."""
    calls, rows = (1, tokens) if name == "prefill" else (tokens, 1)
    run = pieces(name, calls, slow)
    works = {
        (part, layer): sum([work(part, rows, layer is not None)] * calls, Cost())
        for layer, part in parts_of(name)
    }
    order = ("embed", *IN_LAYERS, "head", "sample", "gaps")
    seconds = sum(piece.seconds for piece in run)

    def judged(part: made.PartTime) -> made.PartTime:
        bound = reached = None
        if part.part in (*PRODUCTS, "head"):
            bound, reached = "memory", 0.75
        elif part.part in ("attention", "norm"):
            bound, reached = "calls", 0.04
        return replace(
            part, share=part.seconds / seconds, bound=bound, of_bound=reached,
            nearest=reached and "memory",
        )  # fmt: skip

    parts = part_times(run, works, {}, order)
    return made.PhaseTime(
        name=name, tokens=tokens, past=past, calls=calls, seconds=seconds, bare_s=seconds / 1.014,
        parts=tuple(map(judged, parts)), totals=tuple(map(judged, over_layers(parts, order))),
        work=sum((time.work for time in parts), Cost()),
        overhead=overhead(*(1 + 0.004 * at for at in range(-1, 9))),
        peak=700 << 20, pieces=run,
        gemv_s=sum(time.seconds for time in parts if time.work.gemv),
        gemm_s=sum(time.seconds for time in parts if time.work.gemm),
    )  # fmt: skip


def overhead(*ratios: float) -> made.Overhead:
    """Of pairs whose bare run takes a second."""
    return made.Overhead.of(ratios, (1.0,) * len(ratios))


def timing_report(**changes) -> made.TimingReport:
    """Twelve tokens read and eight written by a model of four layers."""
    fields = {
        "prompt_tokens": 12, "dtype": "float32",
        "stages": (
            made.Stage(name="import torch", seconds=1.2),
            made.Stage(name="read the headers", seconds=0.021),
            made.Stage(name="load the weights", seconds=0.4, nbytes=100_000_000, peak=650 << 20),
            made.Stage(name="tokenize", seconds=0.0011),
        ),
        "phases": (phase("prefill", 12, 0), phase("decode", 8, 12)),
        "ceilings": CEILINGS, "base": 200 << 20, "peak": 700 << 20, "estimated": 490 << 20,
        "weight_bytes": 84_000_000, "working_set": 84_400_000,
        "machine_load": idle(threads=2),
        "checks": (
            ViewCheck(
                name="adds_up", words="parts and gaps add up to the wall time", value=0.001,
                tolerance=0.02,
            ),
        ),
    }  # fmt: skip
    return made.TimingReport(**(fields | changes))


def variant(name: str) -> made.TimingReport:
    """The report that a transcript names with `TIMED=`, of which one thing is different."""
    report = timing_report()
    prefill, decode = report.phases

    def totals(phase, chosen, **changed):
        return replace(phase, totals=tuple(
            replace(part, **changed) if chosen(part) else part for part in phase.totals
        ))  # fmt: skip

    def much():
        """Ten parts of 5 % and more, where seven stay whatever they take."""
        names, own = ("embed", "norm", "ffn_act", "residual"), 0.06 * prefill.seconds
        phase = totals(prefill, lambda part: part.part in names, seconds=own)
        seconds = sum(part.seconds for part in phase.totals)
        shared = tuple(replace(part, share=part.seconds / seconds) for part in phase.totals)
        return replace(phase, seconds=seconds, totals=shared)

    sets = (*CEILINGS.reads[:2], ReadRate(nbytes=32 << 20, bytes_per_s=41e9, level="L3"))
    with_phases = {
        "decode": (decode,),
        "slow": (phase("prefill", 12, 0, ffn_up=3e-4), decode),
        "wavering": (phase("prefill", 12, 0, residual=2e-5),),
        "far": (totals(
            decode, lambda part: part.bound == "memory", bound="kernel", of_bound=0.2
        ),),
        "costly": (replace(prefill, overhead=overhead(1.2, 1.3, 1.38, 1.5, 1.6)), decode),
        "straddling": (replace(decode, overhead=overhead(0.9, 1.1)),),
        "captured": (prefill, replace(
            decode, overhead=overhead(2.4, 2.5, 2.6), parts_scaled_by=0.4,
        )),
        "loose": (
            replace(prefill, overhead=overhead(1.014)),
            replace(decode, overhead=overhead(1.0, 1.2, 1.4)),
        ),
        "alike": (replace(decode, work=replace(decode.work, flops_full=decode.work.flops)),),
        "beyond": (totals(prefill, lambda part: part.part == "qkv", of_bound=14.7),),
        "behind": (replace(decode, totals=tuple(
            replace(part, host_s=part.seconds / 2) for part in decode.totals
        )),),
        "much": (much(), decode),
        "few": tuple(replace(one, totals=one.totals[:8]) for one in report.phases),
        "long": (replace(prefill, calls=3, tokens=4800),),
    }  # fmt: skip
    changed = {
        "cached": {"working_set": 7_590_000},
        "sets": {"ceilings": replace(CEILINGS, reads=(*sets, *CEILINGS.reads[2:]))},
        "exact": {"estimated": 500 << 20}, "no-peak": {"peak": None}, "no-base": {"base": None},
        "gpu": {"ceilings": replace(CEILINGS, device="cuda:0")},
        "nothing": {"phases": (), "checks": (), "interrupted": True},
        "cut": {"phases": (prefill,), "interrupted": True},
    }  # fmt: skip
    if name in with_phases:
        return replace(report, phases=with_phases[name])
    return replace(report, **changed[name]) if name else report
