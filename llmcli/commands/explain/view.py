"""One number's derivation as a numbered tree: formula, arithmetic, result, the kernel's value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.explain.report import Explanation, Step
from llmcli.records.explanation import Fact, Sum, Term
from llmcli.records.numbers import counted
from llmcli.ui.facts import letter_lines
from llmcli.ui.layout import (
    BAD,
    GAP,
    GOOD,
    WRONG,
    Column,
    Indented,
    Line,
    Rows,
    filled,
    in_words,
    render_checks,
)
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line, quoted

FEW, SOME = 3, 8  # terms of a long sum that are written out, rows of a table of tokens
DEEPEST = 4  # levels of indentation, two columns each: beyond, the tree runs straight down
ROOM = 4  # columns of a step's number


def render_explanation(
    report: Explanation, title: str, *, full: bool = False, checks: bool = False
) -> RenderableType:
    """The number and what it is compared with, the steps down to its inputs, and the letters.

    `title` is the model's line; `full` writes out every term of every sum, `checks` every check.
    """
    letters = letter_lines([(one.letter, one.value) for one in report.letters])
    found = report.view_checks()
    tokens = [f"{at} {in_words(one)}" for at, one in enumerate(report.tokens)]
    if len(tokens) > 2 * SOME:
        tokens = [*tokens[:SOME], f"… {len(tokens) - 2 * SOME} more", *tokens[-SOME:]]
    return Group(
        Text(one_line(title), style=HEADING),
        _verdict(report),
        *([Line(tokens, FAINT)] if tokens else []),
        *_steps(report, full),
        Text(),
        Line(list(letters), FAINT),
        *_extent(report),
        *([render_checks(found, full=checks)] if found else []),
    )


def _steps(report: Explanation, full: bool) -> Iterator[RenderableType]:
    """Every step, and after it those below it, indented where a derivation forks."""
    steps, digits = report.steps, _digits(report)
    written, pending = set[int](), [(1, 0, True)]
    while pending:
        at, level, origins = pending.pop()
        step, by = steps[at - 1], 2 * min(level, DEEPEST)
        yield Text()
        head = Text(f"{step.symbol} = {number(step.value, digits)}", style=HEADING)
        if at in written:
            yield Indented(head.append(f"   see step {at}", style=FAINT), by + ROOM)
            continue
        written.add(at)
        yield Indented(Text(f"{at:>3} ").append_text(head), by)
        for block in _blocks(step, origins, full):
            yield Indented(block, by + ROOM)
        below = level + 1 if len(step.children) > 1 else level
        # one step down the residual stream nearly the same parts would stand there again
        pending += [(child, below, not step.origins) for child in reversed(step.children)]


def _blocks(step: Step, origins: bool, full: bool) -> Iterator[RenderableType]:
    index = ",".join(map(str, step.index))
    where = [
        f"{one.axis} {one.at}" + ("" if one.token is None else f" {quoted(one.token)}")
        for one in step.where
    ]
    yield Line([f"{step.name}[{index}]", *where], FAINT)
    if step.source == "kernel":
        origin = f"recomputed from {step.recomputed}" if step.recomputed else "the kernel's own"
        yield Text(f"{origin}: a larger --depth derives it, too", style=FAINT)
        return
    yield Line([step.formula, step.shape], NUMBER, GAP)
    if step.note:
        yield Text(one_line(step.note))
    yield from map(_fact, step.before)
    if step.sum is not None:
        yield from _sum(step, step.sum, full)
    yield from map(_fact, step.after)
    if step.origins and origins:
        yield from _origins(step.origins, full)
    if step.source == "derived":
        theirs = f"recomputed from {step.recomputed}:" if step.recomputed else "kernel"
        words = [f"{theirs} {number(step.kernel, 9)}"]
        words.append(f"difference {number(step.difference, 2)}")
        wrong = [] if step.ok else [f"allowed {number(step.tolerance, 2)}"]
        yield Line([*words, *wrong, GOOD if step.ok else BAD], FAINT if step.ok else WRONG)


def _sum(step: Step, total: Sum, full: bool) -> Iterator[RenderableType]:
    terms, over = step.terms, total.over
    if over == "s" or full:
        count = counted(len(terms), "key" if over == "s" else "term")
        yield Line([f"Σ over {over} of {total.formula}", count], between=GAP)
        yield from _table(step, total, full)
        yield Text(f"Σ = {number(total.value)}")
        return
    shown = _most(terms, FEW)
    at = ", ".join(str(term.at) for term in shown)
    largest = f"largest of {len(terms)} at {over} = {at}"
    yield Line([f"Σ over {over} of {total.formula}", largest], between=GAP)
    square = total.columns[-1] != "product"
    written = " + ".join(_product(term, square) for term in shown)
    if len(shown) < len(terms):
        others = total.value - math.fsum(term.value for term in shown)
        written += f" + … {len(terms) - len(shown)} more ({number(others)})"
    yield Arithmetic(f"Σ = {written} = {number(total.value)}")


def _table(step: Step, total: Sum, full: bool) -> Iterator[RenderableType]:
    """A row for every term; of many tokens the largest, and the one of the index."""
    terms = step.terms
    most = list(terms) if full else _most(terms, SOME)
    if not full and step.name.endswith(".pattern"):
        most += [term for term in terms if term.at == step.index[-1] and term not in most]
    tokens = any(term.label for term in terms)
    columns = [Column(total.over)]
    if tokens:
        columns.append(Column("token", right=False, cut=True, drop=1))
    last = len(total.columns) - 1  # where it is too narrow for all, the product stays
    columns += [
        Column(name, drop=0 if at == last else 2 + at) for at, name in enumerate(total.columns)
    ]
    rows = []
    for term in sorted(most, key=lambda term: term.at):
        numbers = [*term.parts, term.value][: len(total.columns)]
        label = [Text(quoted(term.label))] if tokens else []
        rows.append([Text(str(term.at)), *label, *(Text(number(x)) for x in numbers)])
    yield Rows(columns, rows)
    if len(most) < len(terms):
        rest = total.value - math.fsum(term.value for term in most)
        words = f"… {len(terms) - len(most)} more, together {number(rest)}"
        yield Text(f"{words}: --full has them all", style=FAINT)


def _origins(origins: Sequence[Term], full: bool) -> Iterator[RenderableType]:
    """What the residual stream was made of, the largest contributions first."""
    most = origins if full else _most(origins, SOME)
    parts = [f"{term.label} {number(term.value)}" for term in most]
    if len(most) < len(origins):
        rest = math.fsum(t.value for t in origins) - math.fsum(t.value for t in most)
        parts.append(f"{len(origins) - len(most)} more {number(rest)}")
    yield Text(f"made of {len(origins)} parts (the kernel's):", style=FAINT)
    yield Line(parts, FAINT)


@dataclass(frozen=True)
class Arithmetic:
    """An equation; where it is too long, lines begin with its `=` and `+`."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pieces = re.split(r" (?=[=+] )", self.text)
        yield Text("\n  ".join(filled(pieces, options.max_width - 2, " ")))


def _extent(report: Explanation) -> Iterator[RenderableType]:
    """How much was derived, and what of it is shown."""
    if report.steps[0].source == "weights":
        return
    parts = [f"{counted(report.tensors, 'tensor')} derived in float64"]
    if report.depth is None:
        parts[0] += ", down to the embedding rows and the weights"
    else:
        parts[0] += f", {counted(report.depth, 'formula')} back"
        parts.append("further back: the kernel's numbers (--depth all derives them)")
    if math.isinf(report.steps[-1].value) and report.checks:
        parts.append("a masked score needs no inputs, its check does")
    elif len(report.steps) > 1:
        parts.append("shown: the largest terms")
    yield Line(parts, FAINT)


def _verdict(report: Explanation) -> RenderableType:
    """The number by both of its names, derived and as the kernel has it."""
    root, digits = report.steps[0], _digits(report)
    named = f"{root.name}[{','.join(map(str, root.index))}]"
    if named != root.symbol:
        named = f"{root.symbol} = {named}"
    if root.source == "weights":
        return Text(f"{named} = {number(report.value, digits)}", style=HEADING)
    theirs = "recomputed" if root.recomputed else "kernel"
    parts = [f"{named}:", f"derived {number(report.value, digits)}"]
    parts += [f"{theirs} {number(report.kernel, digits)}"]
    parts += [f"difference {number(report.difference, 2)}"]
    parts += [f"(allowed {number(report.tolerance, 2)})  {GOOD if root.ok else BAD}"]
    return Line(parts, HEADING if root.ok else WRONG, GAP)


def _digits(report: Explanation) -> int:
    """So many as the kernel's numbers have."""
    return 17 if report.dtype == "float64" else 9


def number(value: float, digits: int = 6) -> str:
    """`−0.123457`, `1.2e−08` or `−∞`."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value + 0.0:.{digits}g}".replace("-", "−")  # -0.0 is 0


def _fact(fact: Fact) -> Arithmetic:
    """A formula with its numbers in it; a negative one inside of it in parentheses."""
    pieces = fact.formula.split("{}")
    line = pieces[0]
    for value, piece in zip(fact.parts, pieces[1:], strict=True):
        inside = value < 0 and line.rstrip()[-1:] not in ("=", "(")
        line += (f"({number(value)})" if inside else number(value)) + piece
    return Arithmetic(f"{line} = {number(fact.value)}")


def _product(term: Term, square: bool) -> str:
    if not term.parts:
        return number(term.value)
    factors = [f"({number(x)})" if x < 0 else number(x) for x in term.parts]
    return f"{factors[-1]}²" if square else "·".join(factors)


def _most(terms: Sequence[Term], count: int) -> list[Term]:
    """The terms that contribute most, the largest first."""
    return sorted(terms, key=lambda term: -abs(term.value))[:count]
