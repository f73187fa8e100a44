"""A run as a file for Perfetto and chrome://tracing: Google's Trace Event Format, JSON.

Every event is a complete one (`"ph": "X"`) with its begin `ts` and its duration `dur` in
microseconds. Events of a thread nest and never overlap: Perfetto leaves out what does. So all
times are whole nanoseconds first, and written with three digits after the point.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llmcli.commands.timing.report import PhaseTime, Span, TimingReport
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
    yield from _names(report, title)
    now = 0
    for stage in report.stages:
        end = now + _ns(stage.seconds)
        args = {} if stage.nbytes is None else {"bytes": stage.nbytes}
        yield Event(stage.name, "stage", now, end, args, ONCE).document()
        now = end
    for phase in report.phases:
        events = _phase(phase, now)
        yield from (event.document() for event in events)
        now = max((event.end for event in events), default=now)


def _names(report: TimingReport, title: str) -> Iterator[dict[str, Any]]:
    """What the viewer calls the process and its threads."""
    run = f"run on {report.ceilings.device}"
    for kind, thread, name in (
        ("process_name", RUN, f"llmcli timing: {title}"),
        ("thread_name", RUN, run),
        ("thread_name", ONCE, "once, before it"),
    ):
        yield {
            "name": kind, "ph": "M", "ts": 0, "pid": PROCESS, "tid": thread, "args": {"name": name}
        }  # fmt: skip


def _phase(phase: PhaseTime, start: int) -> list[Event]:
    """The phase, its calls, their layers and parts: each before what lies within it."""
    if not phase.spans:
        return []
    origin = min(span.begin for span in phase.spans)
    last = max(span.begin + span.seconds for span in phase.spans)
    shift = start - _ns(origin)
    words = f"{phase.name} of {counted(phase.tokens, 'token')}"
    args = {"tokens": phase.tokens, "past": phase.past, "calls": phase.calls}
    args |= {"flops": phase.work.flops, "bytes": phase.work.bytes}
    events = [Event(words, "phase", start, _ns(last) + shift, args)]
    work = {(part.part, part.layer): part.work for part in phase.parts}
    for call, group in groupby(sorted(phase.spans, key=_order), key=lambda span: span.call):
        spans = [span for span in group if span.part != "gaps"]  # these are what is left empty
        many = Counter((span.part, span.layer) for span in spans)
        whole = [span for span in spans if span.part is None]
        parts = [span for span in spans if span.part is not None]
        for span in whole:
            begin, end = _ends(span, shift)
            events.append(Event(f"call {call}", "call", begin, end, {"call": call}))
        for layer, run in groupby(parts, key=lambda span: span.layer):
            own = []
            for span in run:
                each = phase.calls * many[span.part, layer]
                done = work.get((str(span.part), layer))
                extra: dict[str, Any] = {"phase": phase.name, "call": call, "layer": layer}
                if done is not None:
                    extra |= {"flops": _each(done.flops, each), "bytes": _each(done.bytes, each)}
                own.append(Event(str(span.part), "part", *_ends(span, shift), extra))
            if layer is not None:
                extra = {"phase": phase.name, "call": call, "layer": layer}
                events.append(Event(f"layer {layer}", "layer", own[0].begin, own[-1].end, extra))
            events += own
    return _snug(events)


def _order(span: Span) -> tuple[int, float, float]:
    return span.call, span.begin, -span.seconds


def _snug(events: Sequence[Event]) -> list[Event]:
    """The same, parents first, with ends that rounding has put beyond a neighbour or a parent."""
    depths = {"phase": 0, "call": 1, "layer": 2, "part": 3}
    ordered = sorted(events, key=lambda e: (e.begin, depths[e.category], -e.end))
    placed: list[Event] = []
    around: list[Event] = []
    for event in ordered:
        begin, end = event.begin, event.end
        while around and around[-1].end <= begin + ROUNDING < end:
            begin = max(begin, around.pop().end)  # it is over: this one comes after it
        if around and around[-1].end < end <= around[-1].end + ROUNDING:
            end = around[-1].end
        kept = Event(event.name, event.category, begin, max(begin, end), event.args, event.thread)
        around.append(kept)
        placed.append(kept)
    return placed


def _ends(span: Span, shift: int) -> tuple[int, int]:
    return _ns(span.begin) + shift, _ns(span.begin + span.seconds) + shift


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _each(amount: int, parts: int) -> float | int:
    return amount // parts if amount % parts == 0 else amount / parts
