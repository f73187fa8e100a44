"""Weights on a screen: norms by layer and what stands out, spectra, heads, their composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from llmcli.commands.weights import report as reports
from llmcli.commands.weights.report import Finding, TensorRow, effective_rank, strongest
from llmcli.records.document import Checked
from llmcli.ui.grid import ColourBar, Fit, Grid, ticks
from llmcli.ui.layout import BAD, WIDEST, WRONG, Column, Line, Marked, in_words, table
from llmcli.ui.numbers import number
from llmcli.ui.palette import Ink, Scale, painted
from llmcli.ui.theme import FAINT, HEADING, one_line

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "123456789"
RMS_SCALE = Scale(low=-1.0, high=1.0, signed=True)  # powers of 2, of a matrix beside its kind
LEFT_OUT = "norms without their divisors", "no biases, rotations (distance 0) and gates"
NOUNS = {"block": "scale", "number": "the number", "row": "RMS", "column": "RMS"}


def render(report: Checked, title: str) -> Group:
    """Any of the reports; `title` is the model's line."""
    views: dict[type[Checked], Callable[[Any], Iterator[RenderableType]]] = {
        reports.WeightsReport: _weights, reports.SpectraReport: _spectra,
        reports.HeadsReport: _heads, reports.CompositionReport: _composition,
    }  # fmt: skip
    return Group(_heading(title), *views[type(report)](report))


def _heading(text: str) -> Text:
    return Text(one_line(text), style=HEADING)


def _weights(report: reports.WeightsReport) -> Iterator[RenderableType]:
    """The map of norms, a row for each kind of parameter, outliers, and damage."""
    kinds: dict[str, list[TensorRow]] = {}
    for row in report.tensors:
        kinds.setdefault(row.kind, []).append(row)
    several = [rows for rows in kinds.values() if len(rows) > 1 and len(rows[0].shape) > 1]
    if several:
        off = np.full((len(several), 1 + max(row.layer or 0 for row in report.tensors)), np.nan)
        for line, rows in zip(off, several, strict=True):
            sizes = np.array([row.rms for row in rows])
            with np.errstate(divide="ignore", invalid="ignore"):
                line[[row.layer or 0 for row in rows]] = np.log2(sizes / np.median(sizes))
        yield _map([rows[0].kind for rows in several], off, RMS_SCALE)
        yield ColourBar("RMS, powers of 2 beside the median of its row", RMS_SCALE, masked="")
        yield Text()
    columns: list[tuple[Column, Callable[[list[TensorRow]], str]]] = [
        (Column("parameter", right=False), lambda of: of[0].kind + f" × {len(of)}" * (len(of) > 1)),
        (Column("shape", right=False, drop=5), lambda of: " × ".join(map(str, of[0].shape))),
        (Column("format", right=False, drop=4), lambda of: " + ".join({r.format: 0 for r in of})),
        (Column("RMS"), lambda of: number(float(np.median([row.rms for row in of])))),
        (Column("least", drop=3), lambda of: _at(min(of, key=lambda r: r.rms), "rms")),
        (Column("most", drop=1), lambda of: _at(max(of, key=lambda r: r.rms), "rms")),
        (Column("largest |w|"), lambda of: _at(max(of, key=lambda r: r.largest), "largest")),
    ]
    yield table(kinds.values(), columns)
    yield Line(["RMS: the median of all layers", "@ layer"], FAINT)
    if report.outliers:
        yield Text()
        yield _heading("outliers, as trained weights have")
    for one in report.outliers:
        yield Line([_words(one)])
    for one in report.damaged:
        yield Marked(BAD, one_line(f"damaged: {_words(one)}; {one.origin}"), WRONG)


def _at(row: TensorRow, what: str) -> str:
    return number(getattr(row, what)) + ("" if row.layer is None else f" @ {row.layer}")


def _map(names: Sequence[str], values: np.ndarray, scale: Scale) -> Fit:
    """A line for each name, a cell for each layer or for neighbours: the furthest from 0 of them.

    `values`: `[names, layers]`, NaN where there is none.
    """

    def draw(width: int, ink: Ink) -> Iterator[RenderableType | Segment]:
        ink, gutter = Ink(ink.kind, ink.ascii, scale.signed), max(map(len, ["layer", *names])) + 2
        each = -(-2 * values.shape[1] // max(8, min(width, WIDEST) - gutter))
        wide = np.pad(values, ((0, 0), (0, -values.shape[1] % each)), constant_values=np.nan)
        groups = wide.reshape(len(values), -1, each)
        low, high = np.fmin.reduce(groups, axis=2), np.fmax.reduce(groups, axis=2)
        shown = np.asarray(np.where(-low > high, low, high))
        grid = Grid(ink=ink, gutter=gutter, before=[""])
        for name, line in zip(names, painted(scale.fractions(shown), ink, width=2), strict=True):
            yield from grid.line(name, [line])
        yield from grid.line("layer", [[Segment(ticks(0, each, shown.shape[1], 2))]])

    return Fit(draw)


def _words(one: Finding) -> str:
    """`blocks.3.attn.W_q row 17 columns 64–95: scale 0.83, 16 times the expected 0.052`."""
    if one.what in ("zeros", "not finite"):
        what = "rows of zeros" if one.what == "zeros" else "numbers not finite"
        return f"{one.place}: {one.places} {what}, this is the first"
    words = f"{one.place}: {NOUNS[one.what]} {number(one.value)}"
    if one.expected > 0:
        words += f", {number(one.value / one.expected)} times the expected {number(one.expected)}"
    return words + (f"; one of {one.places} such places" if one.places > 1 else "")


def _spectra(report: reports.SpectraReport) -> Iterator[RenderableType]:
    """A table, and of a single matrix the spectrum."""
    columns: list[tuple[Column, Callable[[reports.Spectrum], str]]] = [
        (Column("matrix", right=False), lambda of: of.name),
        (Column("shape", right=False, drop=3), lambda of: f"{of.shape[0]} × {of.shape[1]}"),
        (Column("format", right=False, drop=4), lambda of: of.format),
        (Column("RMS", drop=2), lambda of: number(of.rms)),
        (Column("norm"), lambda of: number(of.norm)),
        (Column("σ₁"), lambda of: number(float(of.singular_values[0]))),
        (Column("effective rank"), lambda of: number(of.effective_rank)),
        (Column("stable rank", drop=1), lambda of: number(of.stable_rank)),
    ]
    yield table(report.matrices, columns, below=True)
    if len(report.matrices) == 1:
        yield from _curve("σ", report.matrices[0].singular_values)


def _curve(name: str, sigma: np.ndarray) -> Iterator[RenderableType]:
    """A bar for each value, or the largest of some neighbours, by its logarithm, and a legend."""

    def draw(width: int, ink: Ink) -> Iterator[RenderableType]:
        each = -(-len(sigma) // max(8, min(width, WIDEST) - len(name) - 2))
        bars = ASCII_BARS if ink.ascii else BARS
        places = Scale(low=0.0, high=float(sigma[0]) or 1.0, kind="log").fractions(sigma[::each])
        yield Text(f"{name}  " + "".join(bars[round(at * (len(bars) - 1))] for at in places))

    yield Fit(draw)
    last = len(sigma) - 1
    marks = [f"[{at}] {number(float(sigma[at]))}" for at in sorted({0, last // 4, last // 2, last})]
    yield Line(["log scale of 4 decades", *marks], FAINT)


def _heads(report: reports.HeadsReport) -> Iterator[RenderableType]:
    """A row for each head; of a single one its spectra, of a token what it writes and seeks."""
    columns: list[tuple[Column, Callable[[reports.HeadCircuit], str]]] = [
        (Column("layer"), lambda of: str(of.layer)),
        (Column("head"), lambda of: str(of.head)),
        (Column("kv head", drop=3), lambda of: str(of.kv_head)),
        (Column("QK σ₁"), lambda of: number(float(of.qk[0]))),
        (Column("QK rank", drop=1), lambda of: f"{number(effective_rank(of.qk))} of {len(of.qk)}"),
        (Column("OV σ₁"), lambda of: number(float(of.ov[0]))),
        (Column("OV rank", drop=2), lambda of: f"{number(effective_rank(of.ov))} of {len(of.ov)}"),
        (Column("copying"), lambda of: f"{of.copying:+.2f}".replace("-", "−")),
    ]
    yield table(report.heads, columns, below=True)
    words = "copying: Σλ / Σ|λ| of W_U W_OV W_E (Elhage et al. 2021)"
    yield Line([words, "rank: exp of the entropy of σ / Σσ", *LEFT_OUT], FAINT)
    for one in report.heads:
        if len(report.heads) == 1:
            yield from (*_curve("QK σ", one.qk), *_curve("OV σ", one.ov))
        for verb, tokens in (("writes", one.writes), ("seeks", one.seeks)):
            if report.token is not None:
                name = f"head {one.layer}.{one.head}"
                yield _heading(f"{name} {verb} for {in_words(report.token)}")
                yield Line([f"{in_words(t)} {number(value)}" for t, value in tokens])
    if report.token is not None:
        words = "writes: logits of OV times the embedding, the final norm's weight folded in"
        yield Line([words, "seeks: its keys by QK", "embeddings have an RMS of 1"], FAINT)


def _composition(report: reports.CompositionReport) -> Iterator[RenderableType]:
    """A map of layers for each kind, and the ten strongest pairs."""
    layers = np.array([layer for layer, _ in report.heads])
    kinds = {"Q": report.q, "K": report.k, "V": report.v}
    most = max(float(np.nan_to_num(of).max()) for of in kinds.values()) - report.baseline
    scale, own = Scale(low=0.0, high=most if most > 0 else 1.0), np.unique(layers)
    for kind, scores in kinds.items():
        of_layers = np.full((layers[-1] + 1,) * 2, np.nan)
        np.fmax.at(of_layers, np.ix_(layers, layers), scores - report.baseline)
        yield _heading(f"{kind}-composition")
        yield _map(list(map(str, own)), of_layers[own], scale)
        yield Line([
            "{}.{} → {}.{} ".format(*report.heads[source], *report.heads[into])
            + number(float(scores[into, source]) - report.baseline)
            for into, source in strongest(scores, 10)
        ])  # fmt: skip
    yield ColourBar("score minus baseline", scale, masked="none")
    words = "down the layer that reads, across the one that writes: the most of their heads"
    formula = f"‖W W_OV‖ / (‖W‖ ‖W_OV‖) − {number(report.baseline)}, 1/√D of random directions"
    yield Line([words, formula, *LEFT_OUT], FAINT)
