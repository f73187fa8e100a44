"""The same model from nested loops to fused kernels: each rung, and the whole ladder."""

from __future__ import annotations

from dataclasses import dataclass

NEXT = "the next token"  # begins the sections of what is read after the prompt


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
        return Work(
            gemv=self.gemv + other.gemv,
            gemm=self.gemm + other.gemm,
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
        )

    def scaled(self, factor: float) -> Work:
        """All of it, `factor` times."""
        return Work(
            gemv=self.gemv * factor,
            gemm=self.gemm * factor,
            flops=self.flops * factor,
            bytes=self.bytes * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds of repeated runs."""

    median: float
    lowest: float
    highest: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One step that a rung shows. `strides` in numbers, empty where it is no tensor but a list.

    `section`: the part of the model it is in. `axes`: the shape in letters, after those of a
    product's operands where it is one, `(n × d)(d × v) = n × v`. `token`: whose vector it is,
    where one of many is shown. Where only the shape changed, `source` has shape and strides
    before it, and `moved` says whether numbers were copied for it. `values`: the last two axes,
    whole or their upper left corner.
    """

    formula: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: tuple[tuple[int, ...], tuple[int, ...]] | None
    moved: bool | None
    values: tuple[tuple[float, ...], ...]
    section: str = ""
    axes: str = ""
    note: str = ""
    token: int | None = None

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of its own axes."""
        return tuple(self.axes.rpartition("= ")[2].split(" × ")) if self.axes else ()


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
    steps: tuple[Shown, ...]
    estimated: str | None = None
    prompt_speedup: float | None = None
    token_speedup: float | None = None
    compared: str | None = None
    difference: float | None = None
    allowed: float | None = None

    @property
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

    @property
    def ok(self) -> bool:
        """Whether every rung agrees with the one below."""
        return all(rung.ok for rung in self.rungs)
