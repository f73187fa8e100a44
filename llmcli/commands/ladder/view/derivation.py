"""The derivation of one rung, step by step, with the prompt's own numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from llmcli.commands.ladder.report import NEXT, LadderReport, RungReport, Shown
from llmcli.commands.ladder.view.table import change, heading, listed, moved, verdict
from llmcli.ui.theme import FAINT, HEADING, NUMBER, quoted

CELL = 11  # columns of a number
LABEL = 16  # … and of the token that a row belongs to, at most
INDENT = "  "
FIRST = {"h": "head 0", "h_kv": "head 0", "b": "sequence 0"}
# a step of the rung below: the same, or the same with one axis more in front, or neither
SAME, RAISED, NEW = "same", "raised", "new"


def render_rung(rung: RungReport, report: LadderReport, model: str) -> list[RenderableType]:
    """One rung's derivation: why it gives the same numbers, and each step with its numbers.

    Steps that are those of the rung below are named and not printed again.
    """
    parts: list[RenderableType] = [*heading(report, model), "", *change(rung, shapes=False), ""]
    parts += [Text(rung.idea), "", Text(_which(rung, report), style=FAINT)]
    if rung.estimated:
        parts.append(Text(f"only a part was computed: {rung.estimated}", style=FAINT))
    index = report.rungs.index(rung)
    # where the two disagree nothing is "as on the rung below": all numbers are shown
    below = _Below(report.rungs[index - 1] if index and rung.ok else None)
    if any(below.kind(step) == RAISED for step in rung.steps):
        words = f"without numbers: steps of rung {below.number} that have more axes here"
        parts.append(Text(words, style=FAINT))
    notes: set[str] = set()  # said of the prompt's steps, they need not be said again
    for title, steps in groupby(rung.steps, key=lambda step: step.section):
        parts += ["", Text(_title(title, rung, report), style=HEADING)]
        for kind, group in groupby(steps, key=below.kind):
            alike = list(group)
            if kind == SAME:
                parts.append(Text(f"{_span(alike)}: as on rung {below.number}", style=FAINT))
            elif kind == RAISED:
                parts += _raised(alike)
            else:
                for step in alike:
                    parts += _Step(step, report).lines(with_note=step.note not in notes)
            if not title.startswith(NEXT):
                notes.update(step.note for step in alike)
    if rung.difference is not None:
        parts += ["", verdict(rung)]
    return parts


class _Below:
    """The steps of the rung below, to tell what a rung changes."""

    def __init__(self, rung: RungReport | None) -> None:
        self.number = 0 if rung is None else rung.number
        steps = () if rung is None else rung.steps
        self._steps = {(step.section, _unbatched(step.formula)): step for step in steps}

    def kind(self, step: Shown) -> str:
        """Whether the step is as below, the same for a batch of sequences, or new."""
        below = self._steps.get((step.section, _unbatched(step.formula)))
        if below is None or step.note not in below.note:
            return NEW
        if below.shape == step.shape:
            return SAME
        return RAISED if below.shape == step.shape[-len(below.shape) :] else NEW


def _unbatched(formula: str) -> str:
    return formula.replace("b × ", "")


def _raised(steps: Sequence[Shown]) -> Iterator[RenderableType]:
    """`T², T³   b × n × d = 4 × 4 × 256`: the new shapes of steps that have an axis more."""

    def kind(step: Shown) -> object:
        return step.letters, step.shape, step.moved, " as " in step.formula

    for _, alike in groupby(steps, key=kind):
        group = list(alike)
        names = Text(", ".join(_name(step.formula) for step in group), style=HEADING)
        if group[0].moved is not None:
            names = Text.assemble(moved(group[0]), "  ", names)
        sizes = _sizes(" × ".join(group[0].letters), group[0].shape)
        yield _Line(names, Text(sizes, style=NUMBER))


def _sizes(axes: str, shape: Sequence[int]) -> str:
    sizes = " × ".join(map(str, shape))
    return f"{axes} = {sizes}" if axes else sizes


def _span(steps: Sequence[Shown]) -> str:
    """`X … T¹` of the steps from X to T¹."""
    first, last = (_name(step.formula) for step in (steps[0], steps[-1]))
    return first if len(steps) == 1 else f"{first} … {last}"


def _name(formula: str) -> str:
    """`T¹` of `T¹ = LayerNorm(X) = …`: what a formula gives."""
    for end in (" = ", ": ", ", ", " as "):
        formula = formula.partition(end)[0]
    return formula


def _title(section: str, rung: RungReport, report: LadderReport) -> str:
    """The section, with the next token's text; the prompt's where there is a next token."""
    if section.startswith(NEXT):
        token = f", {len(report.tokens)} {quoted(report.more[0])}" if report.more else ""
        return section.replace(NEXT, NEXT + token, 1)
    if any(step.section.startswith(NEXT) for step in rung.steps):
        return f"the prompt: {section}"
    return section


def _which(rung: RungReport, report: LadderReport) -> str:
    """Of which block, head, tokens and sequence the numbers are."""
    parts = ["block 0", "head 0"]
    for name, letters in (("query token", ("q =", "x =", "x,")), ("key token", ("k =", "k_i ="))):
        of = [step.token for step in rung.steps if step.formula.startswith(letters)]
        parts += [f"{name} {_token(of[0], report)}"] if of and of[0] is not None else []
    if any("b" in step.letters for step in rung.steps):
        parts.append("sequence 0")
    return f"shown: {'; '.join(parts)}"


def _token(position: int, report: LadderReport) -> str:
    return f"{position} {quoted((*report.tokens, *report.more)[position])}"


@dataclass(frozen=True)
class _Step:
    """One step's lines."""

    step: Shown
    report: LadderReport

    def lines(self, *, with_note: bool) -> Iterator[RenderableType]:
        """The formula with its shape, its note unless it was printed, and its numbers."""
        step = self.step
        column = len(step.shape) < 1 or step.letters[-1:] == ("1",)
        plain = " as " in step.formula or step.formula.startswith("W_")
        plain = plain or (step.formula.endswith("ᵀ") and len(step.shape) > 2)
        yield self._head(numbers=not plain, inline=column)
        for note in step.note.split("\n") if step.note and with_note else ():
            yield Padding(Text(note, style=FAINT), (0, 0, 0, len(INDENT)))
        if not column and not plain:  # where only the axes changed the numbers stand above
            yield from self._numbers()

    def _head(self, *, numbers: bool, inline: bool) -> RenderableType:
        """Formula and shape; `inline` with a number for each row."""
        step = self.step
        formula = Text(step.formula, style=HEADING)
        if step.source is not None:
            formula = Text.assemble(moved(step), "  ", formula)
        named = step.axes and step.formula.endswith(step.axes)  # the formula says the axes
        shape = Text(_sizes("" if named else step.axes, step.shape), style=NUMBER)
        if step.source is not None and step.source[1] != step.strides:
            strides = f"   strides {listed(step.source[1])} → {listed(step.strides)}"
            shape.append(strides, style=FAINT)
        where = [FIRST[letter] for letter in step.letters[:-2] if FIRST.get(letter)]
        if step.token is not None:
            where.append(f"token {_token(step.token, self.report)}")
        if numbers:
            shape.append(_dotted(where), style=FAINT)
        if inline:
            cells = "  ".join(_number(row[0]) for row in step.values)
            more = " …" if len(step.values) < (step.shape or (1,))[-2:][0] else ""
            shape.append(f"{'   ' if shape else ''}{cells}{more}")
        return _Line(formula, shape)

    def _numbers(self) -> Iterator[RenderableType]:
        step = self.step
        values, letters = step.values, ("", "", *step.letters)[-2:]
        size = (1, 1, *step.shape)[-2:]
        shown = self._shown(len(values), size[0], letters)
        labels = [self._label(row, letters[0]) for row in range(len(values))]
        width = max([cell_len(labels[row]) for row in shown], default=0)
        more = " …" if values and len(values[0]) < size[1] else ""
        if letters[1] == "n":
            heads = [_fitted(self._label(i, "n"), CELL - 1) for i in range(len(values[0]))]
            cells = "".join(" " * (CELL - cell_len(head)) + head for head in heads)
            yield Text(INDENT + " " * width + cells + more, style=FAINT, no_wrap=True)
        for row in shown:
            label = labels[row] + " " * (width - cell_len(labels[row]))
            cells = "".join(f"{_number(value):>{CELL}}" for value in values[row])
            yield Text.assemble((INDENT + label, FAINT), cells + more, no_wrap=True)
        if len(values) < size[0]:
            yield Text(f"{INDENT}{' ' * width}{'⋮':>{CELL}}", style=FAINT)

    def _shown(self, kept: int, rows: int, letters: Sequence[str]) -> list[int]:
        """The rows to print: all of a matrix over keys, of others the first and the last."""
        if letters[1] == "n" and letters[0] in ("n", "1"):
            return list(range(kept))
        return list(range(kept))[:2] if kept < rows else sorted({0, kept - 1})

    def _label(self, row: int, letter: str) -> str:
        """The token that a row belongs to; of a single new row the newest token."""
        if letter == "1" and self.step.section.startswith(NEXT):
            row = len(self.report.tokens)
        elif letter != "n":
            return ""
        return _fitted(_token(row, self.report), LABEL)


def _dotted(parts: Sequence[str]) -> str:
    return "".join(f" · {part}" for part in parts)


def _fitted(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut with an ellipsis."""
    fitted = Text(text)
    fitted.truncate(width, overflow="ellipsis")
    return fitted.plain


@dataclass(frozen=True)
class _Line:
    """A formula and its shape on one line, or on two where they do not fit."""

    formula: Text
    shape: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.formula.cell_len + 3 + self.shape.cell_len <= options.max_width:
            yield Text.assemble(self.formula, "   ", self.shape)
        else:
            yield self.formula
            yield Padding(self.shape, (0, 0, 0, len(INDENT)))


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"
