"""What single numbers of 16 bits hide: whether a head as a whole is larger, or sharper, than it is.

Axes: H heads, t rows, T all rows of one call, G different tokens, e size of a head's value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcli.devices import float64_device

# Errors of rounding, each anywhere within half an eps, have a standard deviation of eps / √12; such
# variables are sub-Gaussian with their own variance, so that a sum of independent ones is further
# from 0 than 6.5 of its standard deviations in 1 of 10⁹ cases (2 e^(-6.5²/2)).
# Measured: sound heads need 0.17 of what is allowed here.
DEVIATIONS = 6.5 / math.sqrt(12)


@dataclass(frozen=True)
class Mixed:
    """Rows of `pattern · values`, `[H, t, e]`, and of the kernel's `z`.

    `sharper_Hte`: how `mixed_Hte` changes with the logarithm of the scale of the scores.
    `squares_Ht`: Σ_j A[i,j]² ‖v_j‖². `wide_Ht`: by how much a row may be off in float32.
    """

    mixed_Hte: Tensor
    z_Hte: Tensor
    sharper_Hte: Tensor
    squares_Ht: Tensor
    wide_Ht: Tensor
    signed: bool = False


class Averages:
    """Of some heads: Σ⟨g, z − pattern · values⟩ over all rows, for two directions g.

    g is `pattern · values` itself, along which a z lies that is too large, and its derivative by
    the scale, along which one lies whose scores were scaled otherwise. What a kernel may be off
    is, with A rounded to 16 bits and z rounded to 16 bits:

    - of z half an eps of Σ|g z|: rows of a head that looks at one key are all rounded alike
    - of A, whose roundings differ: `DEVIATIONS` of them. Rows of the same token may not differ
      (a repeated text), so that these add up, and only those of the `tokens_T` are independent.

    Of a `signed` map A is in float32, and z alone is rounded: each number of a row by itself.
    """

    def __init__(self, eps: float, heads: int, tokens_T: Tensor) -> None:
        tokens_T = tokens_T.to(float64_device(tokens_T.device))
        groups, self._group_T = torch.unique(tokens_T, return_inverse=True)
        self._eps = eps
        self._off_2H, self._sure_2H = tokens_T.new_zeros((2, 2, heads), dtype=torch.float64)
        self._spread_2HG = tokens_T.new_zeros((2, heads, len(groups)), dtype=torch.float64)

    def add(self, rows: Mixed, first: int) -> None:
        """Rows from the one that is number `first` of the call."""
        apart_Hte = rows.z_Hte - rows.mixed_Hte
        at_t = self._group_T[first : first + apart_Hte.shape[1]]
        for at, g_Hte in enumerate((rows.mixed_Hte, rows.sharper_Hte)):
            size_Ht = g_Hte.norm(dim=-1)
            self._off_2H[at] += (g_Hte * apart_Hte).sum((1, 2)).to(self._off_2H)
            parts_Hte = g_Hte * rows.mixed_Hte
            if rows.signed:
                rounded_Ht, spread_Ht = torch.zeros_like(size_Ht), parts_Hte.norm(dim=-1)
            else:
                rounded_Ht = parts_Hte.abs().sum(-1) * (self._eps / 2)
                spread_Ht = size_Ht * rows.squares_Ht.sqrt()
            self._sure_2H[at] += (rounded_Ht + size_Ht * rows.wide_Ht).sum(1).to(self._off_2H)
            spread_Ht = spread_Ht * (DEVIATIONS * self._eps)
            self._spread_2HG[at].index_add_(1, at_t, spread_Ht.to(self._off_2H))

    def shares_H(self) -> Tensor:
        """How far every head is off as a share of what is allowed, the larger of both."""
        allowed_2H = self._sure_2H + self._spread_2HG.norm(dim=-1)
        return torch.where(self._off_2H == 0, 0.0, self._off_2H.abs() / allowed_2H).amax(0)
