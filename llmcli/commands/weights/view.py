"""Weights on a screen: norms by layer and what stands out, spectra, heads, their composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from llmcli.commands.weights.report import (
    CompositionReport,
    Finding,
    HeadCircuit,
    HeadsReport,
    SpectraReport,
    Spectrum,
    TensorRow,
    WeightsReport,
)
from llmcli.ui.grid import ColourBar, Fit, Grid
from llmcli.ui.layout import BAD, WIDEST, WRONG, Column, Line, Marked, in_words, table
from llmcli.ui.numbers import number
from llmcli.ui.palette import Ink, Scale, painted
from llmcli.ui.theme import FAINT, HEADING, one_line

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "123456789"
RMS_SCALE = Scale(low=-1.0, high=1.0, signed=True)  # powers of 2, of a matrix beside its kind
SHARES = ("least", "1 %", "25 %", "median", "75 %", "99 %", "most")
NOUNS = {
    "block": "scale of the block", "number": "the number", "row": "RMS of the row",
    "column": "RMS of the column", "zeros": "rows of zeros", "not finite": "numbers not finite",
}  # fmt: skip


def render_weights(report: WeightsReport, title: str) -> RenderableType:
    """The map of norms, a row for each kind of parameter, outliers, and damage."""
    kinds: dict[str, list[TensorRow]] = {}
    for row in report.tensors:
        kinds.setdefault(row.kind, []).append(row)
    several = [rows for rows in kinds.values() if len(rows) > 1 and rows[0].scales is not None]
    columns: list[tuple[Column, Callable[[list[TensorRow]], str]]] = [
        (Column("parameter", right=False), lambda of: of[0].kind + f" × {len(of)}" * (len(of) > 1)),
        (Column("shape", right=False, drop=5), lambda of: " × ".join(map(str, of[0].shape))),
        (Column("format", right=False, drop=4), lambda of: " + ".join({r.format: 0 for r in of})),
        (Column("RMS"), lambda of: number(float(np.median([row.rms for row in of])))),
        (Column("least", drop=3), lambda of: _at(of, "rms", -1)),
        (Column("most", drop=1), lambda of: _at(of, "rms", 1)),
        (Column("largest |w|"), lambda of: _at(of, "largest", 1)),
        (Column("stable rank", drop=2), lambda of: _ranks(of)),
    ]
    parts: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    if several:
        bar = ColourBar("RMS, powers of 2 beside the median of its row", RMS_SCALE, masked="")
        parts += [_norms(several), bar, Text()]
    parts.append(table(kinds.values(), columns))
    words = ["RMS: the median of all layers", "stable rank: ‖W‖² / σ₁²", "@ layer"]
    parts.append(Line(words, FAINT))
    if report.outliers:
        parts += [Text(), Text("outliers, as trained weights have", style=HEADING)]
        parts += (Line([_words(one)]) for one in report.outliers)
    parts += [Text()] * bool(report.damaged)
    damage = (f"damaged: {_words(one)}; {one.origin}" for one in report.damaged)
    parts += (Marked(BAD, one_line(text), WRONG) for text in damage)
    return Group(*parts)


def _at(rows: Sequence[TensorRow], what: str, sign: int) -> str:
    """The least (-1) or most (1) of all layers, and the layer."""
    row = max(rows, key=lambda row: float(sign * getattr(row, what)))
    return number(getattr(row, what)) + (f" @ {row.layer}" if len(rows) > 1 else "")


def _ranks(rows: Sequence[TensorRow]) -> str:
    ranks = sorted(row.stable_rank for row in rows if row.stable_rank is not None)
    return " … ".join(dict.fromkeys(number(rank) for rank in (*ranks[:1], *ranks[-1:])))


def _norms(kinds: Sequence[Sequence[TensorRow]]) -> Fit:
    """A line for each kind of matrix, a cell for each layer."""
    layers = sorted({row.layer or 0 for rows in kinds for row in rows})
    off = np.full((len(kinds), len(layers)), np.nan)
    for line, rows in zip(off, kinds, strict=True):
        middle = float(np.median([row.rms for row in rows])) or 1.0
        for row in rows:
            line[layers.index(row.layer or 0)] = np.log2(max(row.rms, 1e-38) / middle)
    return _map([rows[0].kind for rows in kinds], layers, off, RMS_SCALE)


def _map(names: Sequence[str], layers: Sequence[int], values: np.ndarray, scale: Scale) -> Fit:
    """A line for each name, a cell for each layer or for neighbours: the furthest from 0 of them.

    `values`: `[names, layers]`, NaN where there is none.
    """

    def draw(width: int, ink: Ink) -> Iterator[RenderableType | Segment]:
        ink, gutter = Ink(ink.kind, ink.ascii, scale.signed), max(map(len, ["layer", *names])) + 2
        each = -(-2 * len(layers) // max(8, min(width, WIDEST) - gutter))
        wide = np.pad(values, ((0, 0), (0, -len(layers) % each)), constant_values=np.nan)
        groups = wide.reshape(len(values), -1, each)
        low, high = np.fmin.reduce(groups, axis=2), np.fmax.reduce(groups, axis=2)
        shown = scale.fractions(np.asarray(np.where(-low > high, low, high)))
        grid = Grid(ink=ink, gutter=gutter, before=[""])
        for name, line in zip(names, shown, strict=True):
            yield from grid.line(name, painted(line[None], ink, width=2))
        step = next(n for n in (1, 2, 5, 10, 20, 50, 100) if 2 * n >= len(str(layers[-1])) + 1)
        ticks = "".join(f"{layer:<{2 * step}}" for layer in layers[:: step * each])
        yield from grid.line("layer", [[Segment(ticks)]])

    return Fit(draw)


def _words(one: Finding) -> str:
    """`blocks.3.attn.W_q row 17 columns 64–95: scale of the block 0.83, 16 times the expected …`"""
    where = one.name + ("" if one.expert is None else f"[{one.expert}]")
    where += "" if one.row is None else f" row {one.row}"
    if one.columns is not None:
        first, last = one.columns
        where += f" column {first}" if first == last else f" columns {first}–{last}"
    words = f"{where}: {NOUNS[one.what]} {number(one.value)}"
    if one.what in ("zeros", "not finite"):
        return f"{where}: {one.places} {NOUNS[one.what]}, this is the first"
    if one.expected > 0:
        words += f", {number(one.value / one.expected)} times the expected {number(one.expected)}"
    if one.what == "block" and one.scales is not None:
        low, middle, high = map(number, one.scales)
        words += f"; scales of the parameter {low} (1 %), {middle} (median), {high} (99 %)"
        beside = [number(median) for median in one.neighbours]
        words += f", medians of neighbouring layers {', '.join(beside)}" if beside else ""
    return words + (f"; one of {one.places} such places" if one.places > 1 else "")


def render_spectra(report: SpectraReport, title: str) -> RenderableType:
    """A table, and of a single matrix the spectrum, the histogram and the largest numbers."""
    columns: list[tuple[Column, Callable[[Spectrum], str]]] = [
        (Column("matrix", right=False), lambda of: of.name),
        (Column("shape", right=False, drop=3), lambda of: f"{of.shape[0]} × {of.shape[1]}"),
        (Column("format", right=False, drop=4), lambda of: of.format),
        (Column("RMS", drop=2), lambda of: number(of.rms)),
        (Column("norm"), lambda of: number(of.norm)),
        (Column("σ₁"), lambda of: number(float(of.singular_values[0]))),
        (Column("effective rank"), lambda of: number(of.effective_rank)),
        (Column("stable rank", drop=1), lambda of: number(of.stable_rank)),
        (Column("condition", drop=5), lambda of: number(of.condition)),
    ]
    parts: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    parts.append(table(report.matrices, columns, below=True))
    for one in report.matrices if len(report.matrices) == 1 else ():
        sigma, last = one.singular_values, len(one.singular_values) - 1
        places = sorted({0, min(1, last), last // 4, last // 2, last})
        marks = [f"σ[{at}] {number(float(sigma[at]))}" for at in places]
        pairs = zip(SHARES, one.quantiles, strict=True)
        largest = [f"[{row}, {column}] {number(value)}" for row, column, value in one.largest]
        parts += [
            Text(), _curve("σ", sigma), Line(["log scale of 4 decades", *marks], FAINT),
            _curve("numbers", np.array(one.counts, float)),
            Line([f"{share} {number(value)}" for share, value in pairs], FAINT),
            Line(["largest", *largest]),
        ]  # fmt: skip
    return Group(*parts)


def _curve(name: str, values: np.ndarray) -> Fit:
    """A bar for each value, or the largest of some neighbours, by its logarithm."""

    def draw(width: int, ink: Ink) -> Iterator[RenderableType]:
        each = -(-len(values) // max(8, min(width, WIDEST) - len(name) - 2))
        most = np.array([values[at : at + each].max() for at in range(0, len(values), each)])
        bars = ASCII_BARS if ink.ascii else BARS
        places = Scale(low=0.0, high=float(most.max()) or 1.0, kind="log").fractions(most)
        yield Text(f"{name}  " + "".join(bars[round(at * (len(bars) - 1))] for at in places))

    return Fit(draw)


def render_heads(report: HeadsReport, title: str) -> RenderableType:
    """A row for each head; of a single one its spectra, of a token what it writes and seeks."""
    columns: list[tuple[Column, Callable[[HeadCircuit], str]]] = [
        (Column("layer"), lambda of: str(of.layer)),
        (Column("head"), lambda of: str(of.head)),
        (Column("kv head", drop=3), lambda of: str(of.kv_head)),
        (Column("QK σ₁"), lambda of: number(float(of.qk[0]))),
        (Column("QK rank", drop=1), lambda of: f"{number(of.qk_rank)} of {len(of.qk)}"),
        (Column("OV σ₁"), lambda of: number(float(of.ov[0]))),
        (Column("OV rank", drop=2), lambda of: f"{number(of.ov_rank)} of {len(of.ov)}"),
        (Column("copying"), lambda of: f"{of.copying:+.2f}".replace("-", "−")),
    ]
    parts: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    parts.append(table(report.heads, columns, below=True))
    words = "copying: Σλ / Σ|λ| of W_U W_OV W_E (Elhage et al. 2021)"
    parts.append(Line([words, "rank: exp of the entropy of σ / Σσ", *report.notes], FAINT))
    for one in report.heads:
        if len(report.heads) == 1:
            parts += [_curve("QK σ", one.qk), _curve("OV σ", one.ov)]
        if report.token is not None:
            token, name = in_words(report.token), f"head {one.layer}.{one.head}"
            parts.append(Text(one_line(f"{name} writes for {token}"), style=HEADING))
            parts.append(Line([f"{in_words(t)} {number(value)}" for t, value in one.writes]))
            parts.append(Text(one_line(f"{name} seeks for {token}"), style=HEADING))
            parts.append(Line([f"{in_words(t)} {number(value)}" for t, value in one.seeks]))
    if report.token is not None:
        words = "writes: logits of OV times the embedding, the final norm's weight folded in"
        parts.append(Line([words, "seeks: its keys by QK", "embeddings have an RMS of 1"], FAINT))
    return Group(*parts)


def render_composition(report: CompositionReport, title: str) -> RenderableType:
    """A map of layers for each kind, and the ten strongest pairs."""
    layers = list(dict.fromkeys(layer for layer, _ in report.heads))
    at = np.array([layers.index(layer) for layer, _ in report.heads])
    parts: list[RenderableType] = [Text(one_line(title), style=HEADING)]
    most = max((pair.score for pair in report.strongest), default=0.0)
    scale = Scale(low=0.0, high=most if most > 0 else 1.0)
    for kind, scores in (("Q", report.q), ("K", report.k), ("V", report.v)):
        of_layers = np.full((len(layers), len(layers)), np.nan)
        np.fmax.at(of_layers, np.ix_(at, at), scores - report.baseline)
        parts.append(Text(f"{kind}-composition", style=HEADING))
        parts.append(_map(list(map(str, layers)), layers, of_layers, scale))
        pairs = [one for one in report.strongest if one.kind == kind]
        ends = ("{}.{} → {}.{}".format(*one.source, *one.into) for one in pairs)
        parts.append(Line([f"{w} {number(one.score)}" for w, one in zip(ends, pairs, strict=True)]))
        parts.append(Text())
    words = "down the layer that reads, across the one that writes: the most of their heads"
    parts.append(ColourBar("score minus baseline", scale, masked="none"))
    formula = f"‖W W_OV‖ / (‖W‖ ‖W_OV‖) − {number(report.baseline)}, 1/√D of random directions"
    parts.append(Line([words, formula, *report.notes], FAINT))
    return Group(*parts)
