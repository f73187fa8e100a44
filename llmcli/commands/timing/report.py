"""Where the time of a run goes: phases, layers, parts, and the gaps between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Literal

from llmcli.records.ceilings import Ceilings
from llmcli.records.checks import ViewCheck
from llmcli.records.machine_load import MachineLoad
from llmcli.records.work import PartWork

# What a part waits for: `memory`, a cache (`L3`) or `compute` where it reaches at least half of
# that ceiling; else `calls`, where starting its operations explains at least half of the rest; else
# `kernel`: neither ceiling is near and it is not the starting, but the operations' own code.
Bound = str


PhaseName = Literal["prefill", "decode"]
PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
TIGHT = 0.03  # of the median: quartiles that are no further apart need no more pairs
FEWEST = 5  # pairs, before their quartiles say anything


@dataclass(frozen=True, kw_only=True)
class TimingRequest:
    """What is run: `batch` prompts are read, and `new_tokens` written after each of them.

    `pairs` of runs, one instrumented and one not; None: until the times are tight, which takes
    at most `limit_s` seconds for all phases together (but one pair of each is always run).
    `trace` keeps the spans.
    """

    new_tokens: int
    phases: tuple[PhaseName, ...] = PHASES
    pairs: int | None = None
    limit_s: float = 10.0
    batch: int = 1
    trace: bool = False

    @property
    def timed(self) -> tuple[PhaseName, ...]:
        """The phases in their order, decoding only where there are new tokens."""
        wanted = [name for name in PHASES if name in self.phases]
        return tuple(name for name in wanted if name == "prefill" or self.new_tokens)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Something done once: `import torch`, `read the headers`, `load the weights`, `tokenize`.

    `nbytes` were read for it where it reads; `peak` is the most memory held while it was done.
    """

    name: str
    seconds: float
    nbytes: int | None = None
    peak: int | None = None


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """One part in one layer (None: outside of the layers, or all layers together) of a phase.

    `part` is a group of the model's graph (`Graph.groups`), `sample`, or `gaps`: the time in none.
    `seconds` on the device over all calls of the phase; `host_s` what the host took to start
    them (the same on a CPU). `calls`: how often it was computed (two norms in each layer).
    `work` is of all calls too. `bound` and `of_bound` say what it
    waits for and which share of the ceiling `nearest` it reaches, None where it does no counted
    work. `operations` of PyTorch are started for it, views among them.
    """

    part: str
    layer: int | None
    seconds: float
    host_s: float
    calls: int
    work: PartWork
    bound: Bound | None = None
    of_bound: float | None = None
    nearest: str | None = None
    operations: int = 0


@dataclass(frozen=True, kw_only=True)
class Span:
    """For the trace: something with a beginning and an end, seconds from its phase's beginning.

    `part` is a part's name, None for a forward call as a whole, the choice of the token that it
    reads included; `call` numbers the forward calls of the phase from 0. Gaps have no spans.
    """

    phase: str
    call: int
    layer: int | None
    part: str | None
    begin: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """The instrumentation overhead: instrumented and bare runs in turns, seconds of each pair.

    `ratios` are instrumented ÷ bare, pair by pair; `quartiles` the first and the third of them.
    """

    watched_s: tuple[float, ...]
    bare_s: tuple[float, ...]
    ratios: tuple[float, ...]
    median: float
    lowest: float
    highest: float
    quartiles: tuple[float, float] = (float("-inf"), float("inf"))

    @property
    def within_noise(self) -> bool:
        """Whether the overhead is less than what runs differ by: 1 is between the quartiles."""
        return self.quartiles[0] <= 1 <= self.quartiles[1]

    @property
    def spread(self) -> float:
        """See `spread_of`."""
        return spread_of(self.watched_s, self.bare_s)

    @property
    def tight(self) -> bool:
        """See `are_tight`."""
        return are_tight(self.watched_s, self.bare_s)


def are_tight(watched_s: Sequence[float], bare_s: Sequence[float]) -> bool:
    """Whether these pairs are enough to trust the medians."""
    return len(bare_s) >= FEWEST and spread_of(watched_s, bare_s) <= TIGHT


def spread_of(watched_s: Sequence[float], bare_s: Sequence[float]) -> float:
    """The distance of the quartiles as a share of the median: the largest of both times' and of
    their ratios'; infinite for a single pair.
    """
    if len(bare_s) < 2:
        return math.inf
    ratios = [watched / bare for watched, bare in zip(watched_s, bare_s, strict=True)]
    found = 0.0
    for values in (watched_s, bare_s, ratios):
        first, middle, third = quantiles(values, n=4, method="inclusive")
        found = max(found, (third - first) / middle)
    return found


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Reading the prompt, or writing tokens after it: one instrumented run, the median of many.

    `seconds` is the wall time of that run, `tokens` how many it read or wrote in `calls` forward
    calls; `bare_s` the median without instrumentation (of an even number of runs the lower one of
    the two in the middle, with and without; of hundreds the nearest that was kept). `parts` has
    each (layer, part) in the order of the forward pass, `totals` each part over all layers, the
    gaps last: their seconds add up to `seconds`. `work` is of the whole phase. `peak` is the most
    memory held (resident, or the GPU's where it runs on one). `gemv_s`, `gemm_s`: seconds of the
    products with a weight matrix, by whether the call that they are in gives one row or many.
    """

    name: PhaseName
    tokens: int
    past: int
    calls: int
    seconds: float
    bare_s: float
    parts: tuple[PartTime, ...]
    totals: tuple[PartTime, ...]
    gaps_s: float
    work: PartWork
    overhead: Overhead
    peak: int | None
    spans: tuple[Span, ...] = ()
    gemv_s: float = 0.0
    gemm_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TimingReport:
    """All of it. `estimated`: `info`'s estimate of the bytes of this run, beside what was held.

    `base` is what the process held before the model was loaded (PyTorch itself), None where the
    system does not say. `interrupted`: the phases are those of which pairs
    of runs were finished. `machine_load`: what other programs took meanwhile.
    """

    prompt_tokens: int
    batch: int
    dtype: str
    stages: tuple[Stage, ...]
    phases: tuple[PhaseTime, ...]
    ceilings: Ceilings
    base: int | None
    peak: int | None
    estimated: int
    weight_bytes: int
    working_set: int
    checks: tuple[ViewCheck, ...]
    interrupted: bool = False
    machine_load: MachineLoad | None = None
