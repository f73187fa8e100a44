"""Statistics of weights, a little at a time: of parameters in memory, and of tensors in a file.

And blocks of outliers in a tensor, as a wrong bit in a scale makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llmcli.checkpoints import Checkpoint, TensorInfo
from llmcli.inspect.statistics import Statistics, parts
from llmcli.ops.quant import DECODERS, FORMATS, PLAIN, dequantize
from llmcli.records.ledger import Numbers

_AT_ONCE = 1 << 20  # numbers that are decoded at a time: 4 MiB of float32
# What else safetensors knows and PyTorch has a type for; no model is made of them.
_OTHERS = {
    "BOOL": torch.uint8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.float32, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
}  # fmt: skip
_WIDE = ("F64", "I32", "I64", "U32", "U64")  # more digits than float32 has

_BLOCK = 32
_FEW = 256  # of fewer blocks each number stands alone, and leans nowhere
_KEPT = 32
_EXPECTED = 1e-9  # of trained tensors none comes below 1e-4
_WIDTH = 0.1  # of log ρ at least: 17 times as large as the 32nd of them, where that is all
_WIDTH_OF_FEW = 0.36  # of single numbers, as in norms and biases: 10⁴ times as large
_IMPLAUSIBLE = math.log(1e4)  # of log ρ beyond nine tenths of the blocks
_SAMPLE = 4096  # blocks, evenly spaced, whose ρ stands for that of all
_LARGEST = 1e15  # 32 squares of such are finite in float32
_HOLE = 31  # blocks of zeros in a row: as many of float32 are within any page of 4096 bytes
_HOLES = 8  # more runs of zeros, or more than a sixteenth of the rows, are the model's own
_PIECE = 1 << 17  # numbers: half a MiB of float32, which a cache holds


def parameter_numbers(stored: Tensor, *, transposed: bool) -> Numbers:
    """Statistics of a parameter as it is in memory, without a second copy of it.

    `transposed`: formulas have its transpose, and so the index of the first bad number is that.
    """
    found = Statistics()
    for part in parts(stored):
        found.add(part)
    numbers = _numbers(found, tuple(stored.shape))
    bad = numbers.first_bad
    if bad is None or not transposed:
        return numbers
    return replace(numbers, first_bad=(*bad[:-2], *bad[:-3:-1]))


def stored_numbers(
    checkpoint: Checkpoint, info: TensorInfo
) -> tuple[Numbers, list[str], list[str]] | None:
    """Statistics of a tensor as it is stored (a scale beside it left out), read in pieces.

    And the places of blocks of outliers, and of holes, where all numbers are real and finite. None
    for a format that has no decoder. Raises CheckpointError where the file has changed.
    """
    if not readable(info.format):
        return None
    found = Statistics()
    outliers = Outliers(math.prod(info.shape), info.shape[-1] if info.shape else 1)
    real = info.format in DECODERS or (
        info.format in PLAIN and PLAIN[info.format].is_floating_point
    )
    for part in _stored_parts(checkpoint, info):
        found.add(part)
        if real:
            outliers.add(part)
    shape = (*info.shape, 2) if info.format == "C64" else info.shape
    numbers = _numbers(found, shape)
    if not real or numbers.finite < numbers.count:
        return numbers, [], []
    odd, holes = (
        [f"`{info.name}[{','.join(map(str, np.unravel_index(at, shape)))}]`" for at in places]
        for places in (outliers.found(), outliers.holes())
    )
    return numbers, odd, holes


def readable(format: str) -> bool:
    """Whether numbers in that format can be read."""
    return format in PLAIN or format in DECODERS or format in _OTHERS


def _stored_parts(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Tensor]:
    """Its numbers in order; blocks have no neighbours, so that rows do not matter."""
    other = _OTHERS.get(info.format)
    elements, size = (1, other.itemsize) if other is not None else FORMATS[info.format]
    step = max(1, _AT_ONCE // elements) * size
    for start in range(0, info.nbytes, step):
        data = checkpoint.read(info.name, start, min(start + step, info.nbytes))
        if other is not None:
            yield torch.frombuffer(data, dtype=other)
            continue
        raw = torch.frombuffer(data, dtype=torch.uint8).view(1, -1)
        dtype = torch.float64 if info.format in _WIDE else torch.float32
        yield dequantize(raw, info.format, dtype=dtype)


def _numbers(found: Statistics, shape: tuple[int, ...]) -> Numbers:
    return Numbers(
        count=found.seen,
        zeros=found.zeros,
        negative_inf=found.negative,
        **found.summary(shape),
    )


class Outliers:
    """Blocks of a tensor of `count` numbers, in rows of `columns`, that are outliers.

    Two properties of each block of 32 numbers are used: its root mean square ρ, and how much it
    leans to one side, r = |mean| ÷ ρ. Of n numbers of no preferred sign, −½(n − 1)·log(1 − r²) has
    the tail of an exponential distribution of scale 1 (r is Student's t in another form); where
    neighbours are similar, as in positions, the scale is larger. log ρ has such a tail, too, where
    the largest follow a power law, the widest tail seen in weights. Both scales are estimated from
    the tensor's own largest blocks, by their median, which a few wrong ones do not move (a robust
    form of Hill's estimator), with the lower bounds `_WIDTH` and 1. The two probabilities are
    multiplied as R. A. Fisher does: P(−log p₁p₂ > x) = (1 + x)·exp(−x). A block is an outlier where
    fewer than `_EXPECTED` of the tensor's are expected to be like it, unless most of its row are.
    So is any block whose ρ is 10⁴ times what nine tenths of the tensor's stay below: many wrong
    blocks would be alike, and their own measure.
    """

    def __init__(self, count: int, columns: int) -> None:
        self._size = _BLOCK if count >= _FEW * _BLOCK else 1
        self._blocks = count // self._size
        self._in_a_row = columns // self._size
        self._most = min(_KEPT, self._blocks // 4)
        self._stride = max(1, self._blocks // _SAMPLE)
        self._sample: list[Tensor] = []  # log √Σx²
        self._seen = 0
        self._kept = torch.empty(3, 0, dtype=torch.float64)  # log √Σx², how it leans, which it is
        self._edges = (-math.inf, -math.inf)
        self._zero = torch.zeros(1, dtype=torch.bool)  # whether the last block was
        self._turns: list[Tensor] = []  # blocks where zeros begin, and end
        aligned = self._size > 1 and columns % self._size == 0
        self._most_runs = min(_HOLES, count // columns // 16) if aligned else 0

    def add(self, part: Tensor) -> None:
        """Add numbers, in whole blocks but for the last; what is not finite counts as large."""
        for piece in torch.split(part.reshape(-1), _PIECE) if self._most else ():
            self._add(piece[: len(piece) // self._size * self._size].view(-1, self._size))

    def _add(self, x: Tensor) -> None:
        x = x.to(torch.float32)
        norms = torch.linalg.vector_norm(x, dim=1)
        if not bool(norms.sum().isfinite()):
            x = x.nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)
            norms = torch.linalg.vector_norm(x, dim=1)
        zero = norms == 0
        turned = zero != torch.cat((self._zero, zero[:-1]))
        self._turns.append(turned.nonzero().view(-1) + self._seen)
        self._zero = zero[-1:]
        large = norms.log()
        lean = torch.zeros_like(large)
        if self._size > 1:  # r² = (Σ x)² ÷ n Σ x²
            share = x.mv(torch.full((self._size,), self._size**-0.5)).div_(norms).square_()
            lean = share.nan_to_num_(0.0).clamp_(max=1 - 1e-7).neg_().log1p_()
            lean.mul_(-0.5 * (self._size - 1))
        rare = ((large > self._edges[0]) | (lean > self._edges[1])).nonzero().view(-1)
        if len(rare):
            new = torch.stack((large[rare].double(), lean[rare].double(), rare + self._seen))
            kept = torch.cat((self._kept, new), 1)
            best = [row.topk(min(self._most, len(row))) for row in kept[:2]]
            chosen = torch.zeros(kept.shape[1], dtype=torch.bool)
            for one in best:
                chosen[one.indices] = True
            self._kept = kept[:, chosen]
            if kept.shape[1] >= self._most:
                self._edges = (float(best[0].values[-1]), float(best[1].values[-1]))
        self._sample.append(large[-self._seen % self._stride :: self._stride])
        self._seen += len(x)

    def found(self) -> list[int]:
        """The first number of each outlier, in order; of many alike, of the largest."""
        if not self._most:
            return []
        few = self._size == 1
        rare = self._rarity(self._kept[0], _WIDTH_OF_FEW if few else _WIDTH)
        if not few:
            rare += self._rarity(self._kept[1], 1.0)
        odd = rare - rare.log1p() > math.log(self._blocks / _EXPECTED)
        which = self._kept[2].long()
        rows = which // max(1, self._in_a_row)
        alike = (odd & (rows[:, None] == rows)).sum(1)
        odd &= alike <= max(1, self._in_a_row // 2)
        usual = torch.cat(self._sample).quantile(0.9, interpolation="lower")
        if not few and bool(usual.isfinite()):
            odd |= self._kept[0] > usual + _IMPLAUSIBLE
        return sorted((which[odd] * self._size).tolist())

    def holes(self) -> list[int]:
        """The first number of each run of zeros as parts of a file that were never written have.

        Such a run begins within a row, and does more than fill that row up, as padding does. None
        where runs other than whole rows (tokens that never occur) are many: weights were pruned.
        """
        if not self._most_runs:
            return []
        turns, row = torch.cat(self._turns), self._in_a_row
        turns = torch.cat((turns, turns.new_tensor([self._blocks] * (len(turns) % 2))))
        begin, end = turns.view(-1, 2).T
        length, apart = end - begin, (begin % row > 0) & ((end % row > 0) | (end - begin > row))
        runs = int((begin % row + end % row > 0).sum())
        few = runs <= self._most_runs and 2 * int(length.sum()) < self._blocks
        return list((begin[apart & (length >= _HOLE) & few] * self._size).tolist())

    def _rarity(self, values: Tensor, width: float) -> Tensor:
        """−log of the share of blocks that are expected beyond each value."""
        largest = values.topk(self._most).values
        edge = largest[-1]
        if not bool(edge.isfinite()):  # nearly all are zero: there is nothing to compare with
            return torch.zeros_like(values)
        width = max(width, float((largest - edge).median()) / math.log(2))
        beyond = (values - edge) / width
        least = math.log(self._blocks / self._most)
        return torch.where(beyond > 0, beyond + least, torch.zeros_like(beyond))
