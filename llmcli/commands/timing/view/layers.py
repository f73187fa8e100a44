"""The table of layers: what each part takes in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from llmcli.commands.timing.report import PhaseTime
from llmcli.ui.layout import Column, Rows
from llmcli.ui.rates import digits_for, milliseconds
from llmcli.ui.stats import duration
from llmcli.ui.theme import FAINT, HEADING

UNLIKE = 1.5  # times the median of a part over the layers, from which on a layer stands out …
LEAST = 0.02  # … where the difference is this share of a layer's time, too: small parts waver
MARK = "*"
OUTSIDE = "-"  # the row of what is in no layer

Times = dict[tuple[int | None, str], float]


def render_layers(phase: PhaseTime) -> RenderableType:
    """A row a layer, the slowest first, and a column a part; the part that takes the least time is
    the first to go.
    """
    tokens = phase.tokens if phase.name == "decode" else 1
    times = times_by_layer(phase)
    layers = sorted({layer for layer, _ in times if layer is not None})
    shares = {part.part: part.seconds for part in phase.totals}
    parts = list(shares)
    order = sorted(parts, key=lambda part: -shares[part])
    digits = digits_for([phase.seconds / tokens])

    def cell(seconds: float | None, mark: str = "") -> Text:
        if seconds is None:
            return Text()
        shown = milliseconds(seconds / tokens, digits)
        return Text(shown + mark, style="bold yellow" if mark.strip() else "")

    unlike = outliers(times, layers, parts)
    pad = " " if unlike else ""
    rows: list[list[Text]] = []
    whole = {at: sum(times.get((at, part), 0.0) for part in parts) for at in layers}
    outside = [None] if any(at is None for at, _ in times) else []
    for layer in [*sorted(layers, key=lambda at: -whole[at]), *outside]:
        own = [times.get((layer, part)) for part in parts]
        marks = [MARK if (layer, part) in unlike else pad for part in parts]
        name = OUTSIDE if layer is None else str(layer)
        of_layer = cell(sum(seconds or 0.0 for seconds in own), pad)
        rows.append([Text(name), of_layer, *map(cell, own, marks)])
    sums = [sum(times.get((layer, part), 0.0) for layer in (None, *layers)) for part in parts]
    last = [Text("all"), cell(sum(sums), pad), *(cell(seconds, pad) for seconds in sums)]
    for text in last:
        text.stylize(HEADING)
    columns = [Column("layer"), Column("all" + pad)]
    columns += [Column(part + pad, drop=1 + order.index(part)) for part in parts]
    return LayersTable(Rows(columns, [*rows, last]), tokens, bool(unlike))


@dataclass(frozen=True)
class LayersTable:
    """The rows, and what their signs mean."""

    rows: Rows
    tokens: int
    marked: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.rows
        notes = [f"milliseconds{' a token' if self.tokens > 1 else ''}; {OUTSIDE}: in no layer"]
        if self.marked:
            notes.append(f"{MARK} more than {UNLIKE:g} times the median of the layers")
        if not self.rows.fit(options.max_width):
            notes.append("the smallest parts are left out: there is no room for them")
        yield from (Text(note, style=FAINT) for note in notes)


def times_by_layer(phase: PhaseTime) -> Times:
    """Seconds by (layer, part); the gaps outside of layers are what is in no part there."""
    times: Times = {}
    for part in phase.parts:
        key = (part.layer, part.part)
        times[key] = times.get(key, 0.0) + part.seconds
    return times


def outliers(
    times: Times, layers: Sequence[int], parts: Sequence[str]
) -> set[tuple[int | None, str]]:
    """The (layer, part) that take much more than that part does in most layers."""
    if len(layers) < 3:
        return set()
    usual = median(sum(times.get((layer, part), 0.0) for part in parts) for layer in layers)
    found: set[tuple[int | None, str]] = set()
    for part in parts:
        middle = median(times.get((layer, part), 0.0) for layer in layers)
        for layer in layers:
            own = times.get((layer, part), 0.0)
            if own > UNLIKE * middle and own - middle > LEAST * usual:
                found.add((layer, part))
    return found


def layer_words(phase: PhaseTime) -> list[str]:
    """`30 layers of 1.02 ms, slowest 7 with 1.31 ms`; nothing without layers."""
    tokens = phase.tokens if phase.name == "decode" else 1
    times: dict[int, float] = {}
    for part in phase.parts:
        if part.layer is not None:
            times[part.layer] = times.get(part.layer, 0.0) + part.seconds / tokens
    if len(times) < 2:
        return []
    slowest = max(times, key=lambda layer: times[layer])
    return [
        f"{len(times)} layers of {duration(median(times.values()))}, "
        f"slowest {slowest} with {duration(times[slowest])}"
    ]
