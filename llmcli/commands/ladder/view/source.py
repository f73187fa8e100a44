"""One rung by its own source: the lines that ran, with the shape and the numbers of every name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The prompt's tokens, of which `read` were read, and those after it."""

    tokens: tuple[str, ...]
    more: tuple[str, ...]
    read: int


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
    tokens = _Tokens(tokens=report.tokens, more=report.more, read=read)
    same = []
    for one in rung.listings:
        other = known.get((one.title, one.later))
        if other and _form(one) == _form(other):
            same.append(f"{one.title} (next token)" if one.later else one.title)
        else:
            raised = other is not None and _source(one) == _source(other)  # with other shapes only
            parts += ["", *_listing(one, tokens, numbers=not raised)]
    if same and below:
        parts += ["", Text(f"as on rung {below.number}: {', '.join(same)}", style=FAINT)]
    if rung.difference is not None:
        parts += ["", verdict(rung)]
    return parts


def _source(one: Listing) -> list[str]:
    return [line.text for line in one.lines]


def _form(one: Listing) -> object:
    """Two functions with the same lines and shapes are shown once."""
    return _source(one), [step.shape for line in one.lines for step in line.steps]


def _listing(one: Listing, report: _Tokens, *, numbers: bool) -> Iterator[RenderableType]:
    """A function: its name, what its docstring says first, its lines."""
    token = f"{NEXT}, {len(report.tokens)} {quoted(report.more[0])}: " if one.later else ""
    yield Text.assemble((token, FAINT), (one.title, HEADING))
    if one.words:
        yield Text(one.words.partition("\n\n")[0].replace("\n", " "), style=FAINT)
    for line in one.lines:
        yield _Source(line)
        for step in line.steps if numbers else ():
            yield from _numbers(step, one.later, report)


@dataclass(frozen=True)
class _Source:
    """A line of source and on its right the shapes of what it assigns.

    Its comment is behind it, or above where one line is too narrow for all.
    """

    line: Line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code, mark, comment = self.line.text.partition("  # ")
        indent = " " * (len(code) - len(code.lstrip()))
        shapes = Text("  ").join(_shape(step) for step in self.line.steps)
        room = options.max_width - shapes.cell_len - len(INDENT) - 2
        behind = Text.assemble(code, (mark + comment, FORMULA))
        if mark and behind.cell_len > room:
            yield Text(f"{INDENT}{indent}# {comment}", style=FORMULA)
            behind = Text(code)
        *above, last = behind.split("\n")
        yield from (Text.assemble(INDENT, one) for one in above)
        if last.cell_len > room and shapes:
            yield Text.assemble(INDENT, last)
            last = Text("")
        yield Text.assemble(INDENT, last, " " * max(2, room + 2 - last.cell_len), shapes)


def _shape(step: Step) -> Text:
    """`8 × 4 × 32 view`; a number by itself."""
    if not step.shape:
        return Text(_number(step.values[0][0]), style=NUMBER)
    sizes = Text(" × ".join(map(str, step.shape)), style=NUMBER)
    return sizes if step.moved is None else Text.assemble(sizes, " ", moved(step))


def _numbers(step: Step, later: bool, report: _Tokens) -> Iterator[RenderableType]:
    """Scores of every query and key under their tokens; of anything else the last row."""
    if not step.shape or (step.moved is not None and step.axes[-1] != "m"):
        return  # where only the axes changed the numbers stand above
    values, letters = step.values, step.axes.split(" × ")
    scores = letters[-1] == "m" and len(values[0]) == step.shape[-1]
    names, size = [*report.tokens, *report.more], (1, *step.shape)[-2:]
    labels = [""] * len(values)
    if letters[-2:-1] in (["n"], ["m"]):
        first = (report.read if letters[-2] == "n" else report.read + 1 - size[0]) if later else 0
        labels = [_token(first + at, names) for at in range(len(values))]
    elif step.token is not None:
        labels = [_token(step.token, names)]
    if scores:
        first = report.read + later - len(values[0])
        heads = [_fitted(_token(first + at, names), CELL) for at in range(len(values[0]))]
        yield Text(" " * LABEL + "".join(heads), style=FAINT, no_wrap=True, overflow="ellipsis")
    else:
        kept = slice(-1, None) if len(values) == size[0] else slice(0, 1)
        values, labels = values[kept], labels[kept]
    more = " …" if len(values[0]) < step.shape[-1] else ""
    for label, row in zip(labels, values, strict=True):
        cells = "".join(f"{_number(value):>{CELL}}" for value in row[: None if scores else 4])
        name = _fitted(label, LABEL - 4, right=False)
        line = f"{INDENT * 2}{name}{cells}{more}"
        yield Text(line, style=FAINT, no_wrap=True, overflow="ellipsis")


def _fitted(text: str, width: int, *, right: bool = True) -> str:
    """`text` in `width` columns, cut with an ellipsis; on the right behind a space."""
    fitted = Text(text)
    fitted.truncate(width - right, overflow="ellipsis")
    space = " " * (width - fitted.cell_len)
    return space + fitted.plain if right else fitted.plain + space


def _token(position: int, names: Sequence[str]) -> str:
    return f"{position} {quoted(names[position])}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"
