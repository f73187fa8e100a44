"""The ladder: the table of times with its check, and what each rung changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from llmcli.commands.ladder.report import LadderReport, RungReport, Step
from llmcli.ui.layout import Column, Line, Rows
from llmcli.ui.letters import letter_lines
from llmcli.ui.numbers import duration, scaled
from llmcli.ui.theme import FAINT, HEADING, NUMBER, quoted

_GOOD, _BAD, _COPY = "green", "bold red", "yellow"
BAR = 10  # columns of the longest bar
_COLUMNS = (
    Column("", right=True),
    Column("rung", right=False, cut=True),
    Column("prompt", drop=1),
    Column("×", drop=1),
    Column("token"),
    Column("×"),
    Column("GEMV", drop=4),
    Column("GEMM", drop=4),
    Column("FLOPs", drop=5),
    Column("bytes", drop=5),
    Column("Δ"),
    Column("tok/s", drop=3),
    Column("log scale", right=False, drop=2),
)


def render_ladder(
    report: LadderReport, model: str, *, details: bool
) -> list[RenderableType]:
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
    letters = list(letter_lines(report.letters, aliases=True))
    return (
        Text(model, style=HEADING),
        Text.assemble((tokens, NUMBER), " and then, one by one, " if more else "", (more, NUMBER)),
        Line(letters, style=FAINT),
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
        return Text.assemble(f"{code}  ", (listed(step.shape), NUMBER))
    shape, strides = step.source
    changed = (
        "the same strides"
        if strides == step.strides
        else f"strides {_strides(strides)} → {_strides(step.strides)}"
    )
    sizes = f"{listed(shape)} → {listed(step.shape)}"
    return Text.assemble(f"{code}  ", (sizes, NUMBER), (f"  {changed}", FAINT))


def listed(shape: Sequence[int]) -> str:
    """`[4,8,32]`, in one word, so that no line ends inside; a single number is `[]`."""
    return f"[{','.join(map(str, shape))}]"


def _strides(strides: Sequence[int]) -> str:
    return f"({','.join(map(str, strides))})"


def _table(report: LadderReport) -> Rows:
    rates = [1 / rung.token_s.median for rung in report.rungs]
    pairs = zip(report.rungs, bar_lengths(rates), strict=True)
    return Rows(_COLUMNS, [_row(rung, length) for rung, length in pairs])


def _row(rung: RungReport, length: float) -> list[Text]:
    about = "≈" if rung.estimated else ""
    work = rung.token_work
    difference = Text("-" if rung.difference is None else f"{rung.difference:.1e}")
    difference.stylize(_GOOD if rung.ok else _BAD)
    return [
        Text(str(rung.number)),
        Text(rung.name),
        Text(about + duration(rung.prompt_s.median)),
        Text(times(rung.prompt_speedup), style=NUMBER),
        Text(about + duration(rung.token_s.median)),
        Text(times(rung.token_speedup), style=NUMBER),
        Text(_calls(work.gemv, rung)),
        Text(_calls(work.gemm, rung)),
        Text(scaled(work.flops)),
        Text(scaled(work.bytes)),
        difference,
        Text(about + scaled(1 / rung.token_s.median)),
        Text(_bar(length), style=NUMBER),
    ]


def _bar(length: float) -> str:
    """At most `BAR` columns, in halves of one."""
    halves = max(1, round(2 * BAR * length))
    return "█" * (halves // 2) + "▌" * (halves % 2)


def _footnotes(report: LadderReport) -> list[RenderableType]:
    """What the columns are, and which rungs were only estimated."""
    notes = ["token: after the prompt; ×: over the rung before, median of pairs (1 is noise)"]
    marks = ["Δ: largest difference from it"]
    shared = [rung for rung in report.rungs if rung.sequences > 1]
    if shared:
        numbers = ", ".join(str(rung.number) for rung in shared)
        marks.append(f"rung {numbers}: a sequence's share of a batch of {shared[0].sequences}")
    notes.append("; ".join(marks))
    for part, rungs in _grouped(report.rungs, lambda rung: rung.estimated):
        plural = "rungs" if len(rungs) > 1 else "rung"
        notes.append(f"≈: {plural} {_numbers(rungs)} estimated from {part}")
    apart = [rung for rung in report.rungs if rung.compared not in (None, "logits")]
    for words, rungs in _grouped(apart, lambda rung: rung.compared):
        notes.append(f"Δ of rung {_numbers(rungs)}: {words} only, not the logits")
    return [Text(note, style=FAINT) for note in notes]


def _grouped(
    rungs: Sequence[RungReport], key: Callable[[RungReport], str | None]
) -> list[tuple[str, list[RungReport]]]:
    """Rungs by what `key` says of them, those left out of which it says nothing."""
    found: dict[str, list[RungReport]] = {}
    for rung in rungs:
        words = key(rung)
        if words is not None:
            found.setdefault(words, []).append(rung)
    return list(found.items())


def _numbers(rungs: Sequence[RungReport]) -> str:
    return ", ".join(str(rung.number) for rung in rungs)


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


def power_below(rates: Sequence[float]) -> int:
    """The power of ten at which the scale begins, so that the shortest bar is still seen."""
    return math.floor(math.log10(min(rates)) - 0.1)


def bar_lengths(rates: Sequence[float]) -> list[float]:
    """0 … 1 for each rate: the logarithm's place between the power of ten below all and the most.

    Equal factors are equal lengths.
    """
    lowest = power_below(rates)
    span = math.log10(max(rates)) - lowest
    return [(math.log10(rate) - lowest) / span for rate in rates]


def times(speedup: float | None) -> str:
    """`1.43`, `1,234`; nothing where there is no rung before."""
    if speedup is None:
        return ""
    return f"{speedup:.2f}" if speedup < 10 else f"{speedup:,.0f}"


def _calls(share: float, rung: RungReport) -> str:
    """Calls of products: whole numbers, those of a batch as `17/4`."""
    total = share * rung.sequences
    if rung.sequences == 1 or not total:
        return scaled(total)
    return f"{scaled(total)}/{rung.sequences}"


def _work_words(rung: RungReport) -> str:
    work = rung.token_work
    products = f"{_calls(work.gemv, rung)} GEMV, {_calls(work.gemm, rung)} GEMM"
    if not work.gemv and not work.gemm:
        products = "no matrix product"
    return f"{products}, {_unit(work.flops, 'FLOP')}, {_unit(work.bytes, 'B')}"


def _unit(value: float, unit: str) -> str:
    number, _, prefix = scaled(value).partition(" ")
    return f"{number} {prefix}{unit}"
