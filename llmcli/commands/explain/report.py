"""One number of a model, derived step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmcli.records.document import ViewCheck
from llmcli.records.document import derived as member
from llmcli.records.explanation import Compared, Element, NumberCheck
from llmcli.records.numbers import counted
from llmcli.records.text import Token


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One entry of an index: the axis in words, the position on it, its token if it has one."""

    axis: str
    at: int
    token: str | None


@dataclass(frozen=True, kw_only=True)
class Step(Element, Compared):
    """One number of a derivation and how it follows from its inputs.

    `symbol` is the number in the documents' letters (`Q[2,7,4]`), `shape` its tensor's in letters
    and numbers, `where` what the index means. `source`: `derived` by `before`, the `terms` of
    `sum`, and `after`; taken from the `kernel`; or from the `weights`, where it is a parameter.
    `origins`: what was added up to it, block by block. `kernel` is what the fast kernel has there;
    one that it never writes was `recomputed` from what that names. `children` are the numbers of
    the steps that it follows from.
    """

    BY_FORMULAS: ClassVar[str] = "value"
    number: int
    name: str
    index: tuple[int, ...]
    symbol: str
    formula: str
    shape: str
    where: tuple[Coordinate, ...]
    source: Literal["derived", "kernel", "weights"]
    recomputed: str = ""
    children: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Check(Compared):
    """Two ways to the same number, and in `words` what was compared."""

    words: str
    derived: float


@dataclass(frozen=True, kw_only=True)
class LocalCheck(NumberCheck):
    """Each formula alone, on the kernel's own inputs, against the kernel's own output.

    `formulas` of the steps that are shown, and of every number of so many `tensors`. The number
    at `name[index]` uses most of its `tolerance`; where one uses more, it is of the first such
    tensor in execution order, and not `ok`.
    """

    formulas: int
    tensors: int

    def formulas_check(self) -> ViewCheck:
        """The check for the view; where one formula fails, of that one."""
        shown = f"each of the {counted(self.formulas, 'formula')}"
        words = f"{shown if self.formulas != 1 else 'the formula'} shown"
        if self.tensors:
            words += f", and every number of {counted(self.tensors, 'tensor')},"
        words += " holds on the kernel's own inputs"
        if not self.ok:
            words = f"the formula of {self.name} holds on the kernel's own inputs"
        place = f"{self.name}[{','.join(map(str, self.index))}]"
        return self.view_check("formulas", words, where=place)


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A letter of the documents, and how many that are here."""

    letter: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One number of a model, derived; `depth` None: down to the weights.

    `tensors` were derived as a whole, in float64, for the one number. `steps` are numbered from 1,
    the number itself first.
    """

    tokens: tuple[Token, ...]
    letters: tuple[Letter, ...]
    depth: int | None
    dtype: str
    tensors: int
    checks: tuple[Check, ...] = ()
    local: LocalCheck | None = None
    steps: tuple[Step, ...]

    @member
    def name(self) -> str:
        """The tensor of the number."""
        return self.steps[0].name

    @member
    def index(self) -> tuple[int, ...]:
        """Its place in that tensor."""
        return self.steps[0].index

    @member
    def value(self) -> float:
        """The number as formulas give it; a parameter as it is stored."""
        return self.steps[0].value

    @member
    def kernel(self) -> float:
        """The number as the fast kernel has it."""
        return self.steps[0].kernel

    @member
    def difference(self) -> float:
        """Distance of the two."""
        return self.steps[0].difference

    @member
    def tolerance(self) -> float:
        """How far apart rounding may have put them."""
        return self.steps[0].tolerance

    @member
    def ok(self) -> bool:
        """Whether every step, every check and `local` agree with the kernel."""
        compared = [*self.steps, *self.checks, *([self.local] if self.local else [])]
        return all(one.ok for one in compared)

    def view_checks(self) -> tuple[ViewCheck, ...]:
        """Checks for the screen: the numbers shown, other ways to them, each formula alone."""
        compared = [step for step in self.steps if step.source == "derived"]
        if not compared:
            return ()
        worst = max(compared, key=lambda step: (not step.ok, step.share))
        words = "every derived number is the kernel's"
        return (
            worst.view_check("derivation", words, where=worst.symbol),
            *(check.view_check("output", check.words) for check in self.checks),
            *(() if self.local is None else (self.local.formulas_check(),)),
        )
