"""The trace of a run: valid by the rules of the Trace Event Format, and the report's numbers.

The rules are those of the format's definition (Google, "Trace Event Format") and of Perfetto's
importer, which leaves out events of a thread that overlap without nesting.
"""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from timing_reports import LAYERS, timing_report

from llmcli.commands.timing.trace import trace_pieces, trace_size

TITLE = 'tiny "x" (float32 on cpu)'


def written(report=None):
    text = "".join(trace_pieces(report or timing_report(), TITLE, {"llmcli": "1"}))
    return json.loads(text)


NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
FORMAT = jsonschema.Draft202012Validator({
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {"type": "array", "items": {
            "required": ["name", "ph", "pid", "tid", "ts"],
            "properties": {
                "name": {"type": "string"}, "ph": {"enum": ["M", "X"]}, "args": {"type": "object"},
                "pid": {"type": "integer"}, "tid": {"type": "integer"},
                "ts": {"type": "number", "minimum": 0}, "dur": {"type": "number", "minimum": 0},
            },
            "if": {"properties": {"ph": {"const": "M"}}},
            "then": {"properties": {
                "name": {"enum": ["process_name", "thread_name"]}, "args": NAMED,
            }},
            "else": {"required": ["dur"]},
        }},
    },
})  # fmt: skip


def faults(document):
    """What the format forbids, in words."""
    if found := [error.message for error in FORMAT.iter_errors(document)]:
        return found
    threads: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    named = set()
    for event in document["traceEvents"]:
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        for us in (event["ts"], event["dur"]):
            if abs(us * 1000 - round(us * 1000)) > 1e-4:
                found.append(f"{us} is not in whole nanoseconds")
        # what a reader with whole nanoseconds sees
        begin, end = (round(us * 1000) for us in (event["ts"], event["ts"] + event["dur"]))
        threads.setdefault((event["pid"], event["tid"]), []).append((begin, end, event["name"]))
    for (pid, tid), events in threads.items():
        if ("thread_name", pid, tid) not in named or not any(
            name == "process_name" and at == pid for name, at, _ in named
        ):
            found.append(f"thread {tid} of process {pid} has no name")
        found += overlaps(events)
    return found


def overlaps(events):
    """Events that begin inside another and end outside of it."""
    around, found = [], []
    for begin, end, name in sorted(events, key=lambda e: (e[0], -e[1])):
        while around and around[-1][1] <= begin:
            around.pop()
        if around and end > around[-1][1]:
            found.append(f"{name} ends after {around[-1][2]}, in which it begins")
        around.append((begin, end, name))
    return found


def complete(document, *categories):
    return [event for event in document["traceEvents"] if event.get("cat") in categories]


def test_it_is_what_the_format_says():
    """Also where seconds are as a GPU's clock gives them: ends are off in the last digits."""
    report = timing_report()
    assert faults(written(report)) == []
    phases = []
    for phase in report.phases:
        pieces = [
            replace(
                piece, begin=piece.begin * 1.0000033 + at * 1e-16, seconds=piece.seconds * 1.0000033
            )
            for at, piece in enumerate(phase.pieces)
        ]
        phases.append(replace(phase, pieces=tuple(pieces)))
    assert faults(written(replace(report, phases=tuple(phases)))) == []
    document = written(replace(report, phases=(), stages=()))
    assert faults(document) == []
    assert complete(document, "phase", "stage") == []


def test_gaps_are_left_empty_and_stages_come_before_on_a_thread_of_their_own():
    report = timing_report()
    document = written(report)
    for phase, event in zip(report.phases, complete(document, "phase"), strict=True):
        parts = [part for part in complete(document, "part") if part["args"]["phase"] == phase.name]
        left = event["dur"] - sum(part["dur"] for part in parts)
        assert left == pytest.approx(phase.gaps_s * 1e6, abs=0.1)
        for total in phase.totals[:-1]:
            own = [part for part in parts if part["name"] == total.part]
            assert sum(part["dur"] for part in own) / 1e6 == pytest.approx(total.seconds)
            flops = sum(part["args"].get("flops", 0) for part in own)
            assert flops == pytest.approx(total.work.flops)
    stages = complete(document, "stage")
    assert [stage["name"] for stage in stages] == [stage.name for stage in report.stages]
    assert stages[2]["args"] == {"bytes": 100_000_000}
    first = complete(document, "phase")[0]
    assert stages[-1]["ts"] + stages[-1]["dur"] == pytest.approx(first["ts"])
    assert {stage["tid"] for stage in stages} != {first["tid"]}


def test_the_size_is_known_before():
    text = "".join(trace_pieces(timing_report(), TITLE, {}))
    assert 0.5 < trace_size(LAYERS, 9) / len(text) < 2
