"""A phase as it is reported: the median run with a clock, held against the roof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from llmcli.anatomy.graph import Place, graph
from llmcli.anatomy.work import added
from llmcli.commands.timing.measure.bounds import Roof
from llmcli.commands.timing.measure.parts import (
    GAPS,
    Piece,
    in_order,
    over_layers,
    part_times,
    pieces,
    spans,
)
from llmcli.commands.timing.measure.run import PhaseName, Runs
from llmcli.commands.timing.measure.workload import Workload
from llmcli.commands.timing.report import Overhead, PartTime, PhaseTime
from llmcli.observe.ratios import paired
from llmcli.reports.work import PartWork


def phase_time(
    workload: Workload, name: PhaseName, runs: Runs, roof: Roof, *, trace: bool
) -> PhaseTime:
    """The median watched run of the phase, part by part; `trace` keeps its spans."""
    works = workload.works(name, runs.experts)
    model = graph(workload.model.config)
    run = list(pieces(runs.median.marks, model))
    order = in_order(model)
    parts = part_times(run, works, operations(pieces(runs.operations, model)), order)
    totals = over_layers(parts, order)
    each = workload.tokens if name == "prefill" else workload.new_tokens
    calls = workload.products(name)
    gemv_s, gemm_s = product_seconds(run, calls)
    return PhaseTime(
        name=name,
        tokens=workload.batch * each,
        past=0 if name == "prefill" else workload.tokens,
        calls=len(calls),
        seconds=runs.median.wall_s,
        bare_s=median_low(runs.bare_s),
        parts=_bounded(parts, roof),
        totals=_bounded(totals, roof),
        gaps_s=sum(part.seconds for part in totals if part.part == GAPS),
        work=added(works),
        overhead=overhead(runs.watched_s, runs.bare_s),
        peak=runs.peak,
        spans=tuple(spans(name, run)) if trace else (),
        gemv_s=gemv_s,
        gemm_s=gemm_s,
    )


def operations(counted: Iterable[Piece]) -> Counter[Place]:
    """How many each (part, layer) starts, of pieces that have them in the place of seconds."""
    found: Counter[Place] = Counter()
    for piece in counted:
        found[piece.place] += round(piece.seconds)
    return found


def product_seconds(
    run: Sequence[Piece], calls: Sequence[Mapping[Place, PartWork]]
) -> tuple[float, float]:
    """Seconds of products of a weight matrix with one row and with more, call by call.

    `calls` has for each forward call the parts with such products.
    """
    gemv_s = gemm_s = 0.0
    for piece in run:
        work = calls[piece.call].get(piece.place) if 0 <= piece.call < len(calls) else None
        if work is None:
            continue
        if work.gemm:
            gemm_s += piece.seconds
        else:
            gemv_s += piece.seconds
    return gemv_s, gemm_s


def overhead(watched_s: Sequence[float], bare_s: Sequence[float]) -> Overhead:
    """What looking costs, pair by pair."""
    ratios = paired(watched_s, bare_s)
    return Overhead(
        watched_s=tuple(watched_s),
        bare_s=tuple(bare_s),
        ratios=ratios.values,
        median=ratios.median,
        lowest=ratios.lowest,
        highest=ratios.highest,
        quartiles=ratios.quartiles,
    )


def _bounded(parts: Sequence[PartTime], roof: Roof) -> tuple[PartTime, ...]:
    return tuple(roof.bounded(part) for part in parts)
