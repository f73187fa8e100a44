"""The ladder as a table of times, and one rung by its own source."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.commands.ladder.report import AXES, NEXT, LadderReport, Line, Listing, RungReport, Step
from llmcli.ui.facts import letter_lines
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Column, Rows
from llmcli.ui.layout import Line as Parts
from llmcli.ui.numbers import duration, scaled, unit
from llmcli.ui.palette import Ink
from llmcli.ui.theme import FAINT, HEADING, NUMBER, quoted

_GOOD, _BAD, _COPY = "green", "bold red", "yellow"
BAR = 10  # columns of the longest bar
CELL = 11  # columns of a number
LABEL = 18  # … and of the token that a row belongs to, at most
SOURCE = 120  # columns of source and shapes where nothing bounds them, as in a pipe
INDENT = "  "
FORMULA = "italic"
# which numbers stand below a line; see `measure.record`
NUMBERS = (
    "numbers: a function's first call, so block 0 and head 0 (`normalized` and `softmax`, where "
    "called token by token: the last token); the last pass of a loop; the first of several heads "
    "or sequences"
)
COLUMNS = [
    Column(""),
    Column("rung", right=False, cut=True),
    *(Column("prompt", drop=1), Column("×", drop=1)),
    *(Column("token"), Column("×")),
    *(Column("GEMV", drop=4), Column("GEMM", drop=4)),
    *(Column("FLOPs", drop=5), Column("bytes", drop=5)),
    Column("Δ"),
    Column("tok/s", drop=3),
    Column("log scale", right=False, drop=2),
]


def render_ladder(report: LadderReport, model: str, *, details: bool) -> list[RenderableType]:
    """What each rung is, in few words or with `details` its formulas; the table, the verdict."""
    title, tokens, letters = _heading(report, model)
    parts: list[RenderableType] = [title, tokens]
    if details:
        parts.append(letters)
        for before, rung in zip((None, *report.rungs), report.rungs, strict=False):
            parts += ["", *_change(rung, before)]
    else:
        ideas = [f"{rung.number} {re.split('[:,]', rung.title)[0]}" for rung in report.rungs]
        parts.append(Parts(ideas, FAINT))
    parts += ["", _table(report), _footnotes(report), *_checks(report)]
    if not details:
        words = "formulas and shapes: `--rung 1-8`; source and numbers: `--rung 4 --explain`"
        parts.append(Text(words, style=FAINT))
    return parts


def _heading(report: LadderReport, model: str) -> tuple[RenderableType, ...]:
    """The model, the tokens that were read, and what the letters stand for."""
    tokens = " ".join(quoted(token) for token in report.tokens)
    more = " ".join(quoted(token) for token in report.more)
    letters = list(letter_lines(report.letters))
    return (
        Text(model, style=HEADING),
        Text.assemble((tokens, NUMBER), " and then, one by one, " if more else "", (more, NUMBER)),
        Parts(letters, style=FAINT),
    )


def _change(
    rung: RungReport, rung_before: RungReport | None = None, *, shapes: bool = True
) -> list[RenderableType]:
    """The rung's title, the formula that it changes, and its new views and copies of tensors."""
    (before, after), work = rung.change, rung.token_work
    products = f"{_calls(work.gemv, rung)} GEMV, {_calls(work.gemm, rung)} GEMM"
    if not work.gemv and not work.gemm:
        products = "no matrix product"
    words = f"{products}, {unit(work.flops, 'FLOP')}, {unit(work.bytes, 'B')}"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("", Text("before", style=FAINT), Text(before))
    table.add_row("", Text("here", style=FAINT), Text(after, style=NUMBER))
    if shapes:
        known = set(map(_laid, rung_before.steps)) if rung_before else set()
        later = False
        for one in rung.listings:
            for step in (step for line in one.lines for step in line.steps):
                if step.moved is not None and _laid(step) not in known:
                    known.add(_laid(step))
                    if one.later and not later:
                        table.add_row("", "", Text(f"{NEXT}:", style=FAINT))
                    later = one.later
                    table.add_row("", _moved(step), _shape(step))
    table.add_row("", Text("token", style=FAINT), Text(words))
    return [Text.assemble((f"{rung.number}  {rung.name}", HEADING), f"  {rung.title}"), table]


def _laid(step: Step) -> object:
    return step.formula, step.source and step.source[0], step.shape, step.moved


def _moved(step: Step) -> Text:
    """`copy` if a step that changes the layout moved the numbers in memory, else `view`."""
    return Text("copy", style=_COPY) if step.moved else Text("view", style=_GOOD)


def _shape(step: Step) -> Text:
    """`k_km = k_mk.mT  [4,32] → [32,4]  strides (32,1) → (1,32)`; of several tensors the result."""
    code = " ".join(step.formula.partition("  # ")[0].split())
    if step.source is None:
        return Text.assemble(f"{code}  ", (f"[{_listed(step.shape)}]", NUMBER))
    shape, strides = step.source
    changed = f"strides ({_listed(strides)}) → ({_listed(step.strides)})"
    return Text.assemble(
        f"{code}  ",
        (f"[{_listed(shape)}] → [{_listed(step.shape)}]", NUMBER),
        (f"  {'the same strides' if strides == step.strides else changed}", FAINT),
    )


def _listed(numbers: Iterable[int]) -> str:
    """`4,8,32`, in one word, so that no line ends inside."""
    return ",".join(map(str, numbers))


def _table(report: LadderReport) -> Rows:
    """A row for each rung.

    Its bar is the logarithm of its rate over the power of ten below all: equal factors are equal
    lengths, in halves of a column, and the shortest bar is still seen.
    """
    rates = [1 / rung.token_s.median for rung in report.rungs]
    lowest = math.floor(math.log10(min(rates)) - 0.1)
    span = math.log10(max(rates)) - lowest

    def row(rung: RungReport, rate: float) -> list[Text | str]:
        about, work = "≈" if rung.estimated else "", rung.token_work
        difference = "-" if rung.difference is None else f"{rung.difference:.1e}"
        halves = max(1, round(2 * BAR * ((math.log10(rate) - lowest) / span)))
        return [
            str(rung.number),
            rung.name,
            f"{about}{duration(rung.prompt_s.median)}",
            _times(rung.prompt_speedup),
            f"{about}{duration(rung.token_s.median)}",
            _times(rung.token_speedup),
            _calls(work.gemv, rung),
            _calls(work.gemm, rung),
            scaled(work.flops),
            scaled(work.bytes),
            Text(difference, style=_GOOD if rung.ok else _BAD),
            f"{about}{scaled(rate)}",
            Text("█" * (halves // 2) + "▌" * (halves % 2), style=NUMBER),
        ]

    return Rows(COLUMNS, list(map(row, report.rungs, rates)))


def _footnotes(report: LadderReport) -> Parts:
    """What the columns are, and which rungs were only estimated."""

    def numbers(key: str) -> dict[Any, str]:
        """`rungs 1, 2`: the rungs by what their report has at `key`, None left out."""
        found: dict[Any, list[str]] = {}
        for rung in report.rungs:
            found.setdefault(getattr(rung, key), []).append(str(rung.number))
        return {
            value: f"rung{'s' * (len(rungs) > 1)} {', '.join(rungs)}"
            for value, rungs in found.items()
            if value is not None
        }

    notes = ["token: one after the prompt, with its products, FLOPs and bytes"]
    if len(report.rungs) > 1:
        notes.append("×: speedup over the rung before, median of pairs (1 is noise)")
        notes.append("Δ: largest difference of logits from it")
    for count, rungs in numbers("sequences").items():
        if count > 1:
            notes.append(f"{rungs}: per sequence, batch of {count}")
    for part, rungs in numbers("estimated").items():
        notes.append(f"≈: {rungs} estimated from {part}")
    for words, rungs in numbers("compared").items():
        if words != "logits":
            notes.append(f"Δ of {rungs}: {words} only, not the logits")
    return Parts(notes, FAINT)


def _checks(report: LadderReport) -> list[RenderableType]:
    """One line where every rung agrees with the one before, else one for each that does not."""
    if not report.ok:
        return [_verdict(rung) for rung in report.rungs if not rung.ok]
    compared = {rung.compared for rung in report.rungs} - {None}
    if not compared or report.interrupted:
        return []
    where = "" if compared == {"logits"} else ", where they were compared"
    words = f"✓ every rung agrees with the one before{where} ({report.dtype})"
    return [Text(words, style=_GOOD)]


def _verdict(rung: RungReport) -> Text:
    """The difference from the rung before, and whether rounding explains it."""
    words = (
        f"rung {rung.number}: {rung.compared} differ from the rung before by at most "
        f"{rung.difference:.1e}, allowed for rounding: {rung.allowed:.1e}"
    )
    return Text(f"{words} {'✓' if rung.ok else '✗'}", style=_GOOD if rung.ok else _BAD)


def _times(speedup: float | None) -> Text:
    """`1.43`, `1,234`; nothing where there is no rung before."""
    if speedup is None:
        return Text("")
    return Text(f"{speedup:.2f}" if speedup < 10 else f"{speedup:,.0f}", style=NUMBER)


def _calls(share: float, rung: RungReport) -> str:
    """Calls of products: whole numbers, those of a batch as `17/4`."""
    total = share * rung.sequences
    return scaled(total) + (f"/{rung.sequences}" if total and rung.sequences > 1 else "")


def render_rung(rung: RungReport, report: LadderReport, model: str) -> list[RenderableType]:
    """Why a rung gives the same numbers, and its functions as far as they differ from below."""
    parts: list[RenderableType] = [*_heading(report, model), "", *_change(rung, shapes=False), ""]
    parts += [Text(rung.idea), ""]
    parts.append(Text("a name ends in the letters of its axes: s_hnm is h × n × m", FAINT))
    used = {letter for step in rung.steps if step.axes for letter in step.name.rpartition("_")[2]}
    others = [words for letter, (_, words) in AXES.items() if words and letter in used]
    parts += [Parts(others, style=FAINT)] if others else []
    parts.append(Text(NUMBERS, FAINT))
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
            parts += ["", Fit(partial(_function, one, report, read))]
    if below is not None and same:
        parts += ["", Text(f"as on rung {below.number}: {', '.join(same)}", style=FAINT)]
    if rung.difference is not None:
        parts += ["", _verdict(rung)]
    return parts


def _form(one: Listing) -> object:
    """Two functions with the same lines and shapes are shown once."""
    return [(line.text, [step.shape for step in line.steps]) for line in one.lines]


def _function(
    one: Listing, report: LadderReport, read: int, width: int, ink: Ink
) -> Iterator[RenderableType]:
    """A function: its name, what its docstring says first, its lines and their numbers.

    `read`: how many tokens of the prompt were read.
    """
    token = f"{NEXT}, {len(report.tokens)} {quoted(report.more[0])}: " if one.later else ""
    yield Text.assemble((token, FAINT), (one.title, HEADING))
    if one.words:
        yield Text(one.words.partition("\n\n")[0].replace("\n", " "), style=FAINT)
    names = [*report.tokens, *report.more]
    for line in one.lines:
        yield from _source(line, min(width, SOURCE))
        for step in line.steps:
            for row in _rows(step, names, read, one.later, width):
                yield Text(row, style=FAINT)


def _rows(step: Step, names: Sequence[str], read: int, later: bool, width: int) -> Iterator[str]:
    """The rows of scores, under the tokens of the keys; of any other matrix the last row.

    As many columns as fit `width`, and at most four of what is not scores.
    """
    if not step.shape or (step.moved is not None and step.axes[-1] != "m"):
        return  # where only the axes changed the numbers stand above
    values, letters, size = step.values, step.axes.split(" × "), (1, *step.shape)[-2:]
    scores = letters[-1] == "m" and len(values[0]) == step.shape[-1]
    wanted = len(values[0]) if scores else min(4, len(values[0]))
    columns = range(min(wanted, (width - LABEL - 2) // CELL))
    more = " …" if len(columns) < step.shape[-1] else ""
    labels = [""] * len(values)
    if letters[-2:-1] in (["n"], ["m"]):
        first = (read if letters[-2] == "n" else read + 1 - size[0]) if later else 0
        labels = [_token_at(first + at, names) for at in range(len(values))]
    elif step.token is not None:
        labels = [_token_at(step.token, names)]
    if scores:
        first = read + later - len(values[0])
        heads = [_fitted(_token_at(first + at, names), CELL - 1, "right") for at in columns]
        yield " " * (LABEL + 1) + " ".join(heads) + more
    else:
        kept = slice(-1, None) if len(values) == size[0] else slice(0, 1)
        values, labels = values[kept], labels[kept]
    for label, row in zip(labels, values, strict=True):
        cells = "".join(f"{_short(row[at]):>{CELL}}" for at in columns)
        yield f"{INDENT * 2}{_fitted(label, LABEL - 4, 'left')}{cells}{more}"


def _source(line: Line, width: int) -> Iterator[Text]:
    """A line of source and on its right the shapes of what it assigns.

    Its comment is behind it, or above where one line is too narrow for all.
    """
    code, mark, comment = line.text.partition("  # ")
    shapes = Text("  ").join(_sizes(step) for step in line.steps)
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


def _sizes(step: Step) -> Text:
    """`8 × 4 × 32 view`; a number by itself."""
    if not step.shape:
        return Text(_short(step.values[0][0]), style=NUMBER)
    sizes = Text(" × ".join(map(str, step.shape)), style=NUMBER)
    return sizes if step.moved is None else Text.assemble(sizes, " ", _moved(step))


def _fitted(text: str, width: int, align: Literal["left", "right"]) -> str:
    """`text` in `width` columns, cut with an ellipsis."""
    fitted = Text(text, overflow="ellipsis")
    fitted.align(align, width)
    return fitted.plain


def _token_at(position: int, names: Sequence[str]) -> str:
    return f"{position} {quoted(names[position])}"


def _short(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"
