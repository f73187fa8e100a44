"""The ladder: what each rung changes, the table of times, the bars of the climb."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from llmcli.render.layout import Column, Dotted, Rows
from llmcli.render.letters import letter_lines
from llmcli.render.stats import duration
from llmcli.render.theme import FAINT, HEADING, NUMBER, quoted
from llmcli.reports.ladder import LadderReport, RungReport, Shown, Variant

_GOOD, _BAD, _COPY = "green", "bold red", "yellow"
_COLUMNS = (
    Column("", right=True),
    Column("rung", right=False, cut=True),
    Column("prompt", first_to_go=1),
    Column("×", first_to_go=1),
    Column("token"),
    Column("×"),
    Column("GEMV", first_to_go=2),
    Column("GEMM", first_to_go=2),
    Column("FLOPs", first_to_go=3),
    Column("bytes", first_to_go=3),
    Column("Δ"),
)


def render_ladder(report: LadderReport, model: str, *, whole: bool) -> list[RenderableType]:
    """Every rung's formula and shapes, then the table, then the bars.

    `whole`: the climb was not interrupted.
    """
    parts: list[RenderableType] = [*heading(report, model)]
    for before, rung in zip((None, *report.rungs), report.rungs, strict=False):
        parts += ["", *change(rung, before)]
    parts += ["", _table(report), *_footnotes(report, whole)]
    if report.beyond:
        parts += ["", *_beyond(report.beyond)]
    return [*parts, "", Bars(report.rungs)]


def heading(report: LadderReport, model: str) -> tuple[RenderableType, ...]:
    """The model, the tokens that were read, and what the letters stand for."""
    tokens = " ".join(quoted(token) for token in report.tokens)
    more = " ".join(quoted(token) for token in report.more)
    letters = list(letter_lines(report.letters, aliases=True))
    return (
        Text(model, style=HEADING),
        Text.assemble((tokens, NUMBER), " and then, one by one, " if more else "", (more, NUMBER)),
        Dotted(letters, style=FAINT),
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
        known = {step.formula for step in rung_before.steps} if rung_before else set()
        for step, name in _reshapings(rung.steps, known):
            table.add_row("", moved(step), _shape(step, name))
    table.add_row("", Text("token", style=FAINT), Text(_work_words(rung)))
    return [Text.assemble((f"{rung.number}  {rung.name}", HEADING), f"  {rung.title}"), table]


def _reshapings(steps: Sequence[Shown], known: set[str]) -> Iterator[tuple[Shown, str]]:
    """Steps that only change a shape; what happens to Q, K and V alike is one of them."""
    alike: dict[object, list[Shown]] = {}
    for step in steps:
        if step.source is not None and step.formula not in known:
            _, rest = _letter(step.formula)
            key = (rest, step.source, step.shape, step.strides, step.moved)
            alike.setdefault(key, []).append(step)
    for same in alike.values():
        letters = ", ".join(_letter(step.formula)[0] for step in same)
        yield same[0], letters + _letter(same[0].formula)[1]


def _letter(formula: str) -> tuple[str, str]:
    """`Q_n as 1 × h × d/h` → `Q_n` and the rest; nothing and all where it is about no such."""
    match = re.match(r"[QKV](?:_n)?(?=[ :,])", formula)
    return (match[0], formula[match.end() :]) if match else ("", formula)


def moved(step: Shown) -> Text:
    """Whether a step that changes a shape only looked at the numbers anew or moved them."""
    return Text("copy", style=_COPY) if step.moved else Text("view", style=_GOOD)


def _shape(step: Shown, name: str) -> Text:
    """`Kᵀ  [4,32] → [32,4]  strides (32,1) → (1,32)`."""
    assert step.source is not None
    shape, strides = step.source
    changed = "the same strides" if strides == step.strides else (
        f"strides {_strides(strides)} → {_strides(step.strides)}"
    )
    return Text.assemble(
        f"{name}  ", (f"{listed(shape)} → {listed(step.shape)}", NUMBER), (f"  {changed}", FAINT)
    )


def listed(shape: Sequence[int]) -> str:
    """`[4,8,32]`, in one word, so that no line ends inside; a single number is `[]`."""
    return f"[{','.join(map(str, shape))}]"


def _strides(strides: Sequence[int]) -> str:
    return f"({','.join(map(str, strides))})"


def _table(report: LadderReport) -> Rows:
    return Rows(_COLUMNS, [_row(rung) for rung in report.rungs])


def _row(rung: RungReport) -> list[Text]:
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
    ]


def _footnotes(report: LadderReport, whole: bool) -> list[RenderableType]:
    notes = [
        "token: one read after the prompt, with its matrix products and their operands' bytes",
        "×: speed-up over the rung before (near 1 it is noise), Δ: largest difference from it",
    ]
    shared = [rung for rung in report.rungs if rung.sequences > 1]
    if shared:
        numbers = ", ".join(str(rung.number) for rung in shared)
        count = shared[0].sequences
        notes.append(f"/{count}: rung {numbers} of a batch of {count} sequences, each one's share")
    for rung in report.rungs:
        if rung.estimated:
            notes.append(f"≈: rung {rung.number} is estimated from {rung.estimated}")
    apart = [rung for rung in report.rungs if rung.compared not in (None, "logits")]
    for rung in apart:
        notes.append(f"Δ of rung {rung.number}: {rung.compared} only, not the logits")
    lines: list[RenderableType] = [Text(note, style=FAINT) for note in notes]
    lines += [verdict(rung) for rung in report.rungs if not rung.ok]
    compared = [rung for rung in report.rungs if rung.difference is not None]
    if report.ok and compared and whole:
        words = f"every rung agrees with the one before ({report.dtype})"
        if apart:
            words = words.replace(" (", ", where they were compared (")
        lines.append(Text(words, style=_GOOD))
    return lines


def _beyond(variants: Sequence[Variant]) -> list[RenderableType]:
    """The decoder's step for one sequence, and what else this machine can compute it with."""
    columns = (
        Column("beyond rung 8", right=False),
        Column("next token"),
        Column("×"),
        Column("Δ logits"),
        Column("KL, nats"),
        Column("same token"),
    )
    made = [variant for variant in variants if variant.token_s is not None]
    rows = [
        [
            Text(variant.name),
            Text("-" if variant.token_s is None else duration(variant.token_s.median)),
            Text(times(variant.speedup), style=NUMBER),
            Text(f"{variant.difference:.1e}"),
            Text(f"{variant.divergence:.1e}"),
            Text("yes" if variant.same_token else "no"),
        ]
        for variant in made
    ]
    notes = [f"{v.name}: {v.what}" for v in made]
    notes += [f"{v.name}: not here: {v.missing}" for v in variants if v.token_s is None]
    return [Rows(columns, rows), *(Text(note, style=FAINT) for note in notes)]


def verdict(rung: RungReport) -> Text:
    """The difference from the rung before, and whether rounding explains it."""
    words = (
        f"rung {rung.number}: {rung.compared} differ from the rung before by at most "
        f"{rung.difference:.1e}, allowed for rounding: {rung.allowed:.1e}"
    )
    return Text(f"{words} {'✓' if rung.ok else '✗'}", style=_GOOD if rung.ok else _BAD)


@dataclass(frozen=True)
class Bars:
    """Tokens per second of each rung, one token after the other, on a logarithmic scale."""

    rungs: Sequence[RungReport]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [f"{rung.number} {rung.name}" for rung in self.rungs]
        rates = [1 / rung.token_s.median for rung in self.rungs]
        words = [
            f"{'≈' if rung.estimated else ''}{scaled(rate)} tok/s"
            for rung, rate in zip(self.rungs, rates, strict=True)
        ]
        left, right = max(map(len, names)), max(map(len, words))
        room = max(8, min(60, options.max_width - left - right - 2))
        yield Text("tokens per second after the prompt, on a logarithmic scale", style=FAINT)
        for name, length, word in zip(names, bar_lengths(rates), words, strict=True):
            bar = "█" * max(1, round(length * room))
            yield Text.assemble(f"{name:<{left}} ", (bar, NUMBER), f" {word}", no_wrap=True)


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


def scaled(value: float) -> str:
    """`37`, `0.25`, `36.2 M`: three digits and a unit's prefix."""
    scales = ((" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3))
    for prefix, scale in scales:
        if value >= scale * 0.9995:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"
