"""A run as a file for Perfetto and chrome://tracing: Google's Trace Event Format, JSON.

Every event is a complete one (`"ph": "X"`) with its begin `ts` and its duration `dur` in
microseconds. Events of a thread nest and never overlap: Perfetto leaves out what does. So all
times are whole nanoseconds first, and written with three digits after the point.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from llmcli.commands.timing.report import GAPS, PhaseTime, TimingReport
from llmcli.records.numbers import counted

PROCESS, RUN, ONCE = 1, 1, 2  # 0 is the idle process to Perfetto
ROUNDING = 2  # nanoseconds by which the ends of neighbours may be off for rounding alone
EVENT_BYTES = 190  # of a part in the file, about


@dataclass(frozen=True)
class Event:
    """A complete event: nanoseconds from the beginning of the trace."""

    name: str
    category: str
    begin: int
    end: int
    args: Mapping[str, Any]
    thread: int = RUN

    def document(self) -> dict[str, Any]:
        """The event as the format has it."""
        return {
            "name": self.name,
            "cat": self.category,
            "ph": "X",
            "ts": self.begin / 1000,
            "dur": (self.end - self.begin) / 1000,
            "pid": PROCESS,
            "tid": self.thread,
            "args": dict(self.args),
        }


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
        yield Event(stage.name, "stage", now, end, args, ONCE).document()
        now = end
    for phase in report.phases:
        events = _snug(_phase(phase, now))
        yield from (event.document() for event in events)
        now = max((event.end for event in events), default=now)


def _phase(phase: PhaseTime, start: int) -> Iterator[Event]:
    """The phase, its calls, their layers and parts: each before what it contains.

    Gaps are left empty.
    """
    if not phase.pieces:
        return
    shift = start - _ns(phase.pieces[0].begin)

    def event(name: str, category: str, begin: float, end: float, **args: Any) -> Event:
        return Event(name, category, _ns(begin) + shift, _ns(end) + shift, args)

    yield event(
        f"{phase.name} of {counted(phase.tokens, 'token')}", "phase",
        phase.pieces[0].begin, phase.pieces[-1].end,
        tokens=phase.tokens, past=phase.past, calls=phase.calls,
        flops=phase.work.flops, bytes=phase.work.bytes,
    )  # fmt: skip
    work = {(part.part, part.layer): part.work for part in phase.parts}
    for call, group in groupby(phase.pieces, key=lambda piece: piece.call):
        inside = list(group)
        yield event(f"call {call}", "call", inside[0].begin, inside[-1].end, call=call)
        parts = [piece for piece in inside if piece.part != GAPS]
        many = Counter(piece.place for piece in parts)
        for layer, run in groupby(parts, key=lambda piece: piece.layer):
            own, where = list(run), {"phase": phase.name, "call": call, "layer": layer}
            if layer is not None:
                yield event(f"layer {layer}", "layer", own[0].begin, own[-1].end, **where)
            for piece in own:
                each = phase.calls * many[piece.place]
                amounts = {}
                if (done := work.get(piece.place)) is not None:
                    amounts = {"flops": _each(done.flops, each), "bytes": _each(done.bytes, each)}
                yield event(piece.part, "part", piece.begin, piece.end, **where, **amounts)


def _snug(events: Iterator[Event]) -> list[Event]:
    """Parents first, with ends that rounding has put beyond a neighbour or a parent moved back."""
    depths = {"phase": 0, "call": 1, "layer": 2, "part": 3}
    placed: list[Event] = []
    around: list[Event] = []
    for event in sorted(events, key=lambda e: (e.begin, depths[e.category], -e.end)):
        begin, end = event.begin, event.end
        while around and around[-1].end <= begin + ROUNDING < end:
            begin = max(begin, around.pop().end)  # it is over: this one comes after it
        if around and around[-1].end < end <= around[-1].end + ROUNDING:
            end = around[-1].end
        kept = replace(event, begin=begin, end=max(begin, end))
        around.append(kept)
        placed.append(kept)
    return placed


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _each(amount: int, parts: int) -> float | int:
    return amount // parts if amount % parts == 0 else amount / parts
