"""One rung by its own source: the lines that ran, with the shape and the numbers of every name."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.ladder.report import NEXT, LadderReport, Line, Listing, RungReport, Step
from llmcli.commands.ladder.view.table import change, heading, moved, verdict
from llmcli.ui.layout import Line as Parts
from llmcli.ui.theme import FAINT, HEADING, NUMBER, quoted

CELL = 11  # columns of a number
INDENT = "  "
FORMULA = "italic"
LABEL = 18  # … and of the token that a row belongs to, at most
LETTERS = {
    "m": "m tokens whose keys are read", "g": "g heads of keys and values",
    "k": "k size of a head's query and key", "e": "e of its value", "c": "c heads side by side",
    "f": "f neurons", "i": "i, j any columns",
}  # fmt: skip


def render_rung(rung: RungReport, report: LadderReport, model: str) -> list[RenderableType]:
    """Why a rung gives the same numbers, and its functions as far as they differ from below."""
    parts: list[RenderableType] = [*heading(report, model), "", *change(rung, shapes=False), ""]
    parts += [Text(rung.idea), ""]
    parts.append(Text("block 0; a name ends in the letters of its axes: s_hnm is h × n × m", FAINT))
    used = {letter for step in rung.steps if step.axes for letter in step.name.rpartition("_")[2]}
    others = [words for one, words in LETTERS.items() if one in used]
    parts += [Parts(others, style=FAINT)] if others else []
    if rung.estimated:
        parts.append(Text(f"only a part was computed: {rung.estimated}", style=FAINT))
    index = report.rungs.index(rung)
    # where the two disagree nothing is "as on the rung below": all numbers are shown
    below = report.rungs[index - 1] if index and rung.ok else None
    known = {(one.title, one.later): one for one in below.listings} if below else {}
    # of a rung that was estimated only some tokens were read
    read = next((step.shape[-2] for step in rung.steps if step.name == "x_nd"), len(report.tokens))
    same = []
    for one in rung.listings:
        other = known.get((one.title, one.later))
        if other and _form(one) == _form(other):
            same.append(f"{one.title} (next token)" if one.later else one.title)
        else:
            raised = other is not None and _texts(one) == _texts(other)  # with other shapes only
            parts += ["", _Function(listing=one, report=report, read=read, numbers=not raised)]
    if same and below:
        parts += ["", Text(f"as on rung {below.number}: {', '.join(same)}", style=FAINT)]
    if rung.difference is not None:
        parts += ["", verdict(rung)]
    return parts


def _texts(one: Listing) -> list[str]:
    return [line.text for line in one.lines]


def _form(one: Listing) -> object:
    """Two functions with the same lines and shapes are shown once."""
    return _texts(one), [step.shape for line in one.lines for step in line.steps]


@dataclass(frozen=True, kw_only=True)
class _Function:
    """A function: its name, what its docstring says first, its lines, their numbers if wanted.

    `read`: how many tokens of the prompt were read.
    """

    listing: Listing
    report: LadderReport
    read: int
    numbers: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        one, report, width = self.listing, self.report, options.max_width
        token = f"{NEXT}, {len(report.tokens)} {quoted(report.more[0])}: " if one.later else ""
        yield Text.assemble((token, FAINT), (one.title, HEADING))
        if one.words:
            yield Text(one.words.partition("\n\n")[0].replace("\n", " "), style=FAINT)
        for line in one.lines:
            yield from _source(line, width)
            for step in line.steps if self.numbers else ():
                for row in self._rows(step, width):
                    yield Text(row, style=FAINT)

    def _rows(self, step: Step, width: int) -> Iterator[str]:
        """Scores of every query and key under their tokens; of anything else the last row.

        So many columns as are whole in `width`, but for scores at most four.
        """
        if not step.shape or (step.moved is not None and step.axes[-1] != "m"):
            return  # where only the axes changed the numbers stand above
        later, values, letters = self.listing.later, step.values, step.axes.split(" × ")
        scores = letters[-1] == "m" and len(values[0]) == step.shape[-1]
        wanted = len(values[0]) if scores else min(4, len(values[0]))
        columns = range(min(wanted, (width - LABEL - 2) // CELL))
        more = " …" if len(columns) < step.shape[-1] else ""
        names, size = [*self.report.tokens, *self.report.more], (1, *step.shape)[-2:]
        labels = [""] * len(values)
        if letters[-2:-1] in (["n"], ["m"]):
            first = (self.read if letters[-2] == "n" else self.read + 1 - size[0]) if later else 0
            labels = [_token(first + at, names) for at in range(len(values))]
        elif step.token is not None:
            labels = [_token(step.token, names)]
        if scores:
            first = self.read + later - len(values[0])
            heads = [_fitted(_token(first + at, names), CELL - 1, "right") for at in columns]
            yield " " * (LABEL + 1) + " ".join(heads) + more
        else:
            kept = slice(-1, None) if len(values) == size[0] else slice(0, 1)
            values, labels = values[kept], labels[kept]
        for label, row in zip(labels, values, strict=True):
            cells = "".join(f"{_number(row[at]):>{CELL}}" for at in columns)
            yield f"{INDENT * 2}{_fitted(label, LABEL - 4, 'left')}{cells}{more}"


def _source(line: Line, width: int) -> Iterator[Text]:
    """A line of source and on its right the shapes of what it assigns.

    Its comment is behind it, or above where one line is too narrow for all.
    """
    code, mark, comment = line.text.partition("  # ")
    shapes = Text("  ").join(_shape(step) for step in line.steps)
    room = width - shapes.cell_len - 2 * bool(shapes)
    *above, last = (INDENT + one for one in code.split("\n"))
    end = Text.assemble(last, (mark + comment, FORMULA))
    if mark and end.cell_len > room:
        indent = code[: -len(code.lstrip())]
        yield Text(_hung(f"{INDENT}{indent}# {comment}", width, "# "), style=FORMULA)
        end = Text(last)
    yield from (Text(_hung(one, width)) for one in above)
    if end.cell_len > room:
        yield Text(_hung(last, width))
        end = Text("")
    if end or shapes:
        yield Text.assemble(end, " " * (width - end.cell_len - shapes.cell_len), shapes)


def _hung(code: str, width: int, mark: str = "    ") -> str:
    """`code` in lines of `width` columns, those after the first four columns further right."""
    indent = " " * (len(code) - len(code.lstrip()))
    return textwrap.fill(code, width, subsequent_indent=indent + mark, break_on_hyphens=False)


def _shape(step: Step) -> Text:
    """`8 × 4 × 32 view`; a number by itself."""
    if not step.shape:
        return Text(_number(step.values[0][0]), style=NUMBER)
    sizes = Text(" × ".join(map(str, step.shape)), style=NUMBER)
    return sizes if step.moved is None else Text.assemble(sizes, " ", moved(step))


def _fitted(text: str, width: int, align: Literal["left", "right"]) -> str:
    """`text` in `width` columns, cut with an ellipsis."""
    fitted = Text(text, overflow="ellipsis")
    fitted.align(align, width)
    return fitted.plain


def _token(position: int, names: Sequence[str]) -> str:
    return f"{position} {quoted(names[position])}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"
