"""The same model from nested loops to fused kernels: each rung, and the whole ladder."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcli.records.document import APART, derived

# the rungs from the lowest up
NAMES = ("loops", "rows", "matrices", "heads", "combined", "cache", "batch", "fused")
NEXT = "the next token"  # begins the sections of what is read after the prompt
# letters at the end of a name → the axis as the formulas write it, and its words where the screen's
# list of the formulas' letters does not have this one
AXES = {
    **{letter: (letter, "") for letter in "bndhv1"},
    "m": ("m", "m tokens whose keys are read"),
    "g": ("h_kv", "g heads of keys and values"),
    "k": ("d/h", "k size of a head's query and key"),
    "e": ("d_v", "e of its value"),
    "c": ("h·d_v", "c heads side by side"),
    "f": ("F", "f neurons"),
    "i": ("i", "i, j any columns"),
    "j": ("j", ""),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Matrix products: calls with a single row or column, calls with more, FLOPs, bytes.

    No whole numbers where they are a sequence's share of a batch, or estimated.
    """

    gemv: float
    gemm: float
    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        """Both together."""
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def scaled(self, factor: float) -> Work:
        """All of it, `factor` times."""
        return Work(**{name: value * factor for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds of repeated runs."""

    median: float
    lowest: float
    highest: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """A name that a line of a rung's source assigns. `formula`: the line; `note`: its comment.

    `axes`: its shape in letters that are the same for every model: `h × n × d/h`. `strides` in
    numbers, empty where it is no tensor but a list. Where a line only changes how numbers lie,
    `source` has shape and strides before it, or of the whole that a part is a view of, and `moved`
    says whether numbers were copied for it. `values`: the last two axes, whole or their upper left
    corner. `section`: the function that the line is in. `token`: whose vector it is, of many.
    """

    name: str
    formula: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    moved: bool | None = None
    values: tuple[tuple[float, ...], ...]
    section: str
    axes: str = ""
    note: str = ""
    token: int | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of source that ran, or several of one statement, and what it assigned."""

    text: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The lines of a function that ran; `words`: its docstring, `later`: for the next token."""

    title: str
    words: str
    later: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class RungReport:
    """One rung: what it changes, what it computes, how long that takes.

    Seconds and work are those of one sequence: of a batch, its share. `prompt` is the whole
    prompt, `token` one more token. `estimated`: the part that was measured, where the times are
    scaled up from it. `difference`: the largest from the rung below, in what is `compared`.
    """

    number: int
    name: str
    title: str
    change: tuple[str, str]
    idea: str
    sequences: int
    prompt_s: Spread
    token_s: Spread
    prompt_work: Work
    token_work: Work
    listings: tuple[Listing, ...] = field(default=(), metadata=APART)
    estimated: str | None = None
    prompt_speedup: float | None = None
    token_speedup: float | None = None
    compared: str | None = None
    difference: float | None = None
    allowed: float | None = None

    @derived
    def steps(self) -> tuple[Step, ...]:
        """What the lines of its functions assign, in the order of their first calls."""
        return tuple(step for one in self.listings for line in one.lines for step in line.steps)

    @derived
    def ok(self) -> bool:
        """Whether the difference is within rounding; NaN is not."""
        if self.difference is None or self.allowed is None:
            return True
        return self.difference <= self.allowed


@dataclass(frozen=True, kw_only=True)
class LadderReport:
    """The ladder. `letters`: what n, d, h … are here; `more`: the tokens read one by one."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    more: tuple[str, ...]
    letters: tuple[tuple[str, int], ...]
    dtype: str
    rungs: tuple[RungReport, ...]
    interrupted: bool = False

    @derived
    def ok(self) -> bool:
        """Whether every rung agrees with the one below."""
        return all(rung.ok for rung in self.rungs)
