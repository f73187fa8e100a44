"""Blocks of a tensor that are not of one kind with the others, as a wrong bit in a scale makes.

Two properties of each block of 32 numbers are used: how large they are (root mean square, ρ), and
how much they lean to one side, r = |mean| ÷ ρ. Of n numbers of no preferred sign, −½(n − 1)·
log(1 − r²) has the tail of an exponential distribution of scale 1 (r is Student's t in another
form); where neighbours are alike, as those of positions are, the scale is larger. log ρ has such a
tail, too, where the largest follow a power law, the widest that is seen in weights. Both scales
are those of the tensor's own largest blocks, by their median, which a few wrong ones do not move
(a robust form of Hill's estimator), and are at least those that are given here. Of the two
probabilities the product is taken, as R. A. Fisher does: P(−log p₁p₂ > x) = (1 + x)·exp(−x). A
block is an outlier where fewer than `_EXPECTED` of the tensor's would be like it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 32
_FEW = 256  # of fewer blocks each number stands alone, and leans nowhere
_KEPT = 32
_EXPECTED = 1e-9  # of trained tensors none comes below 1e-4
_WIDTH = 0.1  # of log ρ at least: 17 times as large as the 32nd of them, where that is all
_WIDTH_OF_FEW = 0.36  # of single numbers, as in norms and biases: 10⁴ times as large
_LARGEST = 1e15  # 32 squares of such are finite in float32
_AT_ONCE = 1 << 17  # numbers: half a MiB of float32, which a cache holds


class Outliers:
    """Of one tensor of `count` numbers, in rows of `columns`, which come in order."""

    def __init__(self, count: int, columns: int) -> None:
        self._size = _BLOCK if count >= _FEW * _BLOCK else 1
        self._blocks = count // self._size
        self._in_a_row = columns // self._size
        self._most = min(_KEPT, self._blocks // 4)
        self._seen = 0
        self._kept = torch.empty(3, 0, dtype=torch.float64)  # log √Σx², how it leans, which it is
        self._edges = (-math.inf, -math.inf)

    def add(self, part: Tensor) -> None:
        """More numbers, in whole blocks but for the last; what is not finite counts as large."""
        if not self._most:
            return
        flat = part.reshape(-1)
        for first in range(0, len(flat), _AT_ONCE):
            piece = flat[first : first + _AT_ONCE]
            self._add(piece[: len(piece) // self._size * self._size].view(-1, self._size))

    def _add(self, x: Tensor) -> None:
        x = x.to(torch.float32)
        norms = torch.linalg.vector_norm(x, dim=1)
        if not bool(norms.sum().isfinite()):
            x = x.nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)
            norms = torch.linalg.vector_norm(x, dim=1)
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
        self._seen += len(x)

    def found(self) -> list[int]:
        """The first number of each outlier, in order; none in a row of mostly outliers."""
        if not self._most:
            return []
        few = self._size == 1
        rare = self._rarity(self._kept[0], _WIDTH_OF_FEW if few else _WIDTH)
        if not few:
            rare += self._rarity(self._kept[1], 1.0)
        which = self._kept[2, rare - rare.log1p() > math.log(self._blocks / _EXPECTED)].long()
        rows = which // max(1, self._in_a_row)
        alike = (rows[:, None] == rows).sum(1)
        alone = alike <= max(1, self._in_a_row // 2)
        return sorted((which[alone] * self._size).tolist())

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
