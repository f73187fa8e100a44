"""States over time: norm and effective rank of every head as small curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from llmcli.commands.attention.report import LayerStates, StatesReport
from llmcli.ui.grid import Fit
from llmcli.ui.layout import Column, Line, Rows
from llmcli.ui.numbers import size
from llmcli.ui.palette import Ink
from llmcli.ui.theme import FAINT, HEADING, NUMBER, one_line

_STEPS, _ASCII_STEPS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_GAP = 3  # columns between two of a table


def render_states(report: StatesReport, title: str) -> RenderableType:
    """The model's line, and a table for each layer."""
    shown: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    new = len(report.tokens) - report.prompt_tokens
    words = [f"{len(report.tokens)} tokens" + (f", {new} of them generated" if new else "")]
    shown.append(Line([*words, f"states after {_listed(report.positions)}"], FAINT))
    for layer in report.layers:
        heading = f"layer {layer.layer} ({layer.kind}), a state of {layer.rows} × {layer.columns}"
        constant = f"{size(layer.bytes)} for all heads, however long the text"
        curves = Fit(partial(_curves, layer))
        shown += [Text(), Text(heading, style=HEADING), Line([constant], FAINT), curves]
    notes = [
        "norm: √(Σ S²), the curve from 0 to the head's most",
        "rank: exp(−Σ p ln p), p = σ / Σσ of S, the curve from 0 to the most that is possible",
    ]
    return Group(*shown, Text(), Line(notes, FAINT))


def _listed(positions: Sequence[int]) -> str:
    """`positions 8, 16 … 199`."""
    if len(positions) < 4:
        return f"position{'s' * (len(positions) > 1)} {', '.join(map(str, positions))}"
    return f"positions {positions[0]}, {positions[1]} … {positions[-1]}"


def _curves(layer: LayerStates, width: int, ink: Ink) -> Iterator[RenderableType]:
    """A row for each head; where there is little room, of fewer positions, or numbers alone."""
    most = min(layer.rows, layer.columns)
    columns = [
        Column("head"),
        Column("norm", right=False, drop=1),
        Column("last"),
        Column("rank", right=False, drop=1),
        Column("last"),
        Column(f"of {most}", drop=2),
    ]
    numbers = [(f"{head.norms[-1]:.4g}", f"{head.effective_ranks[-1]:.1f}") for head in layer.heads]
    widest = sum(max(4, *map(len, column)) for column in zip(*numbers, strict=True))
    room = (width - 4 - widest - len(columns[-1].name) - 5 * _GAP) // 2
    rows: list[list[Text | str]] = [
        [
            str(head.head),
            _curve(head.norms, max(head.norms), room, ink),
            Text(norm, style=NUMBER),
            _curve(head.effective_ranks, most, room, ink),
            Text(rank, style=NUMBER),
            Text(f"{head.effective_ranks[-1] / most:.0%}", style=FAINT),
        ]
        for head, (norm, rank) in zip(layer.heads, numbers, strict=True)
    ]
    yield Rows(columns, rows)


def _curve(values: Sequence[float], most: float, room: int, ink: Ink) -> str:
    """A sign for each value, from 0 to `most`; of fewer, the last of every few, in less room."""
    signs = _ASCII_STEPS if ink.ascii else _STEPS
    every = max(1, -(-len(values) // max(1, room)))
    kept = values[::-1][::every][::-1]
    places = [round(value / (most or 1.0) * (len(signs) - 1)) for value in kept]
    return "".join(signs[min(place, len(signs) - 1)] for place in places)
