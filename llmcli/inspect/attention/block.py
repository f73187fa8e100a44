"""Some rows of the attention matrices of some heads, as the metrics read them.

Axes: H heads, t rows (queries), S keys of the block, N all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

CELLS = 1 << 23  # of a block: half a dozen tensors of that many float32 at a time


class Tokens:
    """All tokens so far, on the device where the matrices are."""

    def __init__(self, ids: list[int], device: torch.device) -> None:
        self.ids_N = torch.tensor(ids, device=device)
        self.before_N = torch.cat((self.ids_N.new_tensor([-1]), self.ids_N[:-1]))
        last: dict[int, int] = {}
        gaps = []
        for at, id in enumerate(ids):
            gaps.append(at - last[id] if id in last else len(ids) + 1)
            last[id] = at
        # how many tokens before it the last equal one stands; more than there are where none does
        self.gaps_N = torch.tensor(gaps, device=device)


@dataclass(frozen=True)
class Block:
    """Rows `first` … `first`+t-1, keys `low` … `low`+S-1; cells outside are masked.

    `a_HtS` are weights, 0 where masked. `seen_t`: how many keys each row sees. `taken_Ht`: what the
    heads' own sinks take of each row, None where there are none. `negative_Ht`: of shares of signed
    weights, how much of each row was negative.
    """

    a_HtS: Tensor
    first: int
    low: int
    seen_t: Tensor
    tokens: Tokens
    taken_Ht: Tensor | None = None
    negative_Ht: Tensor | None = None

    def shares(self) -> Block:
        """|A| / Σ_j |A| of signed weights, NaN in a row of zeros, which no metric counts."""
        sizes_HtS = self.a_HtS.abs()
        shares_HtS = sizes_HtS / sizes_HtS.sum(-1, keepdim=True)
        negative_Ht = shares_HtS.where(self.a_HtS < 0, 0.0).sum(-1)
        return replace(self, a_HtS=shares_HtS, negative_Ht=negative_Ht)

    @cached_property
    def after_tS(self) -> Tensor:
        """Which keys come after the query."""
        return self.keys_S > self.positions_t[:, None]

    @cached_property
    def positions_t(self) -> Tensor:
        """Position of every query."""
        rows = self.a_HtS.shape[1]
        return torch.arange(self.first, self.first + rows, device=self.a_HtS.device)

    @cached_property
    def keys_S(self) -> Tensor:
        """Position of every key."""
        keys = self.a_HtS.shape[2]
        return torch.arange(self.low, self.low + keys, device=self.a_HtS.device)

    @cached_property
    def entropy_Ht(self) -> Tensor:
        """`-Σ_j A_ij ln A_ij` in nats; with sinks of `A_ij / Σ_j A_ij`."""
        entropy_Ht: Tensor = torch.special.entr(self.a_HtS).sum(-1)
        if self.taken_Ht is None:
            return entropy_Ht
        return entropy_Ht / self.left_Ht + self.left_Ht.log()

    @cached_property
    def left_Ht(self) -> Tensor:
        """The sum of every row: with sinks less than 1."""
        return self.a_HtS.sum(-1)

    def back_Ht(self, steps: int) -> Tensor:
        """The weight of the key `steps` tokens before the query; 0 where it is masked."""
        return self._column((self.positions_t - steps - self.low).expand(len(self.a_HtS), -1))

    @cached_property
    def first_key_Ht(self) -> Tensor:
        """The weight of key 0."""
        return self._column((-self.low + 0 * self.positions_t).expand(len(self.a_HtS), -1))

    def _column(self, at_Ht: Tensor) -> Tensor:
        inside = (at_Ht >= 0) & (at_Ht < self.a_HtS.shape[2])
        at_Ht1 = at_Ht.clamp(0, self.a_HtS.shape[2] - 1).unsqueeze(-1)
        return torch.where(inside, self.a_HtS.gather(-1, at_Ht1)[..., 0], 0.0)

    def last_Ht(self, width: int) -> Tensor:
        """The weight of the last `width` keys, the query's own included."""
        rows = self.a_HtS.shape[1]
        begin = max(0, self.first - width + 1 - self.low)
        band = slice(begin, max(begin, self.first + rows - self.low))
        near_tS = self.keys_S[band] > self.positions_t[:, None] - width
        last_Ht: Tensor = (self.a_HtS[:, :, band] * near_tS).sum(-1)
        return last_Ht

    @cached_property
    def beyond_first(self) -> tuple[Tensor, Tensor]:
        """Without key 0: the weight of each row, and `Σ_j A_ij (i-j)`, both `[H, t]`.

        Distances are taken from the block's first row, so that long ones lose no digits.
        """
        dtype = self.a_HtS.dtype
        counts_S = (self.keys_S > 0).to(dtype)
        from_first_S = (self.keys_S - self.first).to(dtype) * counts_S
        mass_Ht, moment_Ht = (self.a_HtS @ torch.stack((counts_S, from_first_S), 1)).unbind(-1)
        offset_t = (self.positions_t - self.first).to(dtype)
        return mass_Ht, offset_t * mass_Ht - moment_Ht

    def equal_Ht(self, after: bool) -> Tensor:
        """The weight of keys whose token is the query's own (`after`: of those that follow such).

        Only earlier tokens count. Pairs of equal tokens are few: they are picked one by one.
        """
        ids_N = self.tokens.ids_N
        keys_N = self.tokens.before_N if after else ids_N
        keys_S = keys_N[self.low : self.low + self.a_HtS.shape[2]]
        rows = self.a_HtS.shape[1]
        same_tS = ids_N[self.first : self.first + rows, None] == keys_S
        earlier_tS = self.keys_S < self.positions_t[:, None] + (1 if after else 0)
        row_P, key_P = (same_tS & earlier_tS).nonzero().unbind(-1)
        found_Ht = self.a_HtS.new_zeros(self.a_HtS.shape[:2])
        return found_Ht.index_add_(1, row_P, self.a_HtS[:, row_P, key_P])

    @cached_property
    def gaps_t(self) -> Tensor:
        """How many tokens before the query the last equal one stands."""
        return self.tokens.gaps_N[self.first : self.first + self.a_HtS.shape[1]]
