"""Where the time of a run goes: phases, layers, parts, and the gaps between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmcli.graph.spec import Phase
from llmcli.measure.runs import Ratios, are_tight, paired, spread_of
from llmcli.records.document import APART, ViewCheck, derived
from llmcli.records.machine import Ceilings, MachineLoad
from llmcli.records.work import Cost

GAPS = "gaps"  # the part that has the time in none
# What limits a part that is near no ceiling: starting its operations, or the operations' own code.
CALLS, KERNEL = "calls", "kernel"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Something done once: `import torch`, `read the headers`, `load the weights`, `tokenize`.

    `nbytes` were read for it where it reads; `peak` is the most memory held while it was done.
    """

    name: str
    seconds: float
    nbytes: int | None = None
    peak: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some time without a pause in one part of one layer: marks of the same place are one piece.

    `call` numbers the forward calls from 0: the choice of a token belongs to the call that reads
    it, what follows a call to that. `begin` counts from the beginning of the run, in seconds.
    """

    part: str
    layer: int | None
    call: int
    begin: float
    seconds: float
    host_s: float

    @property
    def place(self) -> tuple[str, int | None]:
        """Its part and layer."""
        return self.part, self.layer

    @property
    def end(self) -> float:
        """Seconds from the beginning of the run."""
        return self.begin + self.seconds


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """One part in one layer (None: outside of the layers, or all layers together) of a phase.

    `part` is a group of the model's graph (`Graph.groups`), `sample`, or `gaps`: the time in none.
    `seconds` on the device over all calls of the phase; `host_s` what the host took to start
    them (the same on a CPU). `calls`: how often it was computed (two norms in each layer).
    `work` is of all calls too. `operations`: calls of PyTorch that are started for it, with views.
    `share`: of the phase's wall time.

    `bound` is what limits it: `memory`, a cache (`L3`) or `compute` where it reaches at least half
    of that ceiling; else `calls`, where starting its operations explains at least half of the rest;
    else `kernel`. `of_bound` is the share of the ceiling `nearest` that it reaches. All three are
    None where it does no counted work.
    """

    part: str
    layer: int | None
    seconds: float
    host_s: float
    calls: int
    work: Cost
    bound: str | None = None
    of_bound: float | None = None
    nearest: str | None = None
    operations: int = 0
    share: float | None = None

    @classmethod
    def total(cls, part: str, own: Sequence[PartTime]) -> PartTime:
        """Sum some parts. `of_bound`: the share of their time that the ceilings explain."""
        seconds = sum(one.seconds for one in own)
        known = [one.seconds * one.of_bound for one in own if one.of_bound is not None]
        return cls(
            part=part,
            layer=None,
            seconds=seconds,
            host_s=sum(one.host_s for one in own),
            calls=sum(one.calls for one in own),
            operations=sum(one.operations for one in own),
            work=sum((one.work for one in own), Cost()),
            of_bound=sum(known) / seconds if known and seconds else None,
        )

    @derived
    def bytes_per_s(self) -> float | None:
        """None without such work, or without time."""
        return self._per_second(self.work.bytes)

    @derived
    def flops_per_s(self) -> float | None:
        """None without such work, or without time."""
        return self._per_second(self.work.flops)

    def _per_second(self, amount: int) -> float | None:
        return amount / self.seconds if amount and self.seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class Overhead(Ratios):
    """The instrumentation overhead: instrumented and bare runs in turns, seconds of each pair.

    `ratios` are instrumented ÷ bare.
    """

    watched_s: tuple[float, ...]
    bare_s: tuple[float, ...]

    @classmethod
    def of(cls, watched_s: Sequence[float], bare_s: Sequence[float]) -> Overhead:
        """Raises ValueError without pairs."""
        ratios = paired(watched_s, bare_s)
        return cls(watched_s=tuple(watched_s), bare_s=tuple(bare_s), **vars(ratios))

    @property
    def within_noise(self) -> bool:
        """Whether the overhead is less than what runs differ by: 1 is between the quartiles."""
        return self.quartiles[0] <= 1 <= self.quartiles[1]

    @property
    def tight(self) -> bool:
        """Whether these pairs are enough to trust the medians, see `are_tight`."""
        return are_tight(self.watched_s, self.bare_s)


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Reading the prompt, or writing tokens after it: one instrumented run, the median of many.

    `seconds` is the wall time of that run, `tokens` how many it read or wrote in `calls` forward
    calls; `bare_s` the median without instrumentation (of an even number of runs the lower one of
    the two in the middle, with and without; of hundreds the nearest that was kept). `parts` has
    each (layer, part) in the order of the forward pass, `totals` each part over all layers, the
    gaps last: their seconds add up to `seconds`. `work` is of the whole phase. `peak` is the most
    memory held in the first run (resident, or the GPU's where it runs on one). `gemv_s`, `gemm_s`:
    seconds of the products with a weight matrix, by whether the call that they are in gives one
    row or many. `pieces` are the run in the order of time, `marks` the names that its clock was
    called with. `unlike` counts the numbers (logits and ids) in which an instrumented run differs
    from the first bare one. `parts_scaled_by`: on a CUDA GPU bare runs replay captured steps, in
    which parts cannot be timed; `seconds` is then `bare_s`, between two events of the device, and
    all parts and pieces are of an instrumented run of computed steps, times this factor, and
    `overhead` includes what capturing saves; None: nothing is scaled. `interrupted`: only the pairs
    that were complete are counted.
    """

    name: Phase
    tokens: int
    past: int
    calls: int
    seconds: float
    bare_s: float
    parts: tuple[PartTime, ...]
    totals: tuple[PartTime, ...]
    work: Cost
    overhead: Overhead
    peak: int | None
    gemv_s: float
    gemm_s: float
    parts_scaled_by: float | None = None
    pieces: tuple[Piece, ...] = field(metadata=APART)
    marks: tuple[str, ...] = field(default=(), metadata=APART)
    unlike: int = field(default=0, metadata=APART)
    interrupted: bool = field(default=False, metadata=APART)

    @derived
    def gaps_s(self) -> float:
        """Seconds that are in no part."""
        return sum(part.seconds for part in self.totals if part.part == GAPS)

    @derived
    def pairs(self) -> int:
        """Pairs of runs, one instrumented and one bare."""
        return len(self.overhead.bare_s)

    @derived
    def spread(self) -> float:
        """See `spread_of`."""
        return spread_of(self.overhead.watched_s, self.overhead.bare_s)

    @derived
    def tokens_per_s(self) -> float | None:
        """Without instrumentation."""
        return self.tokens / self.bare_s if self.bare_s > 0 else None

    @property
    def shown_tokens(self) -> int:
        """Tokens that times and amounts are divided by: of decode all are of a token."""
        return self.tokens if self.name == "decode" else 1


@dataclass(frozen=True, kw_only=True)
class TimingReport:
    """The result of `timing`. `estimated`: `info`'s estimate of the bytes that this run takes.

    `base` is what the process held before the model was loaded (PyTorch itself), None where the
    system does not say. `interrupted`: only phases with at least one complete pair are included.
    `machine_load`: what other programs took meanwhile. `working_set`: bytes that a step streams.
    `ceilings` and `peak` are of one device; with layers on several devices the phases' `totals`
    have no bounds, and of their `parts` only those on that device.
    """

    prompt_tokens: int
    batch: int = 1
    dtype: str
    stages: tuple[Stage, ...]
    phases: tuple[PhaseTime, ...]
    ceilings: Ceilings
    base: int | None
    peak: int | None
    estimated: int
    weight_bytes: int
    working_set: int
    machine_load: MachineLoad
    checks: tuple[ViewCheck, ...] = field(metadata=APART)
    interrupted: bool = field(default=False, metadata=APART)
    several_devices: bool = field(default=False, metadata=APART)

    @derived
    def finish_reason(self) -> Literal["complete", "interrupted"]:
        """`interrupted`: `phases` are those that were measured until then."""
        return "interrupted" if self.interrupted else "complete"

    @derived
    def working_set_in(self) -> str:
        """`memory`, or the cache that holds what a step streams."""
        return self.ceilings.read(self.working_set).level
