"""A run as a file for Perfetto and chrome://tracing: Google's Trace Event Format, JSON.

Every event is a complete one (`"ph": "X"`) with its begin `ts` and its duration `dur` in
microseconds. Events of a thread nest and never overlap: Perfetto leaves out what does. So all
times are whole nanoseconds first, and written with three digits after the point. Neighbours, and
what is around them, share these boundaries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any

from llmcli.commands.timing.report import GAPS, PhaseTime, TimingReport
from llmcli.records.numbers import counted

PROCESS, RUN, ONCE = 1, 1, 2  # 0 is the idle process to Perfetto
EVENT_BYTES = 190  # of a part in the file, about


def trace_pieces(report: TimingReport, title: str, about: Mapping[str, Any]) -> Iterator[str]:
    """The text of the file, an event a line. `about` is kept with it, for people."""
    yield '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(dict(about)) + ","
    yield '\n"traceEvents": ['
    comma = "\n"
    for event in trace_events(report, title):
        yield comma + json.dumps(event)
        comma = ",\n"
    yield "\n]}\n"


def trace_size(layers: int, calls: int) -> int:
    """Bytes of the file, about: 13 parts a layer, some outside, and what is around them."""
    return (layers * 14 + 6) * calls * EVENT_BYTES


def trace_events(report: TimingReport, title: str) -> Iterator[dict[str, Any]]:
    """Names, what was done once, then each phase: one after another, as they were done.

    What measuring does between them (warming up, the other runs) is left out.
    """
    for kind, thread, name in (
        ("process_name", RUN, f"llmcli timing: {title}"),
        ("thread_name", RUN, f"run on {report.ceilings.device}"),
        ("thread_name", ONCE, "once, before it"),
    ):
        args: dict[str, Any] = {"name": name}
        yield {"name": kind, "ph": "M", "ts": 0, "pid": PROCESS, "tid": thread, "args": args}
    now = 0
    for stage in report.stages:
        end = now + _ns(stage.seconds)
        args = {} if stage.nbytes is None else {"bytes": stage.nbytes}
        yield event(stage.name, "stage", now, end, args, ONCE)
        now = end
    for phase in report.phases:
        yield from _phase(phase, now)
        now += _ns(phase.pieces[-1].end) - _ns(phase.pieces[0].begin)


def event(
    name: str, category: str, begin: int, end: int, args: Mapping[str, Any], thread: int = RUN
) -> dict[str, Any]:
    """A complete event: nanoseconds from the beginning of the trace."""
    return {
        "name": name, "cat": category, "ph": "X", "ts": begin / 1000, "dur": (end - begin) / 1000,
        "pid": PROCESS, "tid": thread, "args": dict(args),
    }  # fmt: skip


def _phase(phase: PhaseTime, start: int) -> Iterator[dict[str, Any]]:
    """The phase, its calls, their layers and parts: each before what it contains.

    A piece lasts until the next one begins. Gaps are left empty.
    """
    edges = [_ns(piece.begin) for piece in phase.pieces] + [_ns(phase.pieces[-1].end)]
    spans = [(start + begin - edges[0], start + end - edges[0]) for begin, end in pairwise(edges)]
    totals = {"tokens": phase.tokens, "past": phase.past, "calls": phase.calls}
    totals |= {"flops": phase.work.flops, "bytes": phase.work.bytes}
    name = f"{phase.name} of {counted(phase.tokens, 'token')}"
    yield event(name, "phase", spans[0][0], spans[-1][1], totals)
    work = {(part.part, part.layer): part.work for part in phase.parts}
    run = zip(phase.pieces, spans, strict=True)
    for call, group in groupby(run, key=lambda one: one[0].call):
        inside = list(group)
        yield event(f"call {call}", "call", inside[0][1][0], inside[-1][1][1], {"call": call})
        parts = [(piece, span) for piece, span in inside if piece.part != GAPS]
        many = Counter(piece.place for piece, _ in parts)
        for layer, found in groupby(parts, key=lambda one: one[0].layer):
            own, where = list(found), {"phase": phase.name, "call": call, "layer": layer}
            if layer is not None:
                yield event(f"layer {layer}", "layer", own[0][1][0], own[-1][1][1], where)
            for piece, (begin, end) in own:
                each, amounts = phase.calls * many[piece.place], {}
                if (done := work.get(piece.place)) is not None:
                    amounts = {"flops": _each(done.flops, each), "bytes": _each(done.bytes, each)}
                yield event(piece.part, "part", begin, end, where | amounts)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _each(amount: int, parts: int) -> float | int:
    return amount // parts if amount % parts == 0 else amount / parts
