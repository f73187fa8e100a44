"""The ladder: the table of times with its check, and what each rung changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.commands.ladder.report import LadderReport, RungReport, Step
from llmcli.ui.layout import Column, Rows
from llmcli.ui.layout import Line as Parts
from llmcli.ui.letters import letter_lines
from llmcli.ui.numbers import duration, scaled, unit
from llmcli.ui.theme import FAINT, HEADING, NUMBER, quoted

_GOOD, _BAD, _COPY = "green", "bold red", "yellow"
BAR = 10  # columns of the longest bar


def render_ladder(report: LadderReport, model: str, *, details: bool) -> list[RenderableType]:
    """The table of all rungs and whether they agree; before it, with `details`, their formulas."""
    title, tokens, letters = heading(report, model)
    parts: list[RenderableType] = [title, tokens]
    if details:
        parts.append(letters)
        for before, rung in zip((None, *report.rungs), report.rungs, strict=False):
            parts += ["", *change(rung, before)]
    parts += ["", _table(report), *_footnotes(report)]
    parts += _checks(report)
    if not details:
        words = "formulas and shapes: `--rung 1-8`; source and numbers: `--rung 4 --explain`"
        parts.append(Text(words, style=FAINT))
    return parts


def heading(report: LadderReport, model: str) -> tuple[RenderableType, ...]:
    """The model, the tokens that were read, and what the letters stand for."""
    tokens = " ".join(quoted(token) for token in report.tokens)
    more = " ".join(quoted(token) for token in report.more)
    letters = list(letter_lines(report.letters))
    return (
        Text(model, style=HEADING),
        Text.assemble((tokens, NUMBER), " and then, one by one, " if more else "", (more, NUMBER)),
        Parts(letters, style=FAINT),
    )


def change(
    rung: RungReport, rung_before: RungReport | None = None, *, shapes: bool = True
) -> list[RenderableType]:
    """The rung's title, the formula that it changes, and what is new in how tensors lie."""
    before, after = rung.change
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("", Text("before", style=FAINT), Text(before))
    table.add_row("", Text("here", style=FAINT), Text(after, style=NUMBER))
    if shapes:
        known = set(map(_laid, rung_before.steps)) if rung_before else set()
        for step in rung.steps:
            if step.moved is not None and _laid(step) not in known:
                known.add(_laid(step))
                table.add_row("", moved(step), _shape(step))
    table.add_row("", Text("token", style=FAINT), Text(_work_words(rung)))
    return [Text.assemble((f"{rung.number}  {rung.name}", HEADING), f"  {rung.title}"), table]


def _laid(step: Step) -> object:
    return step.formula, step.source and step.source[0], step.shape, step.moved


def moved(step: Step) -> Text:
    """Whether a step that changes a shape only looked at the numbers anew or moved them."""
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
    rungs = report.rungs
    abouts = ["≈" if rung.estimated else "" for rung in rungs]
    rates = [1 / rung.token_s.median for rung in rungs]
    columns: list[tuple[Column, Iterable[str | Text]]] = [
        (Column(""), (str(rung.number) for rung in rungs)),
        (Column("rung", right=False, cut=True), (rung.name for rung in rungs)),
        (Column("prompt", drop=1), (duration(rung.prompt_s.median) for rung in rungs)),
        (Column("×", drop=1), (_times(rung.prompt_speedup) for rung in rungs)),
        (Column("token"), (duration(rung.token_s.median) for rung in rungs)),
        (Column("×"), (_times(rung.token_speedup) for rung in rungs)),
        (Column("GEMV", drop=4), (_calls(rung.token_work.gemv, rung) for rung in rungs)),
        (Column("GEMM", drop=4), (_calls(rung.token_work.gemm, rung) for rung in rungs)),
        (Column("FLOPs", drop=5), (scaled(rung.token_work.flops) for rung in rungs)),
        (Column("bytes", drop=5), (scaled(rung.token_work.bytes) for rung in rungs)),
        (Column("Δ"), map(_difference, rungs)),
        (Column("tok/s", drop=3), map(scaled, rates)),
        (Column("log scale", right=False, drop=2), map(_bar, _bar_lengths(rates))),
    ]
    estimated = ("prompt", "token", "tok/s")
    cells = [
        [f"{about}{cell}" for about, cell in zip(abouts, row, strict=True)]
        if column.name in estimated
        else row
        for column, row in columns
    ]
    return Rows([column for column, _ in columns], [*zip(*cells, strict=True)])


def _difference(rung: RungReport) -> Text:
    words = "-" if rung.difference is None else f"{rung.difference:.1e}"
    return Text.assemble((words, _GOOD if rung.ok else _BAD))


def _bar(length: float) -> Text:
    """At most `BAR` columns, in halves of one."""
    halves = max(1, round(2 * BAR * length))
    return Text("█" * (halves // 2) + "▌" * (halves % 2), style=NUMBER)


def _footnotes(report: LadderReport) -> list[RenderableType]:
    """What the columns are, and which rungs were only estimated."""
    notes = ["token: after the prompt; ×: over the rung before, median of pairs (1 is noise)"]
    marks = "Δ: largest difference from it"
    for count, numbers in _numbers(report, lambda rung: rung.sequences).items():
        if count > 1:
            marks += f"; rung {numbers}: a sequence's share of a batch of {count}"
    notes.append(marks)
    for part, numbers in _numbers(report, lambda rung: rung.estimated).items():
        notes.append(f"≈: {'rungs' if ',' in numbers else 'rung'} {numbers} estimated from {part}")
    for words, numbers in _numbers(report, lambda rung: rung.compared).items():
        if words != "logits":
            notes.append(f"Δ of rung {numbers}: {words} only, not the logits")
    return [Text(note, style=FAINT) for note in notes]


def _numbers(report: LadderReport, key: Callable[[RungReport], Any]) -> dict[Any, str]:
    """`1, 2`: the numbers of the rungs by what `key` says of them, where it says anything."""
    found: dict[Any, str] = {}
    for rung in report.rungs:
        if (words := key(rung)) is not None:
            found[words] = f"{found[words]}, {rung.number}" if words in found else str(rung.number)
    return found


def _checks(report: LadderReport) -> list[RenderableType]:
    """One line where every rung agrees with the one before, else one for each that does not."""
    compared = [rung for rung in report.rungs if rung.difference is not None]
    if not report.ok:
        return [verdict(rung) for rung in report.rungs if not rung.ok]
    if not compared or report.interrupted:
        return []
    where = ", where they were compared" if any(r.compared != "logits" for r in compared) else ""
    words = f"✓ every rung agrees with the one before{where} ({report.dtype})"
    return [Text(words, style=_GOOD)]


def verdict(rung: RungReport) -> Text:
    """The difference from the rung before, and whether rounding explains it."""
    words = (
        f"rung {rung.number}: {rung.compared} differ from the rung before by at most "
        f"{rung.difference:.1e}, allowed for rounding: {rung.allowed:.1e}"
    )
    return Text(f"{words} {'✓' if rung.ok else '✗'}", style=_GOOD if rung.ok else _BAD)


def _bar_lengths(rates: Sequence[float]) -> list[float]:
    """0 … 1 for each rate: the logarithm's place between the power of ten below all and the most.

    Equal factors are equal lengths, and the shortest bar is still seen.
    """
    lowest = math.floor(math.log10(min(rates)) - 0.1)
    span = math.log10(max(rates)) - lowest
    return [(math.log10(rate) - lowest) / span for rate in rates]


def _times(speedup: float | None) -> Text:
    """`1.43`, `1,234`; nothing where there is no rung before."""
    if speedup is None:
        return Text("")
    return Text(f"{speedup:.2f}" if speedup < 10 else f"{speedup:,.0f}", style=NUMBER)


def _calls(share: float, rung: RungReport) -> str:
    """Calls of products: whole numbers, those of a batch as `17/4`."""
    total = share * rung.sequences
    return scaled(total) + (f"/{rung.sequences}" if total and rung.sequences > 1 else "")


def _work_words(rung: RungReport) -> str:
    work = rung.token_work
    products = f"{_calls(work.gemv, rung)} GEMV, {_calls(work.gemm, rung)} GEMM"
    if not work.gemv and not work.gemm:
        products = "no matrix product"
    return f"{products}, {unit(work.flops, 'FLOP')}, {unit(work.bytes, 'B')}"
