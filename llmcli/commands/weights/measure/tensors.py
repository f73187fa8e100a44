"""Norms, spectra and damage of parameters, read from their weights some rows at a time.

A block (of the format, or 32 columns of a row) is judged by the mean |w − mean| of its numbers
without the largest: by how many powers of 2 it is off, relative to the medians of its row and of
its column, which outlier dimensions raise, and beyond the blocks beside it. Measured, the most of
all blocks of SmolLM2 and tiny, as they are and as Q4_0 and Q8_0: 2^2, without
the neighbours 2^3.4; of single numbers: 2^4.4.

Axes: N rows, K columns, R blocks of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
    effective_rank,
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

BLOCK, FEWEST = 32, 16  # columns of a block where a format has none; of fewer a scale is unsure
# Powers of 2 by which a block is off; a number, or a block without neighbours; a vector's number
LIMIT, FEW_LIMIT, VECTOR_LIMIT = 2.5, 6.0, 20.0
LONE = 4.0  # of a number beyond the scale of its block, which then is not judged
DEVIATIONS = 8.0  # and at least so many standard deviations, by the median |power|
UNUSUAL = 2.5  # times what is expected: of those the largest are outliers
TABLES = ("embed.W", "head.W", "pos_embed.W")  # rows of unused tokens may be 0
NAMED = "`llmcli weights` names the first of each parameter"
LISTED = 8  # places of a parameter, outliers of a model


@dataclass(frozen=True)
class Matrix:
    """A matrix `[N, K]` of a parameter, of one `expert`, or a vector `[N, 1]`; yields its rows."""

    name: str
    weight: Weight
    expert: int | None = None

    @classmethod
    def each(cls, model: Model, name: str) -> list[Matrix]:
        """The matrices of a parameter: one, or one for each expert, whose number ends its name."""
        weight = model.decoder.weight(name)
        if len(weight.shape) < 3:
            return [cls(name, weight)]
        return [cls(f"{name}[{expert}]", weight, expert) for expert in range(weight.shape[0])]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, columns = (*self.weight.shape[-2:], 1)[:2]
        return rows, columns

    def __iter__(self) -> Iterator[Tensor]:
        step = max(1, AT_ONCE // self.shape[1])
        return (self.rows(first, first + step) for first in range(0, self.shape[0], step))

    def rows(self, first: int, stop: int) -> Tensor:
        """Those rows, `[n, K]`, in float64 on the CPU; an expert is dequantized as a whole."""
        if self.expert is None:
            return exact(self.weight.dense(rows=slice(first, stop))).view(-1, self.shape[1])
        return exact(self.weight.dense(rows=slice(self.expert, self.expert + 1))[0, first:stop])


class Scan:
    """One pass over a matrix; what is not finite counts as 0, but for `numbers`.

    `spread_NR` and `top_NR`: powers of 2 of the scale of each block (see the module) and of its
    largest |w|, NaN for 0. `squares_N`, `squares_K`: of rows and columns. `product_N`: with `x_K`.
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
            sizes = (apart_nRB.sum(-1) - apart_nRB.amax(-1)) / self.block, w_nRB.abs().amax(-1)
            logs = (of.where(of > 0, math.nan).log2().float() for of in sizes)
            found.append((w.square().sum(1), w @ x_K, *logs))
        self.squares_N, self.product_N, self.spread_NR, self.top_NR = map(
            torch.cat, zip(*found, strict=True)
        )

    def findings(self) -> tuple[list[Finding], list[Finding]]:
        """What no training makes, and what stands out most: a block, a number, a row, a column."""
        (rows, columns), bad, name = self.matrix.shape, self.numbers.first_bad, self.matrix.name
        damage, most = list[Finding](), list[Finding]()
        if bad is not None:
            (row, column), many = divmod(bad, columns), self.numbers.nan + self.numbers.infinite
            damage.append(Finding(name, "not finite", row, (column, column), places=many))
        zeros = (self.squares_N == 0).nonzero().flatten().tolist()
        if zeros and columns > 1 and bad is None and name not in TABLES:
            damage.append(Finding(name, "zeros", zeros[0], places=len(zeros)))
        off_NR, number_NR = _off(self.spread_NR), _off(self.top_NR)
        block_NR = _beyond_neighbours(off_NR).where(off_NR.abs() < FEW_LIMIT, off_NR)
        block_NR = block_NR * (self.block >= FEWEST)
        large_NR = number_NR > _limit(number_NR, FEW_LIMIT if columns > 1 else VECTOR_LIMIT)
        large_NR &= ~(self.top_NR - self.spread_NR < LONE)
        wrong_NR = block_NR.abs() > _limit(off_NR, LIMIT if off_NR.shape[1] > 2 else FEW_LIMIT)
        for find, off, wrong in (
            (self._block, block_NR, wrong_NR & ~large_NR), (self._number, number_NR, large_NR)
        ):  # fmt: skip
            places = wrong.nonzero().tolist()
            damage += (find(off, row, at, len(places)) for row, at in places[:LISTED])
            at = int((off if find == self._number else off.abs()).argmax())
            most.append(find(off, *divmod(at, off.shape[1]), 1))
        row_N, column_K = (self.squares_N / columns).sqrt(), (self.squares_K / rows).sqrt()
        row, column = int(row_N.argmax()), int(column_K.argmax())
        sizes = float(row_N[row]), float(row_N.median())
        most.append(Finding(name, "row", row, None, *sizes))
        sizes = float(column_K[column]), float(column_K.median())
        most.append(Finding(name, "column", None, (column, column), *sizes))
        return damage, most if columns > 1 else []

    def _block(self, off_NR: Tensor, row: int, at: int, places: int) -> Finding:
        columns = at * self.block, (at + 1) * self.block - 1
        sizes = _sizes(self.spread_NR[row, at], off_NR[row, at])
        return Finding(self.matrix.name, "block", row, columns, *sizes, places)

    def _number(self, off_NR: Tensor, row: int, at: int, places: int) -> Finding:
        """The largest number of a block."""
        own_K = self.matrix.rows(row, row + 1)[0, at * self.block :][: self.block]
        column = at * self.block + int(own_K.nan_to_num(0.0, 0.0, 0.0).abs().argmax())
        sizes = _sizes(self.top_NR[row, at], off_NR[row, at])
        return Finding(self.matrix.name, "number", row, (column, column), *sizes, places)


def _sizes(log: Tensor, off: Tensor) -> tuple[float, float]:
    """A size and what is expected, from powers of 2."""
    return 2.0 ** float(log), 2.0 ** float(log - off)


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
    total, seen, generator = model.parameter_count, 0, torch.Generator()
    rows, damaged, outliers = list[TensorRow](), list[Finding](), list[Finding]()
    off, roundings = dict[str, float](), torch.finfo(torch.float32).eps
    for name in model.decoder.weight_names:
        weight, scans, wrong = model.decoder.weight(name), list[Scan](), list[Finding]()
        x_1K = None
        if len(weight.shape) == 2:  # a fixed input of its products
            x_1K = torch.randn(1, weight.shape[1], generator=generator.manual_seed(0))
            x_1K = weight.quantized_input(x_1K.to(weight.memory()[0].device))
            roundings = torch.finfo(torch.promote_types(x_1K.dtype, torch.float32)).eps
        for matrix in Matrix.each(model, name):
            scans.append(Scan(matrix, None if x_1K is None else exact(x_1K)[0]))
            found, most = scans[-1].findings()
            wrong += found
            outliers += [] if found else [one for one in most if one.ratio > UNUSUAL]
            seen += scans[-1].numbers.seen
            progress("reading weights", seen, total)
        damaged += (replace(one, origin=origin(model, name)) for one in wrong)
        if x_1K is not None and not wrong:
            off[name] = distance(exact(weight.matmul_float32(x_1K))[0], scans[0].product_N)
        ends = [scan.numbers.summary(scan.matrix.shape) for scan in scans]
        layer, norm = layer_of(name), math.hypot(*(scan.numbers.norm for scan in scans))
        rows.append(TensorRow(
            name=name, kind=name if layer is None else name.split(".", 2)[2], layer=layer,
            format=weight.format, shape=weight.shape, rms=norm / math.sqrt(weight.count), norm=norm,
            largest=max(abs(end) for one in ends for end in (one["min"], one["max"])),
        ))  # fmt: skip
    outliers.sort(key=lambda one: -one.ratio)
    places = {one.place: one.places for one in damaged}
    words = f"{len(off)} matrices multiply with the numbers that were read"
    return WeightsReport(
        tensors=tuple(rows),
        damaged=tuple(damaged),
        outliers=tuple(
            one
            for kind in (("number",), ("row", "column"), ("block",))
            for one in [one for one in outliers if one.what in kind][: LISTED // 2]
        ),
        checks=(
            zero_counts("damage", "no parameter is damaged", places),
            zero_counts("read", f"{counted(total, 'number')} read once", {"": abs(seen - total)}),
            furthest("products", words, off, ROUNDINGS * roundings),
        ),
    )


def distance(theirs: Tensor, ours: Tensor) -> float:
    """‖theirs − ours‖ / ‖theirs‖; 0 of equal ones."""
    off = float((theirs - ours).norm())
    return off and off / float(theirs.norm())


def furthest(name: str, words: str, off: Mapping[str, float], tolerance: float) -> ViewCheck:
    """A check of distances by place; NaN is the furthest."""
    where = max(off, key=lambda place: (math.isnan(off[place]), off[place]), default="")
    value = off.get(where, 0.0)
    return ViewCheck(name=name, words=words, value=value, tolerance=tolerance, where=where)


def measure_spectra(model: Model, names: Sequence[str], progress: Progress) -> SpectraReport:
    """Of these parameters. Raises NotFinite."""
    each = [matrix for name in names for matrix in Matrix.each(model, name)]
    found, off = list[Spectrum](), dict[str, float]()
    for at, matrix in enumerate(each):
        numbers = Statistics()
        for part in matrix:
            numbers.add(part)
        if numbers.first_bad is not None:
            raise NotFinite(f"`{matrix.name}` has numbers that are not finite", hint=NAMED)
        sigma, norm = singular_values(matrix, matrix.shape), numbers.norm
        found.append(Spectrum(
            name=matrix.name, format=matrix.weight.format, shape=matrix.shape, norm=norm,
            rms=norm / math.sqrt(numbers.seen), singular_values=sigma,
            effective_rank=effective_rank(sigma),
            stable_rank=norm**2 / (float(sigma[0]) ** 2 or math.inf),
        ))  # fmt: skip
        off[matrix.name] = abs(float((sigma**2).sum()) - norm**2) / (norm**2 or 1.0)
        progress("decomposing", at + 1, len(each))
    words = "Σσ² is ‖W‖² of the numbers that the model multiplies with"
    check = furthest("spectrum", words, off, 1e-9)
    return SpectraReport(matrices=tuple(found), checks=(check,))


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
