"""Norms, spectra and damage of parameters, read from their weights some rows at a time.

A block (of the format, or 32 columns of a row) is judged by the mean |w − mean| of its numbers
without the largest: by how many powers of 2 it is off, relative to the medians of its row and of
its column, which outlier dimensions raise, and beyond the blocks beside it. Measured, the most of
all blocks of SmolLM2 and tiny, as they are and as Q4_0 and Q8_0: 2^2; without the neighbours: 2^3.4;
of single numbers: 2^4.4.

Axes: N rows, K columns, R blocks of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from llmcli.commands.weights.report import (
    Finding,
    SpectraReport,
    Spectrum,
    TensorRow,
    WeightsReport,
    What,
)
from llmcli.config.formats import FORMATS
from llmcli.errors import NotFinite
from llmcli.evaluate.rule import exact
from llmcli.inspect.formulas import ROUNDINGS
from llmcli.inspect.kernel import layer_of, origin
from llmcli.inspect.statistics import AT_ONCE, Statistics
from llmcli.model import Model
from llmcli.records.document import ViewCheck, zero_counts
from llmcli.records.numbers import counted
from llmcli.records.work import Progress
from llmcli.weights.weight import Weight

BLOCK, FEWEST = 32, 16  # columns of a block of numbers without blocks; of fewer the mean is no scale
# Powers of 2 by which a block is off; a number, or a block without neighbours; a vector's number
LIMIT, FEW_LIMIT, VECTOR_LIMIT = 2.5, 6.0, 20.0
LONE = 4.0  # of a number beyond the scale of its block, which then is not judged
DEVIATIONS = 8.0  # and at least so many standard deviations, by the median |power|
UNUSUAL = 2.5  # times what is expected: of those the largest are outliers
TABLES = ("embed.W", "head.W", "pos_embed.W")  # rows of unused tokens may be 0
LISTED = 8  # places of a parameter, outliers of a model


@dataclass(frozen=True)
class Matrix:
    """A matrix `[N, K]` of a parameter, of one `expert`, or a vector `[N, 1]`; yields its rows."""

    name: str
    weight: Weight
    expert: int | None = None

    @classmethod
    def each(cls, model: Model, name: str) -> list[Matrix]:
        """The matrices of a parameter: one, or one for each expert."""
        weight = model.decoder.weight(name)
        experts = range(weight.shape[0]) if len(weight.shape) == 3 else (None,)
        return [cls(name, weight, expert) for expert in experts]

    @property
    def label(self) -> str:
        """The name, with the number of the expert."""
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, columns = (*self.weight.shape[-2:], 1)[:2]
        return rows, columns

    def __iter__(self) -> Iterator[Tensor]:
        """Consecutive rows in float64 on the CPU; an expert is dequantized as a whole."""
        rows, columns = self.shape
        step = max(1, AT_ONCE // columns)
        for first in range(0, rows, step if self.expert is None else rows):
            last = first + step if self.expert is None else rows
            yield from torch.split(self.rows(first, last), step)

    def rows(self, first: int, stop: int) -> Tensor:
        """Those rows, `[n, K]`."""
        if self.expert is None:
            return exact(self.weight.dense(rows=slice(first, stop))).view(-1, self.shape[1])
        return exact(self.weight.dense(rows=slice(self.expert, self.expert + 1))[0, first:stop])


class Scan:
    """One pass over a matrix; what is not finite counts as 0, but for `numbers`.

    `spread_NR` and `top_NR`: powers of 2 of the scale of each block (see the module) and of its
    largest |w|, NaN for 0. `squares_N`, `squares_K`: of rows and columns. `product_N`: with an
    input `x_K`.
    """

    def __init__(self, matrix: Matrix, x_K: Tensor | None = None) -> None:
        self.matrix, columns = matrix, matrix.shape[1]
        stored = FORMATS.get(matrix.weight.format)
        each = BLOCK if stored is None else max(BLOCK, stored.block)
        self.block = each if columns % each == 0 else columns
        self.numbers, found = Statistics(), list[tuple[Tensor, ...]]()
        self.squares_K = torch.zeros(columns, dtype=torch.float64)
        x_K = self.squares_K if x_K is None else x_K
        for w in matrix:
            self.numbers.add(w)
            w = w.nan_to_num(0.0, 0.0, 0.0)
            self.squares_K += w.square().sum(0)
            w_nRB = w.view(len(w), -1, self.block)
            apart_nRB = (w_nRB - w_nRB.mean(-1, keepdim=True)).abs()
            sizes = apart_nRB.sum(-1) - apart_nRB.amax(-1), w_nRB.abs().amax(-1)
            spread, top = (of.where(of > 0, math.nan).log2().float() for of in sizes)
            found.append((w.square().sum(1), w @ x_K, spread - math.log2(self.block), top))
        self.squares_N, self.product_N, self.spread_NR, self.top_NR = map(
            torch.cat, zip(*found, strict=True)
        )

    def findings(self) -> tuple[list[Finding], list[Finding]]:
        """What no training makes, and what stands out most: a block, a number, a row, a column."""
        matrix, (rows, columns) = self.matrix, self.matrix.shape
        damage = list[Finding]()
        if (bad := self.numbers.first_bad) is not None:
            many = self.numbers.nan + self.numbers.infinite
            damage.append(self._found("not finite", bad // columns, bad % columns, places=many))
        zeros = (self.squares_N == 0).nonzero().flatten().tolist()
        if zeros and columns > 1 and bad is None and matrix.name not in TABLES:
            damage.append(self._found("zeros", zeros[0], places=len(zeros)))
        off_NR, number_NR = _off(self.spread_NR), _off(self.top_NR)
        block_NR = _beyond_neighbours(off_NR).where(off_NR.abs() < FEW_LIMIT, off_NR)
        block_NR = block_NR * (self.block >= FEWEST)
        large_NR = number_NR > _limit(number_NR, FEW_LIMIT if columns > 1 else VECTOR_LIMIT)
        large_NR &= ~(self.top_NR - self.spread_NR < LONE)
        wrong_NR = block_NR.abs() > _limit(off_NR, LIMIT if off_NR.shape[1] > 2 else FEW_LIMIT)
        for find, off, places in (
            (self._block, block_NR, (wrong_NR & ~large_NR).nonzero().tolist()),
            (self._number, number_NR, large_NR.nonzero().tolist()),
        ):
            damage += [find(row, at, off, len(places)) for row, at in places[:LISTED]]
        most = [divmod(int(of.argmax()), of.shape[1]) for of in (block_NR.abs(), number_NR)]
        row_N, column_K = (self.squares_N / columns).sqrt(), (self.squares_K / rows).sqrt()
        row, column = int(row_N.argmax()), int(column_K.argmax())
        extremes = [
            self._block(*most[0], block_NR), self._number(*most[1], number_NR),
            self._found("row", row, None, float(row_N[row]), float(row_N.median())),
            self._found("column", None, column, float(column_K[column]), float(column_K.median())),
        ]  # fmt: skip
        return damage, extremes if columns > 1 else []

    def _block(self, row: int, block: int, off_NR: Tensor, places: int = 1) -> Finding:
        value, power = 2.0 ** float(self.spread_NR[row, block]), float(off_NR[row, block])
        first = block * self.block
        return self._found("block", row, first, value, value / 2**power, places)

    def _number(self, row: int, block: int, off_NR: Tensor, places: int = 1) -> Finding:
        """The largest number of a block."""
        own_K = self.matrix.rows(row, row + 1)[0, block * self.block :][: self.block]
        column = block * self.block + int(own_K.nan_to_num(0.0, 0.0, 0.0).abs().argmax())
        value, power = 2.0 ** float(self.top_NR[row, block]), float(off_NR[row, block])
        return self._found("number", row, column, value, value / 2**power, places)

    def _found(
        self, what: What, row: int | None = None, column: int | None = None,
        value: float = 0.0, expected: float = 0.0, places: int = 1,
    ) -> Finding:  # fmt: skip
        last = None if column is None else column + (self.block - 1) * (what == "block")
        return Finding(
            name=self.matrix.label, what=what, row=row,
            columns=None if column is None or last is None else (column, last),
            value=value, expected=expected, places=places,
        )  # fmt: skip


def _off(log_NR: Tensor) -> Tensor:
    """Powers of 2 relative to the medians of rows and columns that have more than two; 0 for NaN.
    """
    off_NR = log_NR if max(log_NR.shape) > 2 else torch.zeros_like(log_NR)
    for axis in (1, 0):
        if log_NR.shape[axis] > 2:
            off_NR = off_NR - off_NR.nanmedian(axis, keepdim=True).values
    return off_NR.nan_to_num(0.0)


def _beyond_neighbours(off_NR: Tensor) -> Tensor:
    """How far blocks are off beyond 0 and both blocks beside them, 0 for those that are not."""
    padded = pad(off_NR, (1, 1))
    before, after = padded[:, :-2], padded[:, 2:]
    high, low = torch.maximum(before, after).clamp_min(0), torch.minimum(before, after).clamp_max(0)
    return (off_NR - high).clamp_min(0) + (off_NR - low).clamp_max(0)


def _limit(off_NR: Tensor, least: float) -> float:
    return max(least, DEVIATIONS * 1.4826 * float(off_NR.abs().median()))


def measure_weights(model: Model, progress: Progress) -> WeightsReport:
    """Every parameter, with what is damaged in it and what is merely large.

    Holds four numbers of each block of a matrix at a time, and `AT_ONCE` of its own.
    """
    total, seen = model.parameter_count, 0
    rows, damaged, outliers = list[TensorRow](), list[Finding](), list[Finding]()
    off, roundings = dict[str, float](), torch.finfo(torch.float32).eps
    for name in model.decoder.weight_names:
        weight, scans = model.decoder.weight(name), list[Scan]()
        input_1K = _input(weight) if len(weight.shape) == 2 else None
        read_K = None if input_1K is None else exact(weight.quantized_input(input_1K))[0]
        wrong = list[Finding]()
        for matrix in Matrix.each(model, name):
            scan = Scan(matrix, read_K)
            found, most = scan.findings()
            wrong += found
            outliers += () if found else most
            seen += scan.numbers.seen
            scans.append(scan)
            progress("reading weights", seen, total)
        damaged += [one.of(origin(model, name)) for one in wrong]
        if input_1K is not None and not wrong:
            off[name] = distance(exact(weight.matmul_float32(input_1K))[0], scan.product_N)
            roundings = torch.finfo(torch.promote_types(input_1K.dtype, torch.float32)).eps
        rows.append(_row(name, weight, scans))
    outliers = sorted((o for o in outliers if o.ratio > UNUSUAL), key=lambda one: -one.ratio)
    kinds = (("number",), ("row", "column"), ("block",))
    each = ([one for one in outliers if one.what in kind][: LISTED // 2] for kind in kinds)
    words = f"{len(off)} matrices multiply with the numbers that were read"
    return WeightsReport(
        tensors=tuple(rows),
        damaged=tuple(damaged),
        outliers=tuple(one for kind in each for one in kind),
        checks=(
            zero_counts(
                "damage", "no parameter is damaged", {one.place: one.places for one in damaged}
            ),
            zero_counts("read", f"{counted(total, 'number')} read once", {"": abs(seen - total)}),
            furthest("products", words, off, ROUNDINGS * roundings),
        ),
    )


def _input(weight: Weight) -> Tensor:
    """A fixed input `[1, K]` of its products."""
    drawn_1K = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    like = weight.quantized_input(drawn_1K.to(weight.memory()[0].device))
    return drawn_1K.to(like.device, like.dtype)


def distance(theirs: Tensor, ours: Tensor) -> float:
    """‖theirs − ours‖ / ‖theirs‖; 0 of equal ones."""
    off = float((theirs - ours).norm())
    return off and off / float(theirs.norm())


def furthest(name: str, words: str, off: Mapping[str, float], tolerance: float) -> ViewCheck:
    """A check of distances by place; NaN is the furthest."""
    where = max(off, key=lambda place: (math.isnan(off[place]), off[place]), default="")
    value = off.get(where, 0.0)
    return ViewCheck(name=name, words=words, value=value, tolerance=tolerance, where=where)


def _row(name: str, weight: Weight, scans: Sequence[Scan]) -> TensorRow:
    layer = layer_of(name)
    norm = math.hypot(*(scan.numbers.norm for scan in scans))
    ends = [scan.numbers.summary(scan.matrix.shape) for scan in scans]
    return TensorRow(
        name=name,
        kind=name if layer is None else name.split(".", 2)[2],
        layer=layer,
        format=weight.format,
        shape=weight.shape,
        rms=norm / math.sqrt(weight.count),
        norm=norm,
        largest=max(max(one["max"], -one["min"]) for one in ends),
    )


def measure_spectra(model: Model, names: Sequence[str], progress: Progress) -> SpectraReport:
    """Of these parameters. Raises NotFinite."""
    each = [matrix for name in names for matrix in Matrix.each(model, name)]
    found, off = list[Spectrum](), dict[str, float]()
    for at, matrix in enumerate(each):
        numbers = Statistics()
        for part in matrix:
            numbers.add(part)
        if numbers.first_bad is not None:
            raise NotFinite(
                f"`{matrix.label}` has numbers that are not finite", dtype=matrix.weight.format
            )
        one = Spectrum(
            name=matrix.label, format=matrix.weight.format, shape=matrix.shape, norm=numbers.norm,
            rms=numbers.norm / math.sqrt(numbers.seen),
            singular_values=singular_values(matrix, matrix.shape),
        )  # fmt: skip
        squares = float((one.singular_values**2).sum())
        off[one.name] = abs(squares - one.norm**2) / (one.norm**2 or 1.0)
        found.append(one)
        progress("decomposing", at + 1, len(each))
    words = "Σσ² is ‖W‖² of the numbers that the model multiplies with"
    return SpectraReport(
        matrices=tuple(found), checks=(furthest("spectrum", words, off, 1e-9),)
    )


def singular_values(parts: Iterable[Tensor], shape: tuple[int, int]) -> np.ndarray:
    """Of a matrix by its rows: of a large one the roots of the eigenvalues of its Gram matrix.

    Of these the smallest are exact to 1e-8 of the largest.
    """
    rows, columns = shape
    if rows * columns <= AT_ONCE:
        return np.asarray(torch.linalg.svdvals(torch.cat(list(parts))).numpy())
    if rows < columns:
        whole = torch.cat(list(parts))
        gram = whole @ whole.T
    else:
        gram = torch.zeros(columns, columns, dtype=torch.float64)
        for part in parts:
            gram += part.T @ part
    return np.asarray(torch.linalg.eigvalsh(gram).flip(0).clamp_min(0).sqrt().numpy())
