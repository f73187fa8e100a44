"""From the marks of a run to the time of each part in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmcli.anatomy.graph import Graph, Place
from llmcli.anatomy.work import Works
from llmcli.commands.timing.measure.clock import END, Marks
from llmcli.commands.timing.measure.run import SAMPLE
from llmcli.commands.timing.report import PartTime, Span
from llmcli.records.work import PartWork

GAPS = "gaps"
STEP = "step"  # the first mark of a forward call


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some time without a pause in one part of one layer: marks of the same place are one piece.

    `call` numbers the forward calls from 0: the choice of a token belongs to the call that reads
    it, what follows a call to that. `begin` counts from the beginning of the run.
    """

    place: Place
    call: int
    begin: float
    seconds: float
    host_s: float


def place(name: str, model: Graph) -> Place:
    """Where the time up to that mark belongs; what no part computes is a gap, of no layer."""
    if name == SAMPLE:
        return SAMPLE, None
    if name not in model:  # `step`, `end`, and unknown names: a check counts those
        return GAPS, None
    part, layer = model.place(name)
    return part, None if part == GAPS else layer


def pieces(marks: Marks, model: Graph) -> Iterator[Piece]:
    """The pieces of a run, one after the other: each begins where the one before it ends."""
    at, call, before, open_ = 0.0, -1, "", None
    for name, seconds, host_s in zip(marks.names, marks.seconds, marks.host_s, strict=True):
        here = place(name, model)
        call += name == SAMPLE or (name == STEP and before != SAMPLE)
        if open_ is not None and (open_.place, open_.call) == (here, call):
            open_ = replace(open_, seconds=open_.seconds + seconds, host_s=open_.host_s + host_s)
        else:
            if open_ is not None:
                yield open_
            open_ = Piece(place=here, call=call, begin=at, seconds=seconds, host_s=host_s)
        at, before = at + seconds, name
    if open_ is not None:
        yield open_


def in_order(model: Graph) -> tuple[str, ...]:
    """Every part that may be timed, as they are shown: the groups, the choice of a token, gaps."""
    return (*model.groups, SAMPLE, GAPS)


def part_times(
    run: Sequence[Piece], works: Works, operations: Mapping[Place, int], order: Sequence[str]
) -> tuple[PartTime, ...]:
    """Each (part, layer) that was timed: in the order of `works`, then those without, in `order`.

    Work that was never timed is not there, nor is a part without a moment.
    """
    seconds: dict[Place, float] = {}
    host_s: dict[Place, float] = {}
    calls: dict[Place, int] = {}
    for piece in run:
        seconds[piece.place] = seconds.get(piece.place, 0.0) + piece.seconds
        host_s[piece.place] = host_s.get(piece.place, 0.0) + piece.host_s
        calls[piece.place] = calls.get(piece.place, 0) + 1
    work = {(part, layer): what for part, layer, what in works}
    rest = sorted(seconds.keys() - work.keys(), key=lambda place: order.index(place[0]))
    return tuple(
        PartTime(
            part=where[0],
            layer=where[1],
            seconds=seconds[where],
            host_s=host_s[where],
            calls=calls[where],
            operations=operations.get(where, 0),
            work=work.get(where, PartWork()),
        )
        for where in (*work, *rest)
        if where in seconds
    )


def over_layers(parts: Sequence[PartTime], order: Sequence[str]) -> tuple[PartTime, ...]:
    """Each part over all layers, in that order."""
    return tuple(
        PartTime(
            part=name,
            layer=None,
            seconds=sum(part.seconds for part in own),
            host_s=sum(part.host_s for part in own),
            calls=sum(part.calls for part in own),
            operations=sum(part.operations for part in own),
            work=sum((part.work for part in own), PartWork()),
        )
        for name in order
        if (own := [part for part in parts if part.part == name])
    )


def spans(phase: str, run: Sequence[Piece]) -> Iterator[Span]:
    """Every call as a whole, followed by its parts; gaps are where nothing is."""
    calls: dict[int, list[Piece]] = {}
    for piece in run:
        calls.setdefault(piece.call, []).append(piece)
    for call, inside in calls.items():
        begin = inside[0].begin
        seconds = inside[-1].begin + inside[-1].seconds - begin
        yield Span(phase=phase, call=call, layer=None, part=None, begin=begin, seconds=seconds)
        for piece in inside:
            part, layer = piece.place
            if part != GAPS:
                yield Span(
                    phase=phase, call=call, layer=layer, part=part,
                    begin=piece.begin, seconds=piece.seconds,
                )  # fmt: skip


def expected_marks(calls: Iterable[Sequence[str]], *, chooses: bool) -> tuple[str, ...]:
    """The marks that a run makes, which has these activations in each forward call."""
    first = (SAMPLE, STEP) if chooses else (STEP,)
    return (*(mark for names in calls for mark in (*first, *names)), END)
