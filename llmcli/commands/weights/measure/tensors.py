"""Norms, spectra and damage of parameters, read from their weights some rows at a time.

Damage is judged by scales: the mean |w| of 32 columns of a row without the largest (or |w − mean|),
as a power of 2 relative to the medians of its row and of its columns, which outlier dimensions
raise. A trained matrix that is large somewhere is so in neighbouring blocks, too: a stored block
must stand out from those beside it. Measured, the most of all blocks of SmolLM2 (Q4_1, Q8_0) and
tiny (float16, packed): 2^1.4; of single numbers: 2^4.4. Of flipped bits that change a scale by 16
or more 140 of 140 were found in SmolLM2 (as Q4_0, Q5_1, Q8_0), by 4 seldom, by less never.

Axes: N rows, K columns, R blocks of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

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
from llmcli.inspect.formulas import ROUNDINGS
from llmcli.inspect.kernel import layer_of, origin
from llmcli.model import Model
from llmcli.records.document import ViewCheck, zero_counts
from llmcli.records.numbers import counted
from llmcli.records.work import Progress
from llmcli.weights.packed import Packed
from llmcli.weights.weight import Weight

BLOCK = 32  # columns of a scale
AT_ONCE = 1 << 22  # numbers of a part, in float64
HELD = 1 << 26  # numbers of a matrix that may be held whole
# Powers of 2 by which a block, and a single number or a block of few, must be off; and multiples of
# the standard deviation (by MAD) that these must be at least.
LIMIT, FEW_LIMIT, DEVIATIONS = 2.5, 6.0, 8.0
VECTOR_LIMIT = 2.0**20  # times the median of a vector, whose sizes differ by design
UNUSUAL = 2.5  # times what is expected: of those the largest are outliers
LEAST = 1e-38  # stands for 0 in logarithms
TABLES = ("embed.W", "head.W", "pos_embed.W")  # rows of unused tokens may be 0
LISTED = 8  # places of a parameter, outliers of a model, largest numbers of a matrix
SHARES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)


@dataclass(frozen=True)
class Matrix:
    """A matrix `[N, K]` of a parameter, of one `expert`, or a vector as a row; yields its rows."""

    weight: Weight
    expert: int | None = None

    @classmethod
    def each(cls, weight: Weight) -> list[Matrix]:
        """The matrices of a parameter: one, or one for each expert."""
        experts = range(weight.shape[0]) if len(weight.shape) == 3 else (None,)
        return [cls(weight, expert) for expert in experts]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        *_, rows, columns = (1, *self.weight.shape)
        return rows, columns

    def __iter__(self) -> Iterator[Tensor]:
        """Consecutive rows in float64 on the CPU; an expert is dequantized as a whole."""
        rows, columns = self.shape
        step = max(1, AT_ONCE // columns) if len(self.weight.shape) == 2 else rows
        for first in range(0, rows, step):
            yield from torch.split(self.rows(first, first + step), max(1, AT_ONCE // columns))

    def rows(self, first: int, stop: int) -> Tensor:
        """Those rows, `[n, K]`."""
        if len(self.weight.shape) == 2:
            return _wide(self.weight.dense(rows=slice(first, stop)))
        own = slice(None) if self.expert is None else slice(self.expert, self.expert + 1)
        return _wide(self.weight.dense(rows=own).reshape(self.shape)[first:stop])


class Facts(NamedTuple):
    """Of one matrix, see `TensorRow`; `largest`: with its index."""

    squares: float
    largest: tuple[float, tuple[int, ...]]
    scales: np.ndarray
    stable_rank: float | None


class Scan:
    """One pass over a matrix: squares of rows and columns, scales and largest |w| of blocks.

    `bad` numbers are not finite, the first in `bad_row`; they count as 0. `product_N` with
    `input_K`, and its terms' magnitudes `bound_N`.
    """

    def __init__(self, matrix: Matrix, input_K: Tensor | None = None) -> None:
        self.matrix, columns = matrix, matrix.shape[1]
        self.seen, self.bad, self.bad_row = 0, 0, -1
        self.columns_K = torch.zeros(columns, dtype=torch.float64)
        zero_K = self.columns_K if input_K is None else input_K
        padding = -columns % BLOCK
        others_R = torch.tensor([min(BLOCK, columns - at) for at in range(0, columns, BLOCK)]) - 1
        held_RB = torch.arange(columns + padding).view(-1, BLOCK) < columns
        found = []
        for x in matrix:
            good = x.isfinite()
            if not good.all():
                first = int((~good).nonzero()[0, 0]) + self.seen // columns
                self.bad_row = first if self.bad_row < 0 else self.bad_row
                self.bad += int((~good).sum())
                x = x.where(good, 0.0)
            self.seen += x.numel()
            self.columns_K += x.square().sum(0)
            size_nRB = pad(x, (0, padding)).view(len(x), -1, BLOCK)
            mean_nR1 = size_nRB.sum(-1, keepdim=True) / (others_R + 1).unsqueeze(-1)
            apart_nRB = (size_nRB - mean_nR1).abs() * held_RB
            size_nRB = size_nRB.abs()
            top_nR = size_nRB.amax(-1)
            level_nR, spread_nR = (
                ((of.sum(-1) - of.amax(-1)) / others_R.clamp_min(1)).where(others_R > 0, top_nR)
                for of in (size_nRB, apart_nRB)
            )
            terms = x @ zero_K, x.abs() @ zero_K.abs()
            found.append((x.square().sum(1), top_nR, level_nR, spread_nR, *terms))
        rows, tops, levels, spreads, products, bounds = map(torch.cat, zip(*found, strict=True))
        self.rows_N, self.top_NR, self.level_NR, self.spread_NR = rows, tops, levels, spreads
        self.product_N, self.bound_N = products, bounds
        self.squares = float(rows.sum())

    @cached_property
    def level_off_NR(self) -> Tensor:
        """Powers of 2 by which scales are off."""
        return self._off(self.level_NR)

    @cached_property
    def top_off_NR(self) -> Tensor:
        """Powers of 2 by which the largest numbers of blocks are off."""
        return self._off(self.top_NR)

    def _off(self, size_NR: Tensor) -> Tensor:
        """Relative to the medians of rows and columns, of as many as tell something."""
        log_NR = size_NR.clamp_min(LEAST).log2()
        for axis in (1, 0):
            if log_NR.shape[axis] > 2:
                log_NR = log_NR - log_NR.median(axis, keepdim=True).values
        return log_NR if max(log_NR.shape) > 2 else torch.zeros_like(log_NR)

    @cached_property
    def blocks_NR(self) -> Tensor:
        """Powers of 2 by which a block is off: too large by |w|, or (negative) small by its spread.

        Less what those beside it are, unless that is much. Formats with minima give a block without
        a scale its minimum. Where the rest of a block is rounded to 0 by its largest number, that
        is 1/32 of it from the mean.
        """
        large_NR, small_NR = self.level_off_NR, -self._off(self.spread_NR)
        own_NR = self._alone(large_NR).where(large_NR < self._limit(FEW_LIMIT), large_NR)
        less_NR = self._alone(small_NR)
        off_NR = own_NR.where(own_NR > less_NR, -less_NR)
        if 0 < self.matrix.shape[1] % BLOCK < BLOCK // 2:
            off_NR[:, -1] = 0.0  # of so few numbers the mean is no scale
        return off_NR

    def _limit(self, least: float) -> float:
        """Of narrow matrices, whose rows have no scale of their own, that of numbers for all."""
        spread = 1.4826 * float(self.level_off_NR.abs().median())
        return max(least if self.top_NR.shape[1] > 2 else FEW_LIMIT, DEVIATIONS * spread)

    def _alone(self, off_NR: Tensor) -> Tensor:
        """How far they are above 0 and above the blocks beside those stored together, or 0."""
        stored = FORMATS.get(self.matrix.weight.format)
        each = max(1, stored.block // BLOCK) if stored is not None else 1
        before = torch.arange(off_NR.shape[1]) // each * each
        after = (before + each + 1).clamp_max(off_NR.shape[1] + 1)
        padded = pad(off_NR, (1, 1)).clamp_min(0)
        return (off_NR - torch.maximum(padded[:, before], padded[:, after])).clamp_min(0)

    def damage(self, name: str) -> Iterator[Finding]:
        """What no training makes; see the module."""
        of, vector = partial(self._found, name), len(self.matrix.weight.shape) == 1
        if self.bad:
            yield of("not finite", self.bad_row, None, math.nan, 0.0, self.bad)
        zeros = (self.rows_N == 0).nonzero().flatten().tolist()
        if zeros and not (vector or self.bad or name in TABLES):
            yield of("zeros", zeros[0], None, 0.0, 0.0, len(zeros))
        if vector:
            typical = float(self.matrix.rows(0, 1).abs().median())
            if typical and float(self.top_NR.max()) > typical * VECTOR_LIMIT:
                yield self._number(name, int(self.top_NR.argmax()))
            return
        block_NR = self.blocks_NR.abs() > self._limit(LIMIT)
        number_NR = (self.top_off_NR > self._limit(FEW_LIMIT)) & ~block_NR
        runs: list[list[int]] = []  # row, first block, and the one after the last
        for row, block in block_NR.nonzero().tolist():
            if runs and runs[-1][::2] == [row, block]:
                runs[-1][2] += 1
            else:
                runs.append([row, block, block + 1])
        for row, block, stop in runs[:LISTED]:
            yield self._block(name, row, block, stop, len(runs))
        places = number_NR.flatten().nonzero().flatten().tolist()
        yield from (self._number(name, place, len(places)) for place in places[:LISTED])

    def extremes(self, name: str) -> Iterator[Finding]:
        """The row, the column, the block and the number that stand out most."""
        rows, columns = self.matrix.shape
        row_N, column_K = (self.rows_N / columns).sqrt(), (self.columns_K / rows).sqrt()
        row, column = int(row_N.argmax()), int(column_K.argmax())
        yield self._found(name, "row", row, None, float(row_N[row]), float(row_N.median()))
        sizes = float(column_K[column]), float(column_K.median())
        yield self._found(name, "column", None, (column, column), *sizes)
        yield self._number(name, int(self.top_off_NR.argmax()))
        row, block = divmod(int(self.blocks_NR.abs().argmax()), self.top_NR.shape[1])
        yield self._block(name, row, block, block + 1)

    def facts(self) -> Facts:
        """What is kept of it."""
        one = self._number("", int(self.top_NR.argmax()))
        index = (one.expert, one.row, *(one.columns or ())[:1])
        scales = np.quantile(self.level_NR.numpy(), (0.01, 0.5, 0.99))
        rank = None if len(self.matrix.weight.shape) == 1 else self._stable_rank()
        return Facts(
            self.squares, (one.value, tuple(n for n in index if n is not None)), scales, rank
        )

    def _block(self, name: str, row: int, block: int, stop: int, places: int = 1) -> Finding:
        """The blocks of a row up to `stop`, by the first of them."""
        power = float(self.blocks_NR[row, block])
        value = float((self.level_NR if power > 0 else self.spread_NR)[row, block])
        columns = block * BLOCK, min(stop * BLOCK, self.matrix.shape[1]) - 1
        expected = max(value, LEAST) / 2**power
        return self._found(name, "block", row, columns, value, expected, places)

    def _number(self, name: str, place: int, places: int = 1) -> Finding:
        """The largest of a block, counted row by row."""
        row, block = divmod(place, self.top_NR.shape[1])
        own_B = self.matrix.rows(row, row + 1)[0, block * BLOCK : (block + 1) * BLOCK]
        column = block * BLOCK + int(own_B.nan_to_num(0.0, 0.0, 0.0).abs().argmax())
        value = float(self.top_NR[row, block])
        expected = value / 2 ** float(self.top_off_NR[row, block])
        return self._found(name, "number", row, (column, column), value, expected, places)

    def _found(
        self, name: str, what: What, row: int | None, columns: tuple[int, int] | None,
        value: float, expected: float, places: int = 1,
    ) -> Finding:  # fmt: skip
        return Finding(
            name=name, what=what, expert=self.matrix.expert, row=row, columns=columns,
            value=value, expected=expected, places=places,
        )  # fmt: skip

    def _stable_rank(self) -> float | None:
        """‖W‖² / σ₁², σ₁ by 8 steps with 4 vectors; None where numbers are missing or overflow."""
        rows, columns = self.matrix.shape
        if self.bad or not 1e-30 < self.squares < 1e30:
            return None
        vectors_Kn = torch.randn(columns, 4, generator=torch.Generator().manual_seed(0))
        parts: Iterable[Tensor] = (part.float() for part in self.matrix)
        parts = list(parts) if rows * columns <= HELD else self.matrix
        for _ in range(8):
            basis_Kn = torch.linalg.qr(vectors_Kn).Q
            vectors_Kn = torch.zeros_like(basis_Kn)
            gram_nn = torch.zeros(basis_Kn.shape[1], basis_Kn.shape[1])
            for part in parts:
                way_Nn = part.float() @ basis_Kn
                vectors_Kn += part.float().T @ way_Nn
                gram_nn += way_Nn.T @ way_Nn
        return self.squares / float(torch.linalg.eigvalsh(gram_nn.double())[-1])


def measure_weights(model: Model, progress: Progress) -> WeightsReport:
    """Every parameter, with what is damaged in it and what is merely large.

    Holds a matrix of `HELD` numbers at most, and three numbers of each block of a larger one.
    """
    decoder, total, seen = model.decoder, model.parameter_count, 0
    rows, damaged, outliers = dict[str, TensorRow](), list[Finding](), list[Finding]()
    off: dict[str, float] = {}
    for name in decoder.weight_names:
        weight, facts = decoder.weight(name), list[Facts]()
        input_1K = _input(weight) if len(weight.shape) == 2 else None
        read_K = None if input_1K is None else _wide(weight.quantized_input(input_1K))[0]
        for matrix in Matrix.each(weight):
            scan = Scan(matrix, read_K)
            facts.append(scan.facts())
            damaged += scan.damage(name)
            outliers += scan.extremes(name) if len(weight.shape) > 1 else ()
            seen += scan.seen
            progress("reading weights", seen, total)
        if input_1K is not None:
            off[name] = _off_product(weight, input_1K, scan)
        rows[name] = _row(name, weight, facts)
    ruined = {one.name for one in damaged}
    outliers = [one for one in outliers if one.name not in ruined and one.ratio > UNUSUAL]
    outliers.sort(key=lambda one: -one.ratio)
    worst = max(off, key=off.__getitem__)
    words = f"{len(off)} matrices multiply with the numbers that were read"
    places = {_place(one): one.places for one in damaged}
    checks = (
        zero_counts("damage", "no parameter is damaged", places),
        zero_counts("read", f"{counted(total, 'number')} read once", {"": abs(seen - total)}),
        ViewCheck(name="products", words=words, value=off[worst], tolerance=1.0, where=worst),
    )
    return WeightsReport(
        tensors=tuple(rows.values()),
        damaged=tuple(_placed(model, one, rows) for one in damaged),
        outliers=tuple(
            one
            for what in (("number",), ("row", "column"), ("block",))
            for one in [one for one in outliers if one.what in what][: LISTED // 2]
        ),
        checks=checks,
    )


def _input(weight: Weight) -> Tensor:
    """A fixed input `[1, K]` of its products."""
    drawn_1K = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    like = weight.quantized_input(drawn_1K.to(weight.memory()[0].device))
    return drawn_1K.to(like.device, like.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to("cpu", torch.float64)


def _off_product(weight: Weight, input_1K: Tensor, scan: Scan) -> float:
    """How far its own product is from that of the numbers read, as a share of its roundings."""
    ours_N = _wide(weight.matmul_float32(input_1K))[0]
    wide = torch.promote_types(input_1K.dtype, torch.float32)
    roundings = ROUNDINGS + (weight.additions / 2 if isinstance(weight, Packed) else 0)
    allowed_N = roundings * torch.finfo(wide).eps * scan.bound_N + LEAST
    share_N = (ours_N - scan.product_N).abs() / allowed_N
    finite_N = ours_N.isfinite() | (scan.bad == 0)
    return float(share_N.where(finite_N, 0.0).max())


def _row(name: str, weight: Weight, facts: Sequence[Facts]) -> TensorRow:
    layer, vector = layer_of(name), len(weight.shape) == 1
    squares = sum(one.squares for one in facts)
    largest, at = max(one.largest for one in facts)
    ranks = [one.stable_rank for one in facts if one.stable_rank is not None]
    return TensorRow(
        name=name,
        kind=name if layer is None else name.split(".", 2)[2],
        layer=layer,
        format=weight.format,
        shape=weight.shape,
        rms=math.sqrt(squares / weight.count),
        norm=math.sqrt(squares),
        largest=largest,
        at=at[-1:] if vector else at,
        stable_rank=float(np.mean(ranks)) if ranks else None,
        scales=None if vector else tuple(np.median([one.scales for one in facts], 0).tolist()),
    )


def _place(one: Finding) -> str:
    at = (one.expert, one.row, one.columns[0] if one.columns else None)
    return f"{one.name}[{', '.join(str(n) for n in at if n is not None)}]"


def _placed(model: Model, one: Finding, rows: Mapping[str, TensorRow]) -> Finding:
    """With the scales of its parameter and of the same one in the layers beside it."""
    own, layer = rows[one.name], layer_of(one.name)
    beside = [] if layer is None else [f"blocks.{layer + step}.{own.kind}" for step in (-1, 1)]
    found = [rows[name].scales for name in beside if name in rows]
    beside_it = tuple(scales[1] for scales in found if scales)
    return replace(
        one, scales=own.scales, neighbours=beside_it, origin=origin(model, one.name)
    )


def measure_spectra(model: Model, names: Sequence[str], progress: Progress) -> SpectraReport:
    """Of these parameters. Raises NotFinite."""
    each = [(name, matrix) for name in names for matrix in Matrix.each(model.decoder.weight(name))]
    found, off = list[Spectrum](), dict[str, float]()
    for at, (name, matrix) in enumerate(each):
        one = _spectrum(name if matrix.expert is None else f"{name}[{matrix.expert}]", matrix)
        squares = sum(float(part.square().sum()) for part in matrix)
        off[one.name] = abs(float((one.singular_values**2).sum()) - squares) / (squares or 1.0)
        found.append(one)
        progress("decomposing", at + 1, len(each))
    worst = max(off, key=off.__getitem__)
    words = "Σσ² is ‖W‖² of the numbers that the model multiplies with"
    check = ViewCheck(name="spectrum", words=words, value=off[worst], tolerance=1e-9, where=worst)
    return SpectraReport(matrices=tuple(found), checks=(check,))


def _spectrum(name: str, matrix: Matrix) -> Spectrum:
    rows, columns = matrix.shape
    parts: Iterable[Tensor] = list(matrix) if rows * columns <= HELD else matrix
    if not all(bool(part.isfinite().all()) for part in parts):
        raise NotFinite(f"`{name}` has numbers that are not finite", dtype=matrix.weight.format)
    most = max(float(part.abs().max()) for part in parts)
    sigma = singular_values(parts, matrix.shape)
    counts, sampled = torch.zeros(64, dtype=torch.float64), list[Tensor]()
    entries: list[tuple[int, int, float]] = []
    first, step = 0, -(-rows * columns // HELD)
    for part in parts:
        counts += torch.histc(part, 64, -most or -1.0, most or 1.0)
        top = part.flatten().abs().topk(min(LISTED, part.numel())).indices.tolist()
        places = [divmod(at, columns) for at in top]
        entries += ((first + n, k, float(part[n, k])) for n, k in places)
        sampled.append(part.flatten()[::step])
        first += len(part)
    norm = float(np.sqrt((sigma**2).sum()))
    least = float(sigma[-1])
    return Spectrum(
        name=name, format=matrix.weight.format, shape=(rows, columns), norm=norm,
        rms=norm / math.sqrt(rows * columns), singular_values=sigma,
        effective_rank=effective_rank(sigma),
        stable_rank=norm**2 / float(sigma[0]) ** 2 if sigma[0] else 0.0,
        condition=float(sigma[0]) / least if least else float("inf"),
        quantiles=tuple(float(q) for q in np.quantile(torch.cat(sampled).numpy(), SHARES)),
        counts=tuple(map(int, counts)),
        largest=tuple(sorted(entries, key=lambda one: -abs(one[2]))[:LISTED]),
    )  # fmt: skip


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


def effective_rank(sigma: np.ndarray) -> float:
    """exp(−Σ p ln p), p = σ / Σσ; 0 for a matrix of zeros."""
    share = sigma[sigma > 0] / (sigma.sum() or 1.0)
    return float(np.exp(-(share * np.log(share)).sum())) if len(share) else 0.0
