"""From the marks of a run to the time of each part in each layer, against its lower bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmcli.anatomy.arithmetic import Arithmetic
from llmcli.anatomy.graph import Graph, Place
from llmcli.anatomy.work import Works
from llmcli.commands.timing.measure.clock import Marks
from llmcli.commands.timing.report import CALLS, GAPS, KERNEL, PartTime, Piece
from llmcli.measure.ceilings import time_lower_bound
from llmcli.records.machine import Ceilings
from llmcli.records.work import PartWork

STEP = "step"  # the first mark of a forward call
SAMPLE = "sample"  # the mark of a token that is chosen
_NEAR = 0.5  # of a ceiling: from there on it is what limits the part
_EXPLAINED = 0.5  # of the time beyond the lower bound that starting operations takes
_LAUNCHING = 0.9  # of the device's time in which the host was still starting it


def place(name: str, model: Graph) -> Place:
    """The part and layer that the time up to a mark belongs to; a gap has no layer."""
    if name == SAMPLE:
        return SAMPLE, None
    if name not in model:  # `step`, `end`, and unknown names: a check counts those
        return GAPS, None
    part, layer = model.place(name)
    return part, None if part == GAPS else layer


def pieces(marks: Marks, model: Graph) -> Iterator[Piece]:
    """The pieces of a run, one after the other: each begins where the one before it ends."""
    at, call, before, last = 0.0, -1, "", None
    for name, seconds, host_s in zip(marks.names, marks.seconds, marks.host_s, strict=True):
        part, layer = place(name, model)
        call += name == SAMPLE or (name == STEP and before != SAMPLE)
        if last is not None and (last.part, last.layer, last.call) == (part, layer, call):
            last = replace(last, seconds=last.seconds + seconds, host_s=last.host_s + host_s)
        else:
            if last is not None:
                yield last
            last = Piece(
                part=part, layer=layer, call=call, begin=at, seconds=seconds, host_s=host_s
            )
        at, before = at + seconds, name
    if last is not None:
        yield last


def in_order(model: Graph) -> tuple[str, ...]:
    """Every part that may be timed, as they are shown: the groups, the choice of a token, gaps."""
    return (*model.groups, SAMPLE, GAPS)


def part_times(
    run: Sequence[Piece], works: Works, operations: Mapping[Place, int], order: Sequence[str]
) -> tuple[PartTime, ...]:
    """Each (part, layer) that was timed: in the order of `works`, then those without, in `order`.

    Work that was never timed is left out, and so is a part without a moment.
    """
    timed: dict[Place, list[Piece]] = {}
    for piece in run:
        timed.setdefault(piece.place, []).append(piece)
    work = {(part, layer): amount for part, layer, amount in works}
    ordered = sorted(timed, key=lambda place: order.index(place[0]))
    return tuple(
        PartTime(
            part=where[0],
            layer=where[1],
            seconds=sum(piece.seconds for piece in timed[where]),
            host_s=sum(piece.host_s for piece in timed[where]),
            calls=len(timed[where]),
            operations=operations.get(where, 0),
            work=work.get(where, PartWork()),
        )
        for where in dict.fromkeys([*work, *ordered])
        if where in timed
    )


def over_layers(parts: Sequence[PartTime], order: Sequence[str]) -> tuple[PartTime, ...]:
    """Each part over all layers, in that order."""
    own = {name: [part for part in parts if part.part == name] for name in order}
    return tuple(PartTime.total(name, found) for name, found in own.items() if found)


def product_seconds(
    run: Sequence[Piece], calls: Sequence[Mapping[Place, PartWork]]
) -> tuple[float, float]:
    """Seconds of products of a weight matrix with one row and with more, call by call.

    `calls` has for each forward call the parts with such products.
    """
    gemv_s = gemm_s = 0.0
    for piece in run:
        work = calls[piece.call].get(piece.place) if 0 <= piece.call < len(calls) else None
        if work is not None and work.gemm:
            gemm_s += piece.seconds
        elif work is not None:
            gemv_s += piece.seconds
    return gemv_s, gemm_s


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The ceilings for a run in `numbers`, each step of which streams `working_set` bytes.

    `apart`: the device works behind the host, so that the host's time is one of its own.
    """

    ceilings: Ceilings
    numbers: Arithmetic
    working_set: int
    apart: bool

    def judged(self, part: PartTime, wall_s: float) -> PartTime:
        """The part with its share of the wall time, and with its bound where it does counted work.

        The bound is a ceiling only where that is near, and `calls` only where starting takes long.
        """
        part = replace(part, share=part.seconds / wall_s if wall_s > 0 else None)
        lower = time_lower_bound(
            part.work, part.calls, self.ceilings, numbers=self.numbers,
            working_set=self.working_set,
        )  # fmt: skip
        if lower.seconds == 0 or part.seconds <= 0:
            return part
        starting = part.operations * self.ceilings.start_s
        if self.apart and part.host_s >= _LAUNCHING * part.seconds:
            bound = CALLS
        elif lower.seconds >= _NEAR * part.seconds:
            bound = lower.nearest
        else:
            explained = starting >= _EXPLAINED * (part.seconds - lower.seconds)
            bound = CALLS if explained else KERNEL
        reached = lower.seconds / part.seconds
        return replace(part, bound=bound, nearest=lower.nearest, of_bound=reached)
