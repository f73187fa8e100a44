"""Where the time of a run goes: phases, layers, parts, and the gaps between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmcli.reports.ceilings import Ceilings
from llmcli.reports.checks import ViewCheck
from llmcli.reports.machine_load import MachineLoad
from llmcli.reports.work import PartWork

# What a part waits for: `memory`, a cache (`L3`) or `compute` where it reaches at least half of
# that ceiling; else `calls`, where starting its operations explains at least half of the rest; else
# `kernel`: neither ceiling is near and it is not the starting, but the operations' own code.
Bound = str


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
    """What looking costs: instrumented and bare runs in turns, seconds of each pair.

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
        """Whether looking costs less than what runs differ by: no cost is between the quartiles."""
        return self.quartiles[0] <= 1 <= self.quartiles[1]


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Reading the prompt, or writing tokens after it: one instrumented run, the median of many.

    `seconds` is the wall time of that run, `tokens` how many it read or wrote in `calls` forward
    calls; `bare_s` the median without looking (of an even number of runs the lower one of the two
    in the middle, with and without; of hundreds the nearest that was kept). `parts` has each
    (layer, part) in the order of the forward pass, `totals` each part over all layers, the gaps
    last: their seconds add up to `seconds`. `work` is of the whole phase. `peak` is the most
    memory held (resident, or the GPU's where it runs on one). `gemv_s`, `gemm_s`: seconds of the
    products with a weight matrix, by whether the call that they are in gives one row or many.
    """

    name: Literal["prefill", "decode"]
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
class SplitTime:
    """A fused group whose pieces were computed apart: seconds of each, over all layers.

    `group_s` is what the fused kernel took in the run; the pieces need not add up to it.
    """

    phase: str
    part: str
    group_s: float
    pieces: tuple[tuple[str, float], ...]


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
    splits: tuple[SplitTime, ...] = field(default=())
    interrupted: bool = False
    machine_load: MachineLoad | None = None
